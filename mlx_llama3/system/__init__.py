"""The machine and its files: BLAS, memory, the Hugging Face hub's cache, reading and replacing files.

Nothing here depends on a model. This file imports nothing, because OpenBLAS must be loaded before anything imports MLX.
"""
