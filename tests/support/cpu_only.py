"""A mark for tests of the forms that only MLX's CPU backend uses: tiles, threads, dequantized weights."""

import pytest

import mlx.core as mx

cpu_only = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a form for the CPU; here is a GPU")
