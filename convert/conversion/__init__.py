"""Writes an open source as a model folder for MLX, or as a GGUF file.

A plan decides the dtype and quantization of every tensor; the tensors are then converted in blocks of rows.
"""

from convert.conversion.report import Report
from convert.conversion.to_gguf import GGUFReport
from convert.conversion.to_mlx import convert

__all__ = ["GGUFReport", "Report", "convert"]
