"""The heat map of norms, layers by tokens: its values in Python, its scripts and its style.

This face stays empty: code imports from the files.
"""
