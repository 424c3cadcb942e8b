"""Every tensor of the chosen layer at the chosen token, measured: for the cards of the architecture view."""

from dataclasses import dataclass

import numpy as np

from app.ui.session.selection import Cell
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.trace.neurons import neurons

import mlx.core as mx
import mlx.nn as nn

BINS = 28


@dataclass(frozen=True)
class Statistics:
    """Of all numbers of one tensor at one token: L2 norm, mean, largest and smallest, and a histogram.

    counts: `(BINS,)`; edges: the smallest and the largest value, where the bins begin and end.
    """

    norm: float
    mean: float
    low: float
    high: float
    counts: np.ndarray


@dataclass(frozen=True)
class Measured:
    """statistics by a card's name; active: share of the layer's neurons whose gate is open; top: (neuron, value)."""

    statistics: dict[str, Statistics]
    active: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Weight:
    """A matrix or gain as it is loaded. shape: dense. kind: type and bits, for people. packed: with what, or ""."""

    name: str
    shape: tuple[int, ...]
    kind: str
    packed: str = ""


def measure(cell: Cell) -> Measured:
    """Run the token again and take every tensor of the layer; on the engine's thread."""
    position = cell.session.look(cell.position)
    states, model, layer = position.states, position.model, cell.layer
    block = model.layers[layer]
    x, h = states["resid_pre"][layer], states["resid_mid"][layer]
    normed, ffn_normed = block.attention_norm(x), block.ffn_norm(h)
    freqs = model.rope.frequencies(position.index, 1)
    q, (k, v) = block.attention.project(normed[None, None], position.index, freqs)
    gate, up = block.feed_forward.w13(ffn_normed)
    found = neurons(position, layer, k=5)
    final = states["resid_post"][-1]
    tensors = {
        "embedding": states["resid_pre"][0],
        "x": x,
        "attention_norm": normed,
        "q": q,
        "k": k,
        "v": v,
        "z": states["z"][layer],
        "attn_out": states["attn_out"][layer],
        "h": h,
        "ffn_norm": ffn_normed,
        "gate": gate,
        "up": up,
        "swiglu": mx.array(found.values_all),
        "mlp_out": states["mlp_out"][layer],
        "y": states["resid_post"][layer],
        "norm": model.norm(final),
        "logits": position.logits,
    }
    top = list(zip(found.ids.tolist(), found.values.tolist(), strict=True))
    return Measured({name: _statistics(tensor) for name, tensor in tensors.items()}, found.active, top)


def _statistics(tensor: mx.array) -> Statistics:
    values = np.array(tensor.astype(mx.float32)).ravel()
    counts, edges = np.histogram(values, BINS)
    return Statistics(float(np.linalg.norm(values)), float(values.mean()), float(edges[0]), float(edges[-1]), counts)


def weights(model: Transformer, layer: int) -> dict[str, Weight]:
    """The weights that the cards name, by Meta's names, for one layer and the model's ends."""
    block, args = model.layers[layer], model.args
    q_rows, kv_rows = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    found = {}
    for packed, rows in (
        (block.attention.wqkv, {"wq": q_rows, "wk": kv_rows, "wv": kv_rows}),
        (block.feed_forward.w13, {"w1": args.hidden_dim, "w3": args.hidden_dim}),
    ):
        found |= _packed(packed.parts, rows, args.dim)
    found["wo"] = Weight("wo", (args.dim, q_rows), kind(block.attention.wo))
    found["w2"] = Weight("w2", (args.dim, args.hidden_dim), kind(block.feed_forward.w2))
    for name, module in (
        ("attention_norm", block.attention_norm),
        ("ffn_norm", block.ffn_norm),
        ("norm", model.norm),
    ):
        found[name] = Weight(name, (args.dim,), kind(module))
    table = (args.vocab_size, args.dim)
    found["tok_embeddings"] = Weight("tok_embeddings", table, kind(model.tok_embeddings))
    tied = args.tie_word_embeddings
    head = model.tok_embeddings if tied else model.output
    found["output"] = Weight("output", table, kind(head), "the embedding's table: tied" if tied else "")
    return found


def _packed(parts: list[nn.Module], rows: dict[str, int], columns: int) -> dict[str, Weight]:
    """The matrices that are stacked by rows in `parts`."""
    found, start = {}, 0
    ends = np.cumsum([part.weight.shape[0] for part in parts])
    for name, count in rows.items():
        part = parts[int(np.searchsorted(ends, start, side="right"))]
        packed = f"rows {start} to {start + count - 1} of {'|'.join(rows)}" if len(parts) == 1 else ""
        found[name] = Weight(name, (count, columns), kind(part), packed)
        start += count
    return found


def kind(module: nn.Module) -> str:
    """Type and bits of a module's weight: `float32, 32 bits`, or `affine, 4 bits in groups of 64`."""
    if hasattr(module, "bits"):
        return f"{module.mode}, {module.bits} bits in groups of {module.group_size}"
    return f"{str(module.weight.dtype).removeprefix('mlx.core.')}, {8 * module.weight.dtype.size} bits"
