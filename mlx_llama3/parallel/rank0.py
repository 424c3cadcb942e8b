"""Rank 0: runs the program as on one machine, and tells the other ranks of every pass before it queues its own part.

What the others need is small: which model, which cache, where the pass begins, and the token ids, which go through
`mx.distributed` inside the graph, so that a token need not be known to the host when its pass is queued. Rank 0 alone
samples: the logits are the same bits on every rank only where all machines are alike.
"""

import hashlib
import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from mlx_llama3.autotune.choice import requested_kernels
from mlx_llama3.checkpoint.folder import read_settings
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.kv_cache import KVCache, check_start
from mlx_llama3.model.cache.settings import DEFAULT, CacheSettings
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.kernels.kernel_set import FUSED
from mlx_llama3.model.residual import plain
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.parallel.pipeline import PipelineShard, PipelineTransformer
from mlx_llama3.parallel.tensor import TensorShard
from mlx_llama3.parallel.world import World, launched, world
from mlx_llama3.system.memory import hold_wired
from mlx_llama3.tokenizer.tokenizer import Tokenizer, load_tokenizer

import mlx.core as mx


@cache
def this_rank0() -> "Rank0 | None":
    """This process as rank 0; None where there is one process only."""
    return Rank0(world()) if launched() else None


class Ticket:
    """The number under which the other ranks know a model or a cache. `owner` is the cache's first layer."""

    def __init__(self, number: int, owner: KVCache | None = None, settings: CacheSettings = DEFAULT) -> None:
        self.number, self.settings, self.told = number, settings, False
        self.owner = None if owner is None else weakref.ref(owner)


class Rank0:
    """What rank 0 tells the others. `pipeline` chooses how models that are loaded from now on are split."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pipeline = False
        self._numbers = itertools.count(1)
        self._dropped: list[int] = []
        self._broken = False

    def load(self, name: str, folder: Path) -> tuple[Transformer, Tokenizer]:
        """As `api.load_folder`, a part on every rank; `name` is for ranks that do not have `folder`.

        Raises `UserError` if one of them cannot load its part.
        """
        read_settings(folder)
        tokenizer = load_tokenizer(folder)
        return self.load_model(name, folder), tokenizer

    def load_model(self, name: str, folder: Path) -> Transformer:
        """As `load`, the model alone."""
        ticket = self._ticket()
        message = {"op": "load", "model": ticket.number, "pipeline": self.pipeline, "name": name}
        message |= {"folder": _portable(folder), "print": fingerprint(folder)}
        error, model = "", None
        with self._telling(message):
            try:
                model = load_shard(folder, self.world, pipeline=self.pipeline, rank0=self)
            except UserError as fault:
                error = str(fault)
            error = self.world.agree(error)
        if error:
            raise UserError(error)
        model._ticket = ticket
        return model

    def run(
        self,
        op: str,
        run: Callable[..., mx.array],
        model: Transformer,
        tokens: mx.array,
        start_pos: int,
        cache: list[KVCache] | None,
    ) -> mx.array:
        """`run(tokens, start_pos, cache)`, on all ranks. Queued before this returns, so that no rank waits in vain."""
        if self.world.together:  # inside of a pass that the others know of
            return run(tokens, start_pos, cache)
        if tokens.ndim != 2:
            raise ValueError(f"tokens have shape {tokens.shape}, expected (batch, positions)")
        check_start(cache, start_pos, len(model.layers))
        message = {"op": op, "model": model._ticket.number, "shape": tokens.shape, "at": start_pos}
        with self._telling(message | self._cache(cache, start_pos)):
            if cache is not None:
                cache[0].ticket.told = True
            out = plain(run(self.world.from_rank0(tokens.astype(mx.int32)), start_pos, cache))
            mx.async_eval(out)
        return out

    def run_head(self, run: Callable[[mx.array], mx.array], model: Transformer, x: mx.array) -> mx.array:
        """`run(x)`, on all ranks; for a head that is split."""
        if self.world.together:
            return run(x)
        dtype = str(x.dtype).removeprefix("mlx.core.")
        with self._telling({"op": "head", "model": model._ticket.number, "shape": x.shape, "dtype": dtype}):
            out = run(self.world.from_rank0(x))
            mx.async_eval(out)
        return out

    def register(self, cache: list[KVCache], settings: CacheSettings) -> list[KVCache]:
        """A cache that is new here, which the others will make when they are told of it."""
        cache[0].ticket = self._ticket(cache[0], settings)
        return cache

    def end(self) -> None:
        """Let the other ranks end. Call once, when nothing else will be run."""
        if self._broken:  # they wait in the middle of a pass, and will see that this process ends
            return
        with self._telling({"op": "end"}):
            self.world.connections.part(self.world.agree)

    def _cache(self, cache: list[KVCache] | None, start_pos: int) -> dict[str, Any]:
        """How to find or make a cache, for a message. Raises `UserError` for one whose contents the others lack."""
        if cache is None:
            return {}
        ticket, origin = getattr(cache[0], "ticket", None), {}
        if ticket is None or (start_pos and not ticket.told):
            raise UserError(
                "the other ranks do not have this cache, which was read from a file or serves several answers; start "
                "mlx-llama3 without mlx.launch"
            )
        if ticket.owner() is not cache[0]:  # `prefix` copied the layer, and with it the ticket
            if ticket.told:
                origin = {"of": ticket.number}
            ticket = cache[0].ticket = self._ticket(cache[0], ticket.settings)
        if not ticket.told:
            origin |= {"settings": asdict(ticket.settings)}
        return {"cache": ticket.number} | origin

    def _ticket(self, owner: KVCache | None = None, settings: CacheSettings = DEFAULT) -> Ticket:
        ticket = Ticket(next(self._numbers), owner, settings)
        # When the last that uses it is gone, here, the others are told to drop theirs with the next message.
        weakref.finalize(ticket, self._dropped.append, ticket.number).atexit = False
        return ticket

    @contextmanager
    def _telling(self, message: dict[str, Any]) -> Iterator[None]:
        """Tell the others, and run with them what they were told. Raises `UserError` if that has failed before."""
        if self._broken:
            raise UserError("a pass has failed, and the other ranks wait in the middle of it; start all of them again")
        with _uninterrupted():
            dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
            self.world.together = True
            try:
                self.world.broadcast(message | ({"drop": dropped} if dropped else {}))
                yield
            except BaseException:
                self._broken = True
                raise
            finally:
                self.world.together = False


class _Rank0Model(Transformer):
    """What both kinds of rank 0's part share: `_rank0` runs each pass on all ranks."""

    _rank0: Rank0

    @property
    def is_whole(self) -> bool:
        return False

    def need_whole(self) -> None:
        raise self._rank0.world.not_whole()

    def residual(self, tokens: mx.array, start_pos: int = 0, cache: list[KVCache] | None = None) -> mx.array:
        return self._rank0.run("residual", super().residual, self, tokens, start_pos, cache)

    def make_cache(self, settings: CacheSettings = DEFAULT) -> list[KVCache]:
        return self._rank0.register(super().make_cache(settings), settings)


