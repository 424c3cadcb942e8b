"""The ranks of one run: who am I, what rank 0 tells the others, and how a rank learns that another one is gone."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama3.errors import UserError
from mlx_llama3.parallel.connections import Connections

import mlx.core as mx

# A message is so many bytes, so that a usual one costs one collective: its length (4 bytes), then JSON. What does not
# fit follows in a second collective.
BLOCK = 256
LENGTH = 4


def launched() -> bool:
    """Whether a launcher started this process as one of several. Looks at the environment only."""
    if not os.environ.get("MLX_RANK"):
        return False
    hostfile = os.environ.get("MLX_HOSTFILE")
    # For a single rank, `mlx.launch` names an empty file.
    return "MLX_IBV_DEVICES" in os.environ or bool(hostfile and Path(hostfile).read_text().strip())


def is_worker() -> bool:
    """Whether this process is another rank than the one in front."""
    return launched() and os.environ["MLX_RANK"] != "0"


@cache
def world() -> "World":
    """All ranks, after waiting for them; once a process. Raises `UserError` if they cannot reach each other."""
    backend = "jaccl" if "MLX_IBV_DEVICES" in os.environ else "ring"
    try:
        group = mx.distributed.init(strict=True, backend=backend)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"the ranks cannot reach each other ({error}); check the addresses in the hostfile, and that no other "
            "program uses their ports (mlx.launch --starting-port)"
        ) from error
    return World(group, Connections.of_ring() if backend == "ring" else Connections([]))


class World:
    """The ranks, and the collectives among them.

    All ranks must run the same collectives in the same order; on rank 0 that holds only while `together` is True, which
    `Rank0` sets around what it has told the others. Elsewhere a collective would wait for ever, so it is refused.
    """

    def __init__(self, group: mx.distributed.Group, connections: Connections) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.connections = connections
        self.together = self.rank != 0
        self._group = group

    def sum(self, x: mx.array) -> mx.array:
        """The sum of all ranks' `x`, the same bits on every rank; any shape."""
        self._check()
        return mx.distributed.all_sum(x, group=self._group)

    def from_rank0(self, x: mx.array) -> mx.array:
        """Rank 0's `x`; the others give one of the same shape and type."""
        return self.sum(x if self.rank == 0 else mx.zeros_like(x))

    def gather(self, x: mx.array) -> mx.array:
        """`x` of every rank, `(size, *x.shape)`."""
        self._check()
        return mx.distributed.all_gather(x[None], group=self._group)

    def send(self, x: mx.array, rank: int) -> mx.array:
        """`x`, sent to a neighbour when the result is evaluated."""
        self._check()
        return mx.distributed.send(x, rank, group=self._group)

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, rank: int) -> mx.array:
        """What a neighbour sends."""
        self._check()
        return mx.distributed.recv(shape, dtype, rank, group=self._group)

    def broadcast(self, message: dict[str, Any]) -> None:
        """Queue a message to the other ranks, for their `next_message`; on rank 0."""
        text = json.dumps(message, separators=(",", ":")).encode()
        data = np.zeros(max(BLOCK, LENGTH + len(text)), np.uint8)
        data[:LENGTH] = np.frombuffer(len(text).to_bytes(LENGTH, "little"), np.uint8)
        data[LENGTH : LENGTH + len(text)] = np.frombuffer(text, np.uint8)
        parts = [self.sum(mx.array(part)) for part in (data[:BLOCK], data[BLOCK:]) if part.size]
        mx.async_eval(parts)

    def next_message(self) -> dict[str, Any]:
        """The next message of rank 0. Waits for it without using the processor, where the backend is the ring."""
        self.connections.wait()
        data = np.array(self.sum(mx.zeros(BLOCK, mx.uint8)))
        self.connections.check()  # a collective that failed may give anything
        length = int.from_bytes(data[:LENGTH].tobytes(), "little")
        if length > BLOCK - LENGTH:
            data = np.concatenate([data, np.array(self.sum(mx.zeros(LENGTH + length - BLOCK, mx.uint8)))])
        return json.loads(data[LENGTH : LENGTH + length].tobytes())

    def agree(self, error: str = "") -> str:
        """Wait until all ranks are here. Returns the first error that one of them brings, on all ranks."""
        own = np.zeros(4 * BLOCK, np.uint8)
        text = error.encode()[: own.size]
        own[: len(text)] = np.frombuffer(text, np.uint8)
        for rank, each in enumerate(np.array(self.gather(mx.array(own)))):
            if told := each.tobytes().rstrip(b"\0").decode(errors="ignore"):
                return told if rank == 0 else f"on rank {rank}: {told}"
        return ""

    def not_whole(self) -> UserError:
        """The error for what looks into a model that is not all here."""
        return UserError(
            f"this needs the whole model, which lies in parts on {self.size} ranks; start mlx-llama3 without mlx.launch"
        )

    def _check(self) -> None:
        if not self.together:
            raise self.not_whole()
