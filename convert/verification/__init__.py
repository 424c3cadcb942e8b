"""Checks of a conversion: all tensors are compared, and both models are run on the same text.

Only one layer is in memory at a time, so a model that does not fit into memory can be verified too.
"""

from convert.verification.compare import Comparison
from convert.verification.perplexity import Perplexity
from convert.verification.verify import Verification

__all__ = ["Comparison", "Perplexity", "Verification"]
