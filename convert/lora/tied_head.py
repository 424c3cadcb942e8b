"""Adapters on the embedding and the head: of a model that ties them, and with another vocabulary."""

from dataclasses import replace
from pathlib import Path

from convert.lora.adapter import Adapter, LoRAUpdate
from convert.sources.source import Source
from convert.storage.stored_tensor import to_mlx
from mlx_llama3.errors import UserError

import mlx.core as mx

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
_BLOCK_ELEMENTS = 1 << 24


def separate_head(source: Source, adapter: Adapter) -> Source:
    """The source of a tied model with a head of its own, if the adapter changes embedding and head differently.

    PEFT trains and runs an update of only one of the two with the other as it was, unless `ensure_weight_tying` is set;
    mlx-lm changes both. An update of both that is the same leaves them tied (`without_copies`).
    """
    changed = [name for name in (EMBEDDING, HEAD) if name in adapter.updates]
    if not source.args.tie_word_embeddings or not changed or (adapter.keeps_ties and len(changed) == 1):
        return source
    embedding = source.tensors[f"{EMBEDDING}.weight"]
    head = replace(embedding, name=f"{HEAD}.weight")
    args = replace(source.args, tie_word_embeddings=False)
    return replace(source, args=args, tensors={**source.tensors, head.name: head})


def without_copies(adapter: Adapter) -> Adapter:
    """The adapter of a tied model without its update of the head, if that is the same as the embedding's."""
    embedding, head = (adapter.updates.get(name) for name in (EMBEDDING, HEAD))
    if embedding is None or head is None or not _equal(embedding, head):
        return adapter
    updates = {name: update for name, update in adapter.updates.items() if name != HEAD}
    return replace(adapter, updates=updates, keeps_ties=True)


def _equal(one: LoRAUpdate, other: LoRAUpdate) -> bool:
    """Whether two updates of the same matrix are the same, value for value."""
    kinds = [(u.shape, u.rank, u.scale, u.magnitude is None, u.whole is None) for u in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    if one.left is not None and not mx.array_equal(one.right(), other.right()).item():
        return False
    rows, step = one.shape[0], max(1, _BLOCK_ELEMENTS // one.shape[1])
    return all(
        mx.array_equal(a, b).item()
        for start in range(0, rows, step)
        for a, b in zip(*(_parts(u, start, min(start + step, rows)) for u in (one, other)), strict=True)
    )


def _parts(update: LoRAUpdate, start: int, stop: int) -> list[mx.array]:
    """What an update says of these rows, without the right factor."""
    whole = update.whole
    parts = [part(start, stop) for part in (update.left, update.magnitude) if part is not None]
    return parts if whole is None else [*parts, to_mlx(whole.rows(start, stop), whole.mx_dtype)]


def with_vocabulary_of(adapter: Adapter, source: Source, folder: Path) -> Source:
    """The source with as many tokens as the adapter's embedding and head, which must then be whole.

    Raises `UserError` if the adapter was trained with another vocabulary and lacks one of the two.
    """
    updates = {name: adapter.updates.get(name) for name in (EMBEDDING, HEAD)}
    sizes = {update.shape[0] for update in updates.values() if update and update.shape[1:] == (source.args.dim,)}
    size = max(sizes - {source.args.vocab_size}, default=None)
    if size is None:
        return source
    needed = [name for name in updates if f"{name}.weight" in source.tensors]
    missing = [name for name in needed if not _is_whole(updates[name], (size, source.args.dim))]
    if missing:
        raise UserError(
            f"{folder}: trained with a vocabulary of {size} tokens, the model has {source.args.vocab_size}, and the "
            f"adapter does not bring the whole {' and '.join(missing)}; merge it with PEFT, and convert what that saves"
        )
    tensors = dict(source.tensors)
    for name in needed:
        tensors[f"{name}.weight"] = replace(tensors[f"{name}.weight"], shape=(size, source.args.dim))
    return replace(source, args=replace(source.args, vocab_size=size), tensors=tensors)


def _is_whole(update: LoRAUpdate | None, shape: tuple[int, int]) -> bool:
    return update is not None and update.whole is not None and update.shape == shape
