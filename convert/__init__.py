"""Any published checkpoint -> one MLX model folder, and the proof that it is the same model."""

# First of all: it puts a fast BLAS in the place of MLX's own on Linux, before any module here loads MLX.
import mlx_llama3 as mlx_llama3
