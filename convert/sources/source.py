"""The common form of every kind of checkpoint: named tensors that are read in blocks of rows.

Readers (`meta.py`, `huggingface.py`, `gguf.py`) build a `Source`, so the writers need not know the kind of checkpoint.
`rows` hides the differences: shards are merged, q and k rows are in Hugging Face's half-split RoPE order, names are
Hugging Face's.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convert.storage.stored_tensor import Checksum
from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.system.hub import cached_repository

import mlx.core as mx


@dataclass(frozen=True)
class QuantizedRows:
    """Rows of a quantized matrix, as `mx.quantize` returns them.

    weight (rows, columns * bits / 32) uint32, scales and biases (rows, columns / group_size). Modes other than
    "affine" have no biases, and their scales are uint8.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None = None


@dataclass(frozen=True)
class SourceTensor:
    """One whole tensor of a checkpoint, under its Hugging Face name, not yet read.

    `rows(start, stop)` returns rows `start` to `stop` of axis 0, of shape (stop - start, *shape[1:]): in `dtype`, or in
    float32 if the values are computed. Any range is allowed; nothing is cached between calls.

    If the tensor can be passed on quantized, `quantization` is its MLX format and `quantized_rows(start, stop)` returns
    the packed rows. `rows` then returns the values dense, in `dtype`, which may be wider than that of the scales.

    `origin` names the file (or files) and the tensor in it, for messages. `checksums` are those that the files state
    for the bytes of this tensor. `base`, if an adapter is fused into this tensor, is the tensor of the same shape
    without it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype
    origin: str
    rows: Callable[[int, int], mx.array]
    quantization: Quantization | None = None
    quantized_rows: Callable[[int, int], QuantizedRows] | None = None
    checksums: Sequence[Checksum] = ()
    base: "SourceTensor | None" = None

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor in `dtype`."""
        count = 1
        for axis in self.shape:
            count *= axis
        return count * self.dtype.size


@dataclass(frozen=True)
class Source:
    """A checkpoint that is open for reading.

    `kind` describes the checkpoint in words ("Meta checkpoint, 2 shards"). `tensors` maps Hugging Face names to
    tensors; `lm_head.weight` is among them only if the head is not tied to the embedding. `generation_config` is
    the content of generation_config.json (`bos_token_id`, `eos_token_id`, and sampling defaults if the checkpoint has
    them). `write_tokenizer(folder)` writes the tokenizer's files into a folder and returns their names, none if the
    checkpoint has no tokenizer. `notes` are sentences for the person: what was ignored, what was assumed. `files` are
    all files that are read.
    """

    path: Path
    kind: str
    args: ModelArgs
    tensors: Mapping[str, SourceTensor]
    generation_config: Mapping[str, Any]
    write_tokenizer: Callable[[Path], Sequence[str]]
    notes: Sequence[str] = field(default=())
    files: Sequence[Path] = field(default=())

    @property
    def name(self) -> str:
        """The model's name: that of its repository, folder or file."""
        path = self.path.absolute()
        path = path.parent if path.name == "original" else path
        repository, commit = cached_repository(path) or ("", "")
        return (
            repository.split("/")[1] if path.name == commit else re.sub(r"\.gguf$", "", path.name, flags=re.IGNORECASE)
        )
