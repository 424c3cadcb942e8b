"""If a rank dies, the others end, whether busy or idle; waiting ranks use no processor."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import rank_program
from ranks import Ranks

from mlx_llama3.parallel import connections
from mlx_llama3.parallel.connections import GONE, Connections

SECONDS = 10  # within which the other ranks must end


def started(folder: Path, size: int, *words: object) -> Ranks:
    """Ranks of `rank_program` that have started to run."""
    for _ in range(3):
        ranks = Ranks(folder, size, [sys.executable, str(rank_program.__file__), *map(str, words)])
        if ranks.processes[0].stderr.readline() == "running\n":
            return ranks
        with ranks:  # a port was in use
            pass
    raise AssertionError("the ranks do not start")


def processor_seconds(pid: int) -> float:
    """The processor time of a process so far (Linux)."""
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("size", "split", "scenario", "victim"),
    [(2, "split", "forever", 1), (2, "split", "idle", 1), (2, "split", "forever", 0), (4, "pipeline", "idle", 2)],
)
def test_a_rank_that_is_killed_ends_the_others(
    size: int, split: str, scenario: str, victim: int, folders: dict[str, Path], tmp_path: Path
):
    with started(tmp_path, size, split, scenario, folders["four layers"]) as ranks:
        os.kill(ranks.processes[victim].pid, signal.SIGKILL)
        done = ranks.wait(timeout=SECONDS)
    for rank, each in enumerate(done):
        if rank != victim:
            assert each.code == 2
            assert each.err.splitlines()[-1] == f"error: rank {rank}: {GONE}"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ranks_that_wait_for_rank_0_use_no_processor(folders: dict[str, Path], tmp_path: Path):
    with started(tmp_path, 2, "split", "idle", folders["dense"]) as ranks:
        pids = [process.pid for process in ranks.processes]
        signal.sigtimedwait([], 0.5)  # both are idle
        before = [processor_seconds(pid) for pid in pids]
        signal.sigtimedwait([], 1)
        used = [processor_seconds(pid) - start for pid, start in zip(pids, before, strict=True)]
        ranks.processes[0].stdin.close()
        assert [each.code for each in ranks.wait()] == [0, 0]
    assert max(used) < 0.5  # a spinning rank would use the whole second, or what other processes leave of it


def test_the_ring_is_found_among_the_open_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as own, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [each.getsockname()[1] for each in (own, other)]
        (tmp_path / "ring.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        monkeypatch.setenv("MLX_HOSTFILE", str(tmp_path / "ring.json"))
        monkeypatch.setenv("MLX_RANK", "0")
        right = socket.create_connection(("127.0.0.1", ports[1]))
        left = socket.create_connection(("127.0.0.1", ports[0]))
        with right, left, own.accept()[0] as incoming, other.accept()[0] as far:
            ring = Connections.of_ring()
            assert len(ring) == 2  # the outgoing and the incoming connection, without their far ends
            assert not ring.lost()
            incoming.sendall(b"x")  # unread data does not mean that it is lost
            far.close()
            assert ring.lost()


def test_a_duplicated_descriptor_is_not_taken_for_another_connection():
    """The listing of descriptors contains its own descriptor, whose number the first duplicate then gets."""
    near, far = tcp_pair()
    filled = [os.open(os.devnull, os.O_RDONLY) for _ in range(64)]  # no number below these is free
    with near, far:
        duplicates = connections._open_sockets({near.getsockname()[1]}, set())
        assert len(duplicates) == 1
    for duplicate in duplicates:
        duplicate.close()
    for descriptor in filled:
        os.close(descriptor)


def test_keepalive_detects_a_machine_that_does_not_respond():
    near, far = tcp_pair()
    with near, far:
        Connections([near])
        assert near.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle = near.getsockopt(socket.IPPROTO_TCP, getattr(socket, "TCP_KEEPIDLE", None) or socket.TCP_KEEPALIVE)
        interval, count = (near.getsockopt(socket.IPPROTO_TCP, o) for o in (socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT))
        assert idle + interval * count <= SECONDS
        assert connections.TIMEOUT_SECONDS <= SECONDS


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]
