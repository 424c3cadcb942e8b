"""Whether a file that was made with a model, or a tokenizer, belongs to the one at hand: their fingerprints."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from mlx_llama3.model.layers.packed_linear import row
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.tokenizer.tokenizer import Tokenizer

import mlx.core as mx


def model_fingerprint(model: Transformer) -> str:
    """SHA-256 of a model's shape, its norms' weights and some rows of every kind of matrix in every layer, as hex.

    The same whether quantized weights are packed or expanded; another with another dtype of activations. A fine-tuned
    model differs in nearly all numbers; one that differs in a single row only may pass.
    """
    digest = hashlib.sha256(repr(sorted(asdict(model.args).items())).encode())
    sampled = list(_samples(model))
    digest.update(str(sampled[0].dtype).encode())
    sampled = [sample.astype(mx.float32) for sample in sampled]
    mx.eval(sampled)
    for sample in sampled:
        digest.update(np.array(sample).tobytes())
    return digest.hexdigest()


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """SHA-256, as hex, of what the ids stand for and of the rule that cuts text into them."""
    vocabulary = tokenizer.vocabulary
    digest = hashlib.sha256(vocabulary.pre_tokenizer.pattern.encode())
    for token in vocabulary.tokens:
        digest.update(len(token).to_bytes(4, "little") + token)
    digest.update(repr(sorted(vocabulary.special.items())).encode())
    return digest.hexdigest()


def _samples(model: Transformer) -> Iterator[mx.array]:
    yield model.norm.weight
    yield from _rows(model.tok_embeddings, model.args.vocab_size)
    for block in model.layers:
        yield block.attention_norm.weight
        yield block.ffn_norm.weight
        for matrix in (*block.attention.wqkv.parts, block.attention.wo):
            yield from _rows(matrix, matrix.weight.shape[0])
        for matrix in (*block.feed_forward.w13.parts, block.feed_forward.w2):
            yield from _rows(matrix, matrix.weight.shape[0])


def _rows(matrix: object, count: int) -> Iterator[mx.array]:
    return (row(matrix, index) for index in sorted({0, count // 3, count // 2, count - 1}))
