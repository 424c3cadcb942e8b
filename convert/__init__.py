"""The converter: any published Llama 3 checkpoint -> an MLX model folder or GGUF file, and checks of the result."""

# Must be the first import: on Linux it replaces MLX's BLAS by a faster one, before any module here loads MLX.
import mlx_llama3 as mlx_llama3
