"""`mlx-llama3 doctor` and `bench`: the machine, the kernels and caches a model uses on it, and the speed.

This face stays empty, because `--help` may not import MLX.
"""
