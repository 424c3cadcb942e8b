"""`mlx-llama3 generate`: one prompt, or a file of prompts answered several at a time.

This face stays empty, because `--help` may not import MLX.
"""
