"""The heat map of norms, layers by tokens: the Python that feeds it, its scripts and its style.

This face stays empty: what is needed is imported from its file.
"""
