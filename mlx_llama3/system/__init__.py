"""The machine, and the files around a model: BLAS, memory, the hub's cache, reading and replacing files.

Nothing here knows a model. This face stays empty, because the BLAS must be loaded before anything imports MLX.
"""
