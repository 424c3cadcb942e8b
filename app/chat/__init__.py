"""The chat of the terminal: the loop, the session, its slash commands, and the screens it is shown on.

This face stays empty, because `--help` may not import MLX.
"""
