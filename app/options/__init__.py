"""Options that several commands share, from the command line to the objects of the library.

This face stays empty, because `--help` may not import MLX.
"""
