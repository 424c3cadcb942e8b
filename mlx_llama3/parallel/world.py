"""The ranks of one run: the rank of this process, the collectives, and the messages from rank 0 to the workers."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from mlx_llama3.errors import UserError
from mlx_llama3.parallel.connections import Connections

import mlx.core as mx

# A message is its length (4 bytes, little-endian), then JSON. The first block is one collective of this many bytes,
# which is enough for most messages; the rest follows in a second collective.
BLOCK_BYTES = 256
LENGTH_BYTES = 4


def launched() -> bool:
    """Whether a launcher started this process as one of several, by the environment alone."""
    if not os.environ.get("MLX_RANK"):
        return False
    hostfile = os.environ.get("MLX_HOSTFILE")
    # For a single rank, `mlx.launch` names an empty file.
    return "MLX_IBV_DEVICES" in os.environ or bool(hostfile and Path(hostfile).read_text().strip())


def is_worker() -> bool:
    """Whether this process is a worker, which is any rank but 0."""
    return launched() and os.environ["MLX_RANK"] != "0"


@cache
def world() -> "World":
    """Connect to all ranks, and wait for them; once per process. Raises `UserError` if they cannot be reached."""
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
    """The ranks and their collectives.

    All ranks must run the same collectives in the same order. On rank 0 that is so only while `together` is True, which
    `Rank0` sets while it runs a message that it has broadcast. At other times a collective would wait forever, so it
    raises `UserError`.
    """

    def __init__(self, group: mx.distributed.Group, connections: Connections) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.connections = connections
        self.together = self.rank != 0
        self._group = group

    def sum(self, x: mx.array) -> mx.array:
        """The sum of `x` over all ranks, of any shape; bit-identical on every rank."""
        self._check()
        return mx.distributed.all_sum(x, group=self._group)

    def from_rank0(self, x: mx.array) -> mx.array:
        """Rank 0's `x`. The workers pass an array of the same shape and dtype, whose values are ignored."""
        return self.sum(x if self.rank == 0 else mx.zeros_like(x))

    def gather(self, x: mx.array) -> mx.array:
        """`x` of every rank, stacked: `(size, *x.shape)`."""
        self._check()
        return mx.distributed.all_gather(x[None], group=self._group)

    def send(self, x: mx.array, rank: int) -> mx.array:
        """Send `x` to a neighbour when the result, which equals `x`, is evaluated."""
        self._check()
        return mx.distributed.send(x, rank, group=self._group)

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, rank: int) -> mx.array:
        """The array that a neighbour sends."""
        self._check()
        return mx.distributed.recv(shape, dtype, rank, group=self._group)

    def broadcast(self, message: dict[str, Any]) -> None:
        """Queue a message to the workers, for their `next_message`. Only for rank 0."""
        text = json.dumps(message, separators=(",", ":")).encode()
        data = np.zeros(max(BLOCK_BYTES, LENGTH_BYTES + len(text)), np.uint8)
        data[:LENGTH_BYTES] = np.frombuffer(len(text).to_bytes(LENGTH_BYTES, "little"), np.uint8)
        data[LENGTH_BYTES : LENGTH_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        parts = [self.sum(mx.array(part)) for part in (data[:BLOCK_BYTES], data[BLOCK_BYTES:]) if part.size]
        mx.async_eval(parts)

    def next_message(self) -> dict[str, Any]:
        """Wait for the next message of rank 0; with the ring backend, without using the processor."""
        self.connections.wait()
        data = np.array(self.sum(mx.zeros(BLOCK_BYTES, mx.uint8)))
        self.connections.check()  # the result of a failed collective is undefined
        length = int.from_bytes(data[:LENGTH_BYTES].tobytes(), "little")
        if length > BLOCK_BYTES - LENGTH_BYTES:
            data = np.concatenate([data, np.array(self.sum(mx.zeros(LENGTH_BYTES + length - BLOCK_BYTES, mx.uint8)))])
        return json.loads(data[LENGTH_BYTES : LENGTH_BYTES + length].tobytes())

    def agree(self, error: str = "") -> str:
        """A barrier: wait for all ranks. Returns the first error that a rank passes, the same on all ranks, or ""."""
        own = np.zeros(4 * BLOCK_BYTES, np.uint8)
        text = error.encode()[: own.size]
        own[: len(text)] = np.frombuffer(text, np.uint8)
        for rank, row in enumerate(np.array(self.gather(mx.array(own)))):
            if message := row.tobytes().rstrip(b"\0").decode(errors="ignore"):
                return message if rank == 0 else f"on rank {rank}: {message}"
        return ""

    def not_whole(self) -> UserError:
        """The error for a feature that a sharded model cannot offer."""
        return UserError(
            f"this needs the whole model, which is split over {self.size} ranks; start mlx-llama3 without mlx.launch"
        )

    def _check(self) -> None:
        if not self.together:
            raise self.not_whole()
