"""The commands `convert`, `verify` and `perplexity`: their options, and what they print.

This face stays empty, because `--help` may not import MLX.
"""
