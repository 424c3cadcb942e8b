"""One file a subcommand of `mlx-llama3`: its options, and the call that runs it.

This face stays empty, because `--help` may not import MLX.
"""
