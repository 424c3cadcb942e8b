"""The tabs of the right column: live norms, lens and attention, architecture, what-if, traces.

This face stays empty: code imports from the files.
"""
