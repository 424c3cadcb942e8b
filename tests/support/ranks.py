"""Starts several processes that run one model on loopback, as `mlx.launch` does, but on free ports.

`mlx.launch` occupies a CPU core while it waits, and its ports are fixed; one test starts it itself.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

PROGRAM = Path(__file__).parent / "rank_program.py"
# A free port may be taken before the ring uses it: then all ranks are started again.
TRIES = 3
TAKEN = "the ranks cannot reach each other"


class Done(NamedTuple):
    """The exit code and output of a rank."""

    code: int
    out: str
    err: str


class Ranks:
    """The processes of one run; the end of the `with` block kills them. environment: extra variables, by rank."""

    def __init__(
        self, folder: Path, size: int, command: Sequence[str], environment: dict[int, dict[str, str]] | None = None
    ) -> None:
        hostfile = folder / "ring.json"
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]))
        self.processes = []
        for rank in range(size):
            own = {"MLX_RANK": str(rank), "MLX_HOSTFILE": str(hostfile)} | (environment or {}).get(rank, {})
            self.processes.append(
                subprocess.Popen(
                    list(command),
                    env={**os.environ, **own},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()

    def wait(self, timeout: float = 60) -> list[Done]:
        """Wait for all ranks. Raises `subprocess.TimeoutExpired` if one does not end."""
        done, stdin = [], self.processes[0].stdin
        for process in self.processes:
            process.stdin = None  # `communicate` would close it, and rank 0 may still read it
            out, err = process.communicate(timeout=timeout)
            done.append(Done(process.returncode, out, err))
        stdin.close()
        return done


def run_ranks(folder: Path, size: int, command: Sequence[str], **options: dict[int, dict[str, str]]) -> list[Done]:
    """Start `size` ranks of a command, and wait for them."""
    for _ in range(TRIES):
        with Ranks(folder, size, command, **options) as ranks:
            done = ranks.wait()
        if not any(TAKEN in rank.err for rank in done):
            break
    return done


def run_program(folder: Path, size: int, *words: object) -> dict:
    """The JSON that `rank_program` prints on rank 0 with these arguments. Fails with all errors if a rank fails."""
    done = run_ranks(folder, size, [sys.executable, str(PROGRAM), *map(str, words)])
    assert [rank.code for rank in done] == [0] * size, "\n".join(rank.err for rank in done)
    assert not any(rank.out for rank in done[1:])
    return json.loads(done[0].out)


def free_ports(count: int) -> list[int]:
    """`count` ports of loopback that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
