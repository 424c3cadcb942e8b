"""A worker, which is every rank but 0: receives the messages of rank 0, and runs their passes on its shard."""

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
    """Run the messages of rank 0 until it ends. `find`: from the model's name on rank 0 to its folder here."""
    worker = Worker(world, find)
    with world.connections.watched(world.rank):
        while (message := world.next_message())["op"] != "end":
            worker.do(message)
        world.connections.finish(world.agree)


class Worker:
    """This rank's shards of rank 0's models and caches, by the numbers of their tickets."""

    def __init__(self, world: World, find: Callable[[str], Path]) -> None:
        self._world, self._find = world, find
        self._models: dict[int, Transformer] = {}
        self._caches: dict[int, list[KVCache]] = {}

    def do(self, message: dict[str, Any]) -> None:
        """Run a message, and wait until it is done."""
        if message["op"] == "load":
            self._drop(message)  # first, because two models may not fit
            self._load(message)
        else:
            self._run(message)
            self._drop(message)  # last, because a new cache may be a prefix of one that is dropped

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
        mx.async_eval(tokens)  # even if their values are not used, as in a pipeline: all ranks must take part
        mx.eval(plain(run(tokens, message["at"], self._cache(message, model))))

    def _load(self, message: dict[str, Any]) -> None:
        mx.clear_cache()
        error = ""
        try:
            folder = self._folder(message)
            self._models[message["model"]] = load_shard(folder, self._world, pipeline=message["pipeline"])
        except UserError as fault:
            error = str(fault)
        if self._world.agree(error):  # rank 0 reports it
            self._models.pop(message["model"], None)

    def _folder(self, message: dict[str, Any]) -> Path:
        folder = Path(message["folder"]).expanduser()
        if not folder.is_dir():
            folder = self._find(message["name"])
        if fingerprint(folder) != message["print"]:
            raise UserError(f"{folder} is not the model that rank 0 has; copy that one here")
        return folder

    def _cache(self, message: dict[str, Any], model: Transformer) -> list[KVCache] | None:
        """The cache of a message, trimmed to the start of the pass; made first if it is new."""
        if "cache" not in message:
            return None
        number, start_pos = message["cache"], message["at"]
        if number not in self._caches:
            parent = self._caches.get(message.get("of"))
            if parent is None:
                self._caches[number] = model.make_cache(CacheSettings(**message["settings"]))
            else:
                self._caches[number] = [entry.prefix(start_pos) for entry in parent]
        cache = self._caches[number]
        for entry in cache:
            if entry.offset > start_pos:
                entry.trim(entry.offset - start_pos)
        return cache
