"""Meta's tokenizer, loaded once for all tests of the library."""

import pytest
from tokenizer_samples import META_MODEL

from mlx_llama3.tokenizer.tokenizer import Tokenizer
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary


@pytest.fixture(scope="session")
def llama31() -> Tokenizer:
    return Tokenizer(Vocabulary.from_tokenizer_model(META_MODEL, "3.1"))


@pytest.fixture(scope="session")
def llama30() -> Tokenizer:
    return Tokenizer(Vocabulary.from_tokenizer_model(META_MODEL, "3.0"))
