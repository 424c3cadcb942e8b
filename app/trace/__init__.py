"""`mlx-llama3 trace`: writes a trace of a model's internal states to a file, and shows a trace file.

This face stays empty, because `--help` may not import MLX.
"""
