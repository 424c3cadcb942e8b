"""`mlx-llama3 trace`: writes what a model does inside to a file, and shows such a file.

This face stays empty, because `--help` may not import MLX.
"""
