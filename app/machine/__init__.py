"""`mlx-llama3 doctor` and `bench`: this machine, what serves a model on it, and how fast.

This face stays empty, because `--help` may not import MLX.
"""
