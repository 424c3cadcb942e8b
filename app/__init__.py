"""The program: command line, terminal chat, desktop UI.

This face stays empty, because `--help` may not import MLX.
"""
