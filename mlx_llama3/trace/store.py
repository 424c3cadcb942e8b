"""`Trace`: the norms of every layer and token of a run, and other saved states, in memory and as safetensors."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from mlx_llama3.errors import UserError
from mlx_llama3.model.hooks.norms import POINTS
from mlx_llama3.system.files import replacing

FORMAT = "mlx-llama3 trace 1"
MAX_BYTES = 8 << 30  # a larger file is refused before it is read


@dataclass
class Trace:
    """The states of a run, by position.

    tokens: `(T,)` int32, those that were run through the model. pieces: the text of each token. norms: float32
    `(5, L, T)` in the order of `POINTS`. extra: if saved, `resid_post` `(L, T, dim)`, `logits` `(T, vocab)`,
    `attention/N` `(n_heads, T, T)`, float32. settings: those of the run.
    """

    model: str
    tokens: np.ndarray
    pieces: list[str]
    norms: np.ndarray
    extra: dict[str, np.ndarray] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    # `norms` is a view of this larger buffer, so that appending a token writes one column. Earlier views never change.
    _buffer: np.ndarray | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def empty(cls, model: str, n_layers: int, settings: dict[str, Any] | None = None) -> "Trace":
        """A trace without positions, to be extended during generation."""
        return cls(
            model, np.zeros(0, np.int32), [], np.zeros((len(POINTS), n_layers, 0), np.float32), {}, settings or {}
        )

    def extend(self, tokens: Sequence[int], pieces: Sequence[str], norms: np.ndarray) -> None:
        """Append positions: their ids, texts and norms `(5, L, len(tokens))`."""
        self.tokens = np.append(self.tokens, np.array(tokens, np.int32))
        self.pieces = [*self.pieces, *pieces]
        start, end = self.norms.shape[-1], self.norms.shape[-1] + norms.shape[-1]
        if self._buffer is None or end > self._buffer.shape[-1]:
            self._buffer = np.empty((*self.norms.shape[:2], max(256, 2 * end)), np.float32)
            self._buffer[..., :start] = self.norms
        self._buffer[..., start:end] = norms
        self.norms = self._buffer[..., :end]

    def truncate(self, length: int) -> None:
        """Remove positions from `length` on, and `extra`; for a conversation that was edited."""
        self.tokens, self.pieces, self.norms = self.tokens[:length], self.pieces[:length], self.norms[..., :length]
        self.extra = {}
        self._buffer = None

    def norm(self, point: str) -> np.ndarray:
        """Float32 `(L, T)` of one of `POINTS`."""
        return self.norms[POINTS.index(point)]

    def save(self, path: Path) -> None:
        """Write a safetensors file atomically: `tokens`, one `norm/POINT` each, `extra`; the rest as metadata.

        Raises `UserError` if it cannot be written.
        """
        tensors = {"tokens": self.tokens} | {f"norm/{point}": self.norm(point).copy() for point in POINTS} | self.extra
        metadata = {
            "format": FORMAT,
            "model": self.model,
            "pieces": json.dumps(self.pieces),
            "settings": json.dumps(self.settings),
        }
        try:
            with replacing(path) as partial:
                save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, partial, metadata)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: cannot be written: {error}") from None


def load_trace(path: Path) -> Trace:
    """Read a file that `Trace.save` wrote.

    Raises:
        UserError: the file does not exist, is not a trace, or has inconsistent tensors; names the file and the tensor.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.stat().st_size > MAX_BYTES:
        raise UserError(f"{path}: larger than {MAX_BYTES >> 30} GB, the limit of a trace")
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise UserError(f"{path}: not a trace of this program; expected what mlx-llama3 trace --out writes")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: cannot be read as safetensors: {error}") from None
    return _assemble(path, metadata, tensors)


def _assemble(path: Path, metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> Trace:
    for name in ("tokens", *(f"norm/{point}" for point in POINTS)):
        if name not in tensors:
            raise UserError(f"{path}: tensor {name} is missing; the file is damaged")
    tokens = tensors.pop("tokens")
    norms = [tensors.pop(f"norm/{point}") for point in POINTS]
    for point, norm in zip(POINTS, norms, strict=True):
        if norm.shape != (norms[0].shape[0], len(tokens)) or norm.dtype != np.float32:
            raise UserError(
                f"{path}: norm/{point} is {norm.dtype}{norm.shape}, expected float32 (layers, {len(tokens)})"
            )
    try:
        pieces, settings = json.loads(metadata["pieces"]), json.loads(metadata["settings"])
    except (KeyError, json.JSONDecodeError):
        raise UserError(f"{path}: its metadata has no readable pieces and settings; the file is damaged") from None
    if not isinstance(pieces, list) or len(pieces) != len(tokens) or not isinstance(settings, dict):
        raise UserError(f"{path}: {len(tokens)} tokens, but metadata for another number; the file is damaged")
    return Trace(metadata.get("model", ""), tokens, pieces, np.stack(norms), tensors, settings)
