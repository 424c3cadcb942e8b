"""Reads and writes files of tensors without torch: safetensors, and torch's zip files, whose pickle is never executed.

A file or folder that is written appears complete or not at all.
"""

from convert.storage.safetensors_reader import read_safetensors
from convert.storage.safetensors_writer import SafetensorsWriter
from convert.storage.stored_tensor import StoredTensor
from convert.storage.torch_zip import read_pth

__all__ = ["SafetensorsWriter", "StoredTensor", "read_pth", "read_safetensors"]
