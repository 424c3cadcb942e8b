"""Every rank but 0: waits to be told, and runs its part of what rank 0 runs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_llama3.errors import UserError
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.residual import plain
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.parallel.rank0 import fingerprint, load_shard
from mlx_llama3.parallel.world import World

import mlx.core as mx


def run_worker(world: World, find: Callable[[str], Path]) -> None:
    """Run what rank 0 tells, until it ends. `find` gives the folder of a model by the name that rank 0 has for it."""
    worker = Worker(world, find)
    with world.connections.watched(world.rank):
        while (message := world.next_message())["op"] != "end":
            worker.do(message)
        world.connections.part(world.agree)


class Worker:
    """The models and caches that rank 0 knows under their numbers, in so far as they are here."""

    def __init__(self, world: World, find: Callable[[str], Path]) -> None:
        self._world, self._find = world, find
        self._models: dict[int, Transformer] = {}
        self._caches: dict[int, list[KVCache]] = {}

    def do(self, message: dict[str, Any]) -> None:
        """Run a message, and wait until it is done."""
        if message["op"] == "load":
            self._drop(message)  # first, for two models may not fit
            self._load(message)
        else:
            self._run(message)
            self._drop(message)  # last, for a new cache may begin with the part of one that goes

    def _drop(self, message: dict[str, Any]) -> None:
        for number in message.get("drop", ()):
            self._models.pop(number, None)
            self._caches.pop(number, None)

    def _run(self, message: dict[str, Any]) -> None:
        model, shape = self._models[message["model"]], tuple(message["shape"])
        if message["op"] == "head":
            x = mx.zeros(shape, getattr(mx, message["dtype"]))
            mx.eval(model.unembed(self._world.from_rank0(x)))
            return
        run = model if message["op"] == "logits" else model.residual
        tokens = self._world.from_rank0(mx.zeros(shape, mx.int32))
        mx.async_eval(tokens)  # also where only their number matters, as in a pipeline: all ranks must take part
        mx.eval(plain(run(tokens, message["at"], self._cache(message, model))))

    def _load(self, message: dict[str, Any]) -> None:
        mx.clear_cache()
        error = ""
        try:
            folder = self._folder(message)
            self._models[message["model"]] = load_shard(folder, self._world, pipeline=message["pipeline"])
        except UserError as fault:
            error = str(fault)
        if self._world.agree(error):  # rank 0 tells the person
            self._models.pop(message["model"], None)

    def _folder(self, message: dict[str, Any]) -> Path:
        folder = Path(message["folder"]).expanduser()
        if not folder.is_dir():
            folder = self._find(message["name"])
        if fingerprint(folder) != message["print"]:
            raise UserError(f"{folder} is not the model that rank 0 has; copy that one here")
        return folder

    def _cache(self, message: dict[str, Any], model: Transformer) -> list[KVCache] | None:
        """The cache of a message, ending where the pass begins."""
        if "cache" not in message:
            return None
        number, start_pos = message["cache"], message["at"]
        if number not in self._caches:
            parent = self._caches.get(message.get("of"))
            made = model.make_cache(CacheSettings(**message["settings"])) if parent is None else parent
            self._caches[number] = made if parent is None else [entry.prefix(start_pos) for entry in parent]
        found = self._caches[number]
        for entry in found:
            if entry.offset > start_pos:
                entry.trim(entry.offset - start_pos)
        return found
