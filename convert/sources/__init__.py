"""Every kind of checkpoint as one `Source`: Meta's, Hugging Face's, GGUF, and the demo model.

`find.py` goes from what a person names to a path, `open.py` from the path to the reader for it.
"""

from convert.sources.find import find_source
from convert.sources.open import open_source
from convert.sources.source import Source, SourceTensor

__all__ = ["Source", "SourceTensor", "find_source", "open_source"]