class Rank0Transformer(_Rank0Model):
    """Rank 0's part of a model whose matrices are split."""

    def __init__(self, args: ModelArgs, rank0: Rank0) -> None:
        super().__init__(args)
        self._rank0 = rank0

    def __call__(self, tokens: mx.array, start_pos: int = 0, cache: list[KVCache] | None = None) -> mx.array:
        return self._rank0.run("logits", super().__call__, self, tokens, start_pos, cache)

    def unembed(self, x: mx.array) -> mx.array:
        return self._rank0.run_head(super().unembed, self, x)


class Rank0Pipeline(_Rank0Model, PipelineTransformer):
    """Rank 0's layers of a model whose layers are split; the embedding and the head are whole."""

    def __init__(self, args: ModelArgs, part: PipelineShard, rank0: Rank0) -> None:
        super().__init__(args, part)
        self._rank0 = rank0


def load_shard(folder: Path, world: World, *, pipeline: bool, rank0: Rank0 | None = None) -> Transformer:
    """This rank's part of a model, ready to run; on rank 0 as a model that leads. Raises `UserError` as `load_model`.

    Fused kernels serve only where `MLX_LLAMA3_KERNELS` is fused: the trial that chooses them otherwise runs whole
    passes, in which the other ranks would have to take part.
    """
    fused = requested_kernels() == "fused"
    if pipeline:
        made = None if rank0 is None else lambda args, part: Rank0Pipeline(args, part, rank0)
        model = load_model(folder, part=PipelineShard(world, made))
    else:
        made = None if rank0 is None else lambda args: Rank0Transformer(args, rank0)
        model = load_model(folder, part=TensorShard(world, made))
    hold_wired(model)
    if fused:
        model.use(FUSED)
    return model


def fingerprint(folder: Path) -> str:
    """What tells two models apart without reading their weights: the settings, and the sizes of the weight files."""
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        found.update(f"{path.name} {path.stat().st_size}\n".encode())
    return found.hexdigest()[:16]


def _portable(folder: Path) -> str:
    """A path that means the same for another user's home."""
    folder = folder.absolute()
    return f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C: a pass that the others were told of must be queued as a whole."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    pressed: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt
