"""From an open source to what is written: a model folder for MLX, or a GGUF file.

A plan says what becomes of every tensor; the tensors then pass through in blocks of rows.
"""

from convert.conversion.report import Report
from convert.conversion.to_gguf import GGUFReport
from convert.conversion.to_mlx import convert

__all__ = ["GGUFReport", "Report", "convert"]
