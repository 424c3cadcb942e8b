"""Readers that open every kind of checkpoint as a `Source`: Meta's, Hugging Face's, GGUF, and the demo model.

`find.py` turns a name into a local path, `open.py` picks the reader for that path.
"""

from convert.sources.find import find_source
from convert.sources.open import open_source
from convert.sources.source import Source, SourceTensor

__all__ = ["Source", "SourceTensor", "find_source", "open_source"]
