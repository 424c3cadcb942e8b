"""Fingerprints of a model and a tokenizer, to check that a file was made with the ones in use."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict

import numpy as np

from mlx_llama3.model.layers.packed_linear import row
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.tokenizer.tokenizer import Tokenizer

import mlx.core as mx


def model_fingerprint(model: Transformer) -> str:
    """SHA-256 (hex) of a model's config, its norm weights, and up to four rows of the embedding and of each layer's
    matrices (`wq|wk|wv` and `w1|w3` count as one if they are stacked).

    It is the same whether quantized weights are dequantized or not, and differs with the dtype of the activations. A
    fine-tuned model differs in nearly all numbers; a model that differs in one row only may not be noticed.
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
    """SHA-256 (hex) of the bytes of all ids, the special tokens, and the pattern of the pre-tokenizer."""
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
