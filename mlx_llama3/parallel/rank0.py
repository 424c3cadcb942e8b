"""Rank 0 runs the program as on one machine, and broadcasts every pass to the workers before it queues its own shard.

A message is small: the model, the cache and the start of the pass. The token ids are sent through `mx.distributed`
inside the graph, so that a pass can be queued before the host knows its token. Only rank 0 samples, because the logits
are bit-identical on all ranks only if all machines are alike.
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
    """Rank 0 of this process; None if there is only one process."""
    return Rank0(world()) if launched() else None


class Ticket:
    """The number of a model or a cache in the messages to the workers.

    owner: the first layer of the cache. settings: of the cache. known: whether the workers have the cache.
    """

    def __init__(self, number: int, owner: KVCache | None = None, settings: CacheSettings = DEFAULT) -> None:
        self.number, self.settings, self.known = number, settings, False
        self.owner = None if owner is None else weakref.ref(owner)


class Rank0:
    """Loads and runs models on all ranks. `pipeline`: split the models that are loaded from now on by layers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pipeline = False
        self._numbers = itertools.count(1)
        self._dropped: list[int] = []
        self._broken = False

    def load(self, name: str, folder: Path) -> tuple[Transformer, Tokenizer]:
        """As `api.load_folder`, with a shard on every rank; a worker without `folder` finds the model by `name`.

        Raises `UserError` if a rank cannot load its shard.
        """
        read_settings(folder)
        tokenizer = load_tokenizer(folder)
        return self.load_model(name, folder), tokenizer

    def load_model(self, name: str, folder: Path) -> Transformer:
        """As `load`, without the tokenizer."""
        ticket = self._ticket()
        message = {"op": "load", "model": ticket.number, "pipeline": self.pipeline, "name": name}
        message |= {"folder": _portable(folder), "print": fingerprint(folder)}
        error, model = "", None
        with self._on_all_ranks(message):
            try:
                model = load_shard(folder, self.world, pipeline=self.pipeline, rank0=self)
            except UserError as fault:
                error = str(fault)
            error = self.world.agree(error)
        if error or model is None:
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
        """`run(tokens, start_pos, cache)` on all ranks; queued when this returns, so that no rank waits forever.

        op: what a worker runs, "logits" or "residual". tokens: `(batch, positions)`.
        """
        if self.world.together:  # inside a pass that was broadcast
            return run(tokens, start_pos, cache)
        if tokens.ndim != 2:
            raise ValueError(f"tokens have shape {tokens.shape}, expected (batch, positions)")
        check_start(cache, start_pos, len(model.layers))
        message = {"op": op, "model": model._ticket.number, "shape": tokens.shape, "at": start_pos}
        with self._on_all_ranks(message | self._cache(cache, start_pos)):
            if cache is not None:
                cache[0].ticket.known = True
            out = plain(run(self.world.from_rank0(tokens.astype(mx.int32)), start_pos, cache))
            mx.async_eval(out)
        return out

    def run_head(self, run: Callable[[mx.array], mx.array], model: Transformer, x: mx.array) -> mx.array:
        """`run(x)` on all ranks, for a head that is split over them."""
        if self.world.together:
            return run(x)
        dtype = str(x.dtype).removeprefix("mlx.core.")
        with self._on_all_ranks({"op": "head", "model": model._ticket.number, "shape": x.shape, "dtype": dtype}):
            out = run(self.world.from_rank0(x))
            mx.async_eval(out)
        return out

    def register(self, cache: list[KVCache], settings: CacheSettings) -> list[KVCache]:
        """Give a new cache its ticket. The workers make their copy at its first pass."""
        cache[0].ticket = self._ticket(cache[0], settings)
        return cache

    def end(self) -> None:
        """Let the workers end. Call it once, after the last pass."""
        if self._broken:  # the workers wait inside a pass, and will notice that this process ends
            return
        with self._on_all_ranks({"op": "end"}):
            self.world.connections.finish(self.world.agree)

    def _cache(self, cache: list[KVCache] | None, start_pos: int) -> dict[str, Any]:
        """The part of a message that names a cache. Raises `UserError` if the workers lack the cache's contents."""
        if cache is None:
            return {}
        ticket, origin = getattr(cache[0], "ticket", None), {}
        if ticket is None or (start_pos and not ticket.known):
            raise UserError(
                "the other ranks do not have this cache, which was read from a file or serves several answers; start "
                "mlx-llama3 without mlx.launch"
            )
        if ticket.owner() is not cache[0]:  # `prefix` copied the layer, and with it the ticket
            if ticket.known:
                origin = {"of": ticket.number}
            ticket = cache[0].ticket = self._ticket(cache[0], ticket.settings)
        if not ticket.known:
            origin |= {"settings": asdict(ticket.settings)}
        return {"cache": ticket.number} | origin

    def _ticket(self, owner: KVCache | None = None, settings: CacheSettings = DEFAULT) -> Ticket:
        ticket = Ticket(next(self._numbers), owner, settings)
        # When the model or cache is garbage-collected here, the next message makes the workers drop theirs.
        weakref.finalize(ticket, self._dropped.append, ticket.number).atexit = False
        return ticket

    @contextmanager
    def _on_all_ranks(self, message: dict[str, Any]) -> Iterator[None]:
        """Broadcast a message, then run its collectives in the block. Raises `UserError` if an earlier block failed."""
        if self._broken:
            raise UserError("a pass has failed, and the other ranks wait in the middle of it; start all ranks again")
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
    """The base of both kinds of rank 0's shard: `_rank0` runs each pass on all ranks."""

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
    """Rank 0's shard of a model whose matrices are split."""

    def __init__(self, args: ModelArgs, rank0: Rank0) -> None:
        super().__init__(args)
        self._rank0 = rank0

    def __call__(self, tokens: mx.array, start_pos: int = 0, cache: list[KVCache] | None = None) -> mx.array:
        return self._rank0.run("logits", super().__call__, self, tokens, start_pos, cache)

    def unembed(self, x: mx.array) -> mx.array:
        return self._rank0.run_head(super().unembed, self, x)


class Rank0Pipeline(_Rank0Model, PipelineTransformer):
    """Rank 0's layers of a model that is split by layers, with the whole embedding and head."""

    def __init__(self, args: ModelArgs, shard: PipelineShard, rank0: Rank0) -> None:
        super().__init__(args, shard)
        self._rank0 = rank0


def load_shard(folder: Path, world: World, *, pipeline: bool, rank0: Rank0 | None = None) -> Transformer:
    """Load this rank's shard of a model; on rank 0 (`rank0` given), its passes run on all ranks.

    The fused kernels are used only if `MLX_LLAMA3_KERNELS` is "fused": their trials would run whole passes, in which
    all ranks would have to take part.

    Raises `UserError` as `load_model`.
    """
    fused = requested_kernels() == "fused"
    if pipeline:
        make = None if rank0 is None else lambda args, shard: Rank0Pipeline(args, shard, rank0)
        model = load_model(folder, part=PipelineShard(world, make))
    else:
        make = None if rank0 is None else lambda args: Rank0Transformer(args, rank0)
        model = load_model(folder, part=TensorShard(world, make))
    hold_wired(model)
    if fused:
        model.use(FUSED)
    return model


def fingerprint(folder: Path) -> str:
    """A hash of config.json and of the names and sizes of the weight files, which tells models apart quickly."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    return digest.hexdigest()[:16]


def _portable(folder: Path) -> str:
    """The path of a folder, with `~` for the home, which may differ on another machine."""
    folder = folder.absolute()
    return f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C to the end of the block: a pass that was broadcast must be queued completely."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
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
