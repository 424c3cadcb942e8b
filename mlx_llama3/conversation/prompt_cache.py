"""Prompt caches: the KV cache of a prompt in a file, so that a long prompt is prefilled once and used many times.

The file is safetensors: `ids`, the prompt's tokens `(n,)`, and each layer's `KVCache.tensors` as `layers.N.NAME`. The
metadata identify the model, the tokenizer and the cache settings, and have a CRC-32 of each tensor, because damaged
keys and values would give plausible nonsense instead of an error.
"""

import json
import mmap
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from mlx_llama3.conversation.fingerprint import model_fingerprint, tokenizer_fingerprint
from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.prefix import PrefixCache
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.system.files import check_place, replacing
from mlx_llama3.system.safetensors_header import HeaderError, SafetensorsHeader, read_header
from mlx_llama3.tokenizer.tokenizer import Tokenizer

import mlx.core as mx

FORMAT = "mlx-llama3 prompt cache"
VERSION = "1"
REMAKE = "make it anew with mlx-llama3 cache"


def save(path: Path, cache: PrefixCache, model: Transformer, tokenizer: Tokenizer, *, name: str) -> None:
    """Write the file atomically; only another prompt cache is overwritten.

    name: the model's, stored for error messages.
    Raises `UserError` that names the file.
    """
    check_writable(path)
    tensors = {"ids": mx.array(cache.ids, dtype=mx.int32)}
    for number, layer in enumerate(cache.layers):
        tensors |= {f"layers.{number}.{key}": mx.contiguous(tensor) for key, tensor in layer.tensors().items()}
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "model": model_fingerprint(model),
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "settings": json.dumps(asdict(cache.settings)),
        "crc32": json.dumps({key: zlib.crc32(np.array(tensor.view(mx.uint8))) for key, tensor in tensors.items()}),
    }
    try:
        with replacing(path, ".safetensors") as partial:
            mx.save_safetensors(str(partial), tensors, metadata)
    except (OSError, RuntimeError) as error:  # MLX raises RuntimeError for a full disk, Python OSError for no folder
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{path}: cannot write the prompt cache: {reason}") from error


def load(path: Path, model: Transformer, tokenizer: Tokenizer) -> PrefixCache:
    """Load a cache that `save` wrote, ready for `PrefixCache.reuse`; its arrays are loaded when first used.

    Raises `UserError`, one line that names the file, if it is not a prompt cache, is damaged or cut off, or was made
    with another model, tokenizer or dtype.
    """
    header = _header(path)
    metadata = header.metadata
    made_with = f"{path} was made with {metadata['name']}"
    if metadata["tokenizer"] != tokenizer_fingerprint(tokenizer):
        raise UserError(f"{made_with}, whose tokenizer is another one; {REMAKE}")
    if metadata["model"] != model_fingerprint(model):
        raise UserError(f"{made_with}, and not with the weights and the dtype of this model; {REMAKE}")
    try:
        _check_content(path, header, json.loads(metadata["crc32"]))
        settings = CacheSettings(**json.loads(metadata["settings"]))
        cache = PrefixCache(model.make_cache(settings), settings)
        tensors = mx.load(str(path), format="safetensors")
        cache.ids = tensors["ids"].tolist()
        for number, layer in enumerate(cache.layers):
            prefix = f"layers.{number}."
            own = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
            layer.restore(own, len(cache.ids))
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        raise _damaged(path) from error
    return cache


def check_writable(path: Path) -> None:
    """Raise `UserError` if no prompt cache can be written to `path`; call it before loading a model."""
    check_place(path)
    if path.exists():
        try:
            check(path)
        except UserError as error:
            raise UserError(f"{path} is there and is no whole prompt cache; choose another name") from error


def check(path: Path) -> None:
    """Raise `UserError` if the file is not a prompt cache; call it before loading a model."""
    _header(path)


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged or cut off; {REMAKE}")


def _header(path: Path) -> SafetensorsHeader:
    """The header of a prompt cache that is as long as its header says."""
    try:
        header = read_header(path)
    except HeaderError as error:
        raise UserError(f"{path} is not a prompt cache, or damaged; {REMAKE}") from error
    if header.metadata.get("format") != FORMAT:
        raise UserError(f"{path} is not a prompt cache; {REMAKE}, under another name")
    if header.metadata.get("version") != VERSION:
        raise UserError(f"{path} has version {header.metadata.get('version')}; this program reads {VERSION}; {REMAKE}")
    try:
        ends = [entry["data_offsets"][1] for entry in header.entries.values()]
        is_whole = header.data_start + max(ends, default=0) == header.size
    except (TypeError, LookupError):
        is_whole = False
    if not is_whole or not {"name", "model", "tokenizer", "settings", "crc32"} <= header.metadata.keys():
        raise _damaged(path)
    return header


def _check_content(path: Path, header: SafetensorsHeader, sums: Mapping[str, int]) -> None:
    """Raise ValueError unless every tensor has its stored CRC-32."""
    if header.entries.keys() != sums.keys():
        raise ValueError("tensors are missing")
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        memoryview(data) as view,
    ):
        for key, expected in sums.items():
            first, last = header.entries[key]["data_offsets"]
            with view[header.data_start + first : header.data_start + last] as tensor:
                if zlib.crc32(tensor) != expected:
                    raise ValueError(f"{key} is damaged")
