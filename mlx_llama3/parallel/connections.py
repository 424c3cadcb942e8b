"""Watches the sockets of MLX's ring: notices at once that a rank is gone, and waits without using the processor.

When a rank ends, MLX fails the running collective, but a collective that is queued behind it waits forever (0.32). The
kernel, however, closes the sockets of a process that ended. Here a thread polls them, and ends this process with a
one-line error. TCP keepalive detects a machine that vanished (cable pulled, power lost). Nothing is ever read from or
written to these sockets.

JACCL has no sockets to watch. There `mlx.launch` ends all ranks when one has failed.
"""

import json
import os
import select
import socket
import stat
import sys
import termios
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

POLL_SECONDS = 0.05  # mlx.launch kills the other ranks about 0.2 s after one has failed
TIMEOUT_SECONDS = 8  # a machine that does not respond for so long counts as gone
EXIT_CODE = 2
GONE = "the connection to another rank is lost: its process or machine has ended; start all ranks again"
# macOS: the option for the seconds after which unacknowledged data ends a connection (`netinet/tcp.h`); Python has no
# name for it.
_TCP_RXT_CONNDROPTIME = 0x80


class Connections:
    """The connections of this rank to its neighbours in the ring; empty, and without effect, under another backend."""

    def __init__(self, sockets: Iterable[socket.socket]) -> None:
        self._sockets = list(sockets)
        self._terminal = termios.tcgetattr(sys.stdin) if sys.stdin is not None and sys.stdin.isatty() else None
        self._name, self._finishing, self._finished = "this rank", False, threading.Event()
        for connection in self._sockets:
            _set_keepalive(connection)

    @classmethod
    def of_ring(cls) -> "Connections":
        """The open sockets of MLX's ring, found by the addresses in `MLX_HOSTFILE`."""
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        rank = int(os.environ["MLX_RANK"])
        own = {_port(address) for address in hosts[rank]}
        following = {_port(address) for address in hosts[(rank + 1) % len(hosts)]}
        return cls(_open_sockets(own, following))

    def __len__(self) -> int:
        return len(self._sockets)

    def wait(self) -> None:
        """Sleep until a neighbour begins a collective, or is gone. MLX itself would spin."""
        if self._sockets:
            poll = select.poll()
            for connection in self._sockets:
                poll.register(connection, select.POLLIN)
            poll.poll()

    def lost(self) -> bool:
        """Whether a neighbour is gone."""
        return any(map(_is_closed, self._sockets))

    @contextmanager
    def watched(self, rank: int) -> Iterator[None]:
        """End this process when a neighbour is gone, from now until `finish`. `rank`: this process's, for the error."""
        self._name = f"rank {rank}"
        if self._sockets:
            threading.Thread(target=self._watch, name="connections", daemon=True).start()
        try:
            yield
        except RuntimeError:  # from MLX, if it noticed first
            self.check()
            raise

    def check(self) -> None:
        """End this process now if a neighbour is gone."""
        if self.lost():
            self.give_up()

    def finish(self, last: Callable[[], None]) -> None:
        """Run the last collective of the run. A neighbour that has completed it may end before this rank has."""
        self._finishing = True
        last()
        self._finished.set()

    def _watch(self) -> None:
        while not self._finished.wait(POLL_SECONDS):
            if self.lost() and not (self._finishing and self._finished.wait(1)):
                self.give_up()

    def give_up(self) -> NoReturn:
        """End this process: MLX may wait for a rank that is gone, and cannot be interrupted."""
        if self._terminal is not None:  # its echo may be off
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, f"error: {self._name}: {GONE}\n".encode())
        os._exit(EXIT_CODE)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _open_sockets(own: set[int], following: set[int]) -> list[socket.socket]:
    """This process's TCP connections that were accepted at a port of `own`, or connect to a port of `following`."""
    handles = [handle for handle in map(int, os.listdir("/dev/fd")) if _is_of_ring(handle, own, following)]
    # Duplicates, since MLX owns the originals. They are made after the search: the number of a new descriptor could
    # otherwise be met later in the listing.
    return [socket.socket(fileno=os.dup(handle)) for handle in handles]


def _is_of_ring(handle: int, own: set[int], following: set[int]) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(handle).st_mode):
            return False
        with socket.socket(fileno=os.dup(handle)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return False
            peer = connection.getpeername()  # a listening socket has none, which raises
            return connection.getsockname()[1] in own or peer[1] in following
    except OSError:  # no peer, or closed meanwhile, as the descriptor of the listing itself
        return False


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:  # reset or timed out
        return True


def _set_keepalive(connection: socket.socket) -> None:
    """Make the kernel end a connection if the other machine does not respond for `TIMEOUT_SECONDS`."""
    idle = socket.TCP_KEEPALIVE if sys.platform == "darwin" else socket.TCP_KEEPIDLE
    unanswered = _TCP_RXT_CONNDROPTIME if sys.platform == "darwin" else socket.TCP_USER_TIMEOUT
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, idle, TIMEOUT_SECONDS // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, TIMEOUT_SECONDS // 2)
    limit = TIMEOUT_SECONDS if sys.platform == "darwin" else 1000 * TIMEOUT_SECONDS
    connection.setsockopt(socket.IPPROTO_TCP, unanswered, limit)
