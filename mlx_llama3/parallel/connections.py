"""MLX's own connections of the ring, watched: a rank that is gone is noticed at once, and waiting costs nothing.

When a rank ends, MLX fails the collective that is running, but one that was queued behind it waits for ever (0.32).
The kernel knows better: the sockets of a process that ended are closed. Here a thread looks at them, and ends this
process with one sentence. For a machine that vanished (a cable pulled, the power lost) the kernel is told to ask after
it. Nothing is ever read from or written to these sockets.

JACCL has no sockets to look at. There `mlx.launch` ends all ranks when one has failed.
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

LOOK_EVERY = 0.05  # seconds; mlx.launch kills the other ranks about 0.2 s after one has failed
SILENCE = 8  # seconds after which a machine that answers nothing counts as gone
LOST = 2  # exit code
GONE = "the connection to another rank is lost: its process or machine has ended; start all of them again"
# macOS: seconds after which unanswered data ends a connection (`netinet/tcp.h`); Python does not name it.
_TCP_RXT_CONNDROPTIME = 0x80


class Connections:
    """The connections of this rank to its neighbours; none, and nothing happens, under another backend."""

    def __init__(self, sockets: Iterable[socket.socket]) -> None:
        self._sockets = list(sockets)
        self._terminal = termios.tcgetattr(sys.stdin) if sys.stdin is not None and sys.stdin.isatty() else None
        self._who, self._parting, self._over = "this rank", False, threading.Event()
        for each in self._sockets:
            _ask_after(each)

    @classmethod
    def of_ring(cls) -> "Connections":
        """The sockets that MLX's ring has open, by the addresses in `MLX_HOSTFILE`."""
        hosts = json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text())
        rank = int(os.environ["MLX_RANK"])
        own = {_port(address) for address in hosts[rank]}
        following = {_port(address) for address in hosts[(rank + 1) % len(hosts)]}
        return cls(_open_sockets(own, following))

    def __len__(self) -> int:
        return len(self._sockets)

    def wait(self) -> None:
        """Return when a neighbour has begun a collective, or is gone. MLX itself would wait spinning."""
        if self._sockets:
            poll = select.poll()
            for each in self._sockets:
                poll.register(each, select.POLLIN)
            poll.poll()

    def lost(self) -> bool:
        """Whether a neighbour is gone."""
        return any(_is_closed(each) for each in self._sockets)

    @contextmanager
    def watched(self, rank: int) -> Iterator[None]:
        """From now on, until `part`, end this process when a neighbour is gone. `rank`: this one's."""
        self._who = f"rank {rank}"
        if self._sockets:
            threading.Thread(target=self._look, name="connections", daemon=True).start()
        try:
            yield
        except RuntimeError:  # of MLX, where it noticed first
            self.check()
            raise

    def check(self) -> None:
        """End this process now if a neighbour is gone."""
        if self.lost():
            self.give_up()

    def part(self, last: Callable[[], None]) -> None:
        """Run the collective with which the run ends. A neighbour that has done its share of it may go."""
        self._parting = True
        last()
        self._over.set()

    def _look(self) -> None:
        while not self._over.wait(LOOK_EVERY):
            if self.lost() and not (self._parting and self._over.wait(1)):
                self.give_up()

    def give_up(self) -> NoReturn:
        """End this process: MLX may be waiting for a rank that is gone, and cannot be stopped otherwise."""
        if self._terminal is not None:  # which may be without echo
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._terminal)
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        with suppress(OSError):
            os.write(2, f"error: {self._who}: {GONE}\n".encode())
        os._exit(LOST)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


def _open_sockets(own: set[int], following: set[int]) -> list[socket.socket]:
    """This process's TCP connections that came in at a port of `own`, or went out to one of `following`."""
    handles = [handle for handle in map(int, os.listdir("/dev/fd")) if _is_of_ring(handle, own, following)]
    # Second handles; MLX keeps its own. Made when all are chosen: a new one may get a number that is still to be seen.
    return [socket.socket(fileno=os.dup(handle)) for handle in handles]


def _is_of_ring(handle: int, own: set[int], following: set[int]) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(handle).st_mode):
            return False
        with socket.socket(fileno=os.dup(handle)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                return False
            peer = connection.getpeername()  # none of a socket that listens
            return connection.getsockname()[1] in own or peer[1] in following
    except OSError:  # no peer, or closed meanwhile, as the folder's own is
        return False


def _is_closed(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:  # reset, or no answer
        return True


def _ask_after(connection: socket.socket) -> None:
    """Have the kernel end this connection when the other machine gives no sign of life for `SILENCE` seconds."""
    idle = socket.TCP_KEEPALIVE if sys.platform == "darwin" else socket.TCP_KEEPIDLE
    unanswered = _TCP_RXT_CONNDROPTIME if sys.platform == "darwin" else socket.TCP_USER_TIMEOUT
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, idle, SILENCE // 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE // 2)
    limit = SILENCE if sys.platform == "darwin" else 1000 * SILENCE
    connection.setsockopt(socket.IPPROTO_TCP, unanswered, limit)
