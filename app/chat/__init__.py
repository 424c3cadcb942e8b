"""`mlx-llama3 chat`: the loop, the chat session, the slash commands, and the two screens (terminal and pipe).

This face stays empty, because `--help` may not import MLX.
"""
