"""Reading and writing GGUF: header, tensor types and their blocks, split files, and the metadata of a Llama model.

`sources/gguf.py` builds a `Source` on it.
"""

from convert.gguf.reader import GGUFError, GGUFHeader, read_header
from convert.gguf.split_files import GGUFModel, read_gguf
from convert.gguf.writer import write_gguf

__all__ = [
    "GGUFError",
    "GGUFHeader",
    "GGUFModel",
    "read_gguf",
    "read_header",
    "write_gguf",
]
