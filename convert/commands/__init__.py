"""The commands `convert`, `verify` and `perplexity`: their options, and what they print.

This file imports nothing, because `--help` must not load MLX.
"""
