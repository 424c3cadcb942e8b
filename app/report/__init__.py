"""`mlx-llama3 doctor --report FILE`: one file of facts about a machine and a model's kernels on it, for others to read.

This face stays empty, because `--help` may not import MLX.
"""
