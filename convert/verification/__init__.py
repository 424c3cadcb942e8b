"""The proof of a conversion: tensors compared one by one, and both models run on the same text.

It runs one layer at a time, so a model that does not fit into memory can be verified too.
"""

from convert.verification.compare import Comparison
from convert.verification.perplexity import Perplexity
from convert.verification.verify import Verification

__all__ = ["Comparison", "Perplexity", "Verification"]
