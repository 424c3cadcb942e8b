"""The record of GGUF files for which llama.cpp gave the right logits, `tests/data/llama-cpp.json`, and their writer."""

import hashlib
import json
from pathlib import Path

from convert.conversion.to_gguf import write_model
from convert.gguf.reader import read_header
from convert.sources.open import open_source
from mlx_llama3.tokenizer.vocabulary.byte_level import ALPHABET
from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

DATA = Path(__file__).parent.parent / "data"
RECORD = json.loads((DATA / "llama-cpp.json").read_text())


def made_up_vocabulary() -> Vocabulary:
    """A vocabulary of 256 tokens: all bytes but three, which three merged tokens replace."""
    return Vocabulary.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "llama-bpe",
            "tokenizer.ggml.tokens": [*ALPHABET[3:], "th", "in", "the"],
            "tokenizer.ggml.merges": ["t h", "i n", "th e"],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
        }
    )


def write(name: str, target: Path) -> None:
    """Write a checkpoint of `tests/data` as an F16 GGUF file."""
    write_model(open_source(DATA / name), made_up_vocabulary(), target, progress=False)


def digest(path: Path) -> str:
    """SHA-256 of the file without the RoPE factors at its end, whose last bit depends on the machine's `pow`."""
    factors = read_header(path).tensors.get("rope_freqs.weight")
    return hashlib.sha256(path.read_bytes()[: factors.offset if factors else None]).hexdigest()
