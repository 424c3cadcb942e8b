"""The state of each open tab, what it saves on disk, and the one thread that runs MLX for all tabs.

This face stays empty: code imports from the files.
"""
