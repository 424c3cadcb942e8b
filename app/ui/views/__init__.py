"""The tabs of the right column: live norms, lens and attention, architecture, what-if, traces.

This face stays empty: what is needed is imported from its file.
"""
