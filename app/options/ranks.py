"""A command on several machines: `mlx.launch` starts it on each, rank 0 runs it, the others are its workers.

In a single process, which is the usual case, this module imports neither MLX nor `mlx_llama3.parallel`.
"""

import argparse
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import IO

# Commands that can run on several ranks.
SHARED = ("chat", "generate", "trace", "app")


def add_ranks_options(parser: argparse.ArgumentParser) -> None:
    """Add `--pipeline`."""
    parser.add_argument(
        "--pipeline",
        action="store_true",
        help="under mlx.launch: split the model by layers, not by heads (docs/distributed.md)",
    )


@contextlib.contextmanager
def in_front(args: argparse.Namespace) -> Iterator[bool]:
    """Give True where the command is to run: in a single process, and on rank 0.

    A worker serves rank 0 until that ends, and then gives False. Raises `UserError` for a command that cannot run on
    several ranks.
    """
    from mlx_llama3.errors import UserError

    if not _launched():
        if getattr(args, "pipeline", False):
            raise UserError("--pipeline splits the layers over several machines; start them with mlx.launch")
        yield True
        return
    from mlx_llama3.parallel.world import world

    if world().rank:
        _follow()
        yield False
    else:
        with _leading(args):
            yield True


def _launched() -> bool:
    if not os.environ.get("MLX_RANK"):  # before MLX is imported for nothing
        return False
    from mlx_llama3.parallel.world import launched

    return launched()


@contextlib.contextmanager
def _leading(args: argparse.Namespace) -> Iterator[None]:
    from mlx_llama3.errors import UserError
    from mlx_llama3.parallel.rank0 import this_rank0

    rank0 = this_rank0()
    rank0.pipeline = getattr(args, "pipeline", False)
    with rank0.world.connections.watched(0):
        try:
            if args.command not in SHARED:
                raise UserError(f"{args.command} runs in one process; start it without mlx.launch")
            if getattr(args, "prompt_cache", None) is not None:
                raise UserError("--prompt-cache needs the whole model in one process; start it without mlx.launch")
            yield
        finally:
            rank0.end()


def _follow() -> None:
    from app.options.model import find_model
    from mlx_llama3.parallel.worker import run_worker
    from mlx_llama3.parallel.world import world

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0, which perhaps only stops an answer
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    with contextlib.redirect_stdout(_nowhere()):
        run_worker(world(), lambda name: find_model(name)[1])


@contextlib.contextmanager
def quiet_unless_in_front() -> Iterator[None]:
    """Silence all ranks but rank 0 while arguments are parsed, so that help and errors are printed once."""
    if os.environ.get("MLX_RANK", "0") == "0":
        yield
        return
    with contextlib.redirect_stdout(_nowhere()), contextlib.redirect_stderr(_nowhere()):
        yield


def _nowhere() -> IO[str]:
    return open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
