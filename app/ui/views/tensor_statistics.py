"""Statistics of every tensor of one layer at one token, and its weights, for the cards of the architecture view."""

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
    """Statistics of one tensor at one token: L2 norm, mean, smallest and largest value (low, high), and a histogram.

    counts: `(BINS,)`, in equal bins from low to high.
    """

    norm: float
    mean: float
    low: float
    high: float
    counts: np.ndarray


@dataclass(frozen=True)
class LayerStatistics:
    """statistics: by card name. active: share of the neurons with an open gate. top: the strongest (neuron, value)."""

    statistics: dict[str, Statistics]
    active: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class Weight:
    """A matrix or gain of the loaded model.

    shape: of the dequantized matrix. kind: dtype and bits as text. packed: a note on the matrices that it is stored
    with, or "".
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    packed: str = ""


def measure(cell: Cell) -> LayerStatistics:
    """Recompute the token and measure every tensor of the layer; on the engine's thread."""
    position = cell.session.look(cell.position)
    states, model, layer = position.states, position.model, cell.layer
    block = model.layers[layer]
    x, h = states["resid_pre"][layer], states["resid_mid"][layer]
    normed, ffn_normed = block.attention_norm(x), block.ffn_norm(h)
    freqs = model.rope.frequencies(position.index, 1)
    q, (k, v) = block.attention.project(normed[None, None], position.index, freqs)
    gate, up = block.feed_forward.w13(ffn_normed)
    layer_neurons = neurons(position, layer, k=5)
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
        "swiglu": mx.array(layer_neurons.values_all),
        "mlp_out": states["mlp_out"][layer],
        "y": states["resid_post"][layer],
        "norm": model.norm(final),
        "logits": position.logits,
    }
    top = list(zip(layer_neurons.ids.tolist(), layer_neurons.values.tolist(), strict=True))
    return LayerStatistics({name: _statistics(tensor) for name, tensor in tensors.items()}, layer_neurons.active, top)


def _statistics(tensor: mx.array) -> Statistics:
    values = np.array(tensor.astype(mx.float32)).ravel()
    counts, edges = np.histogram(values, BINS)
    return Statistics(float(np.linalg.norm(values)), float(values.mean()), float(edges[0]), float(edges[-1]), counts)


def layer_weights(model: Transformer, layer: int) -> dict[str, Weight]:
    """Meta's name -> weight, for one layer, the embedding, the final norm and the head."""
    block, args = model.layers[layer], model.args
    q_rows, kv_rows = args.n_heads * args.head_dim, args.n_kv_heads * args.head_dim
    weights = {}
    for packed, rows in (
        (block.attention.wqkv, {"wq": q_rows, "wk": kv_rows, "wv": kv_rows}),
        (block.feed_forward.w13, {"w1": args.hidden_dim, "w3": args.hidden_dim}),
    ):
        weights |= _packed(packed.parts, rows, args.dim)
    weights["wo"] = Weight("wo", (args.dim, q_rows), kind(block.attention.wo))
    weights["w2"] = Weight("w2", (args.dim, args.hidden_dim), kind(block.feed_forward.w2))
    for name, module in (
        ("attention_norm", block.attention_norm),
        ("ffn_norm", block.ffn_norm),
        ("norm", model.norm),
    ):
        weights[name] = Weight(name, (args.dim,), kind(module))
    table = (args.vocab_size, args.dim)
    weights["tok_embeddings"] = Weight("tok_embeddings", table, kind(model.tok_embeddings))
    tied = args.tie_word_embeddings
    head = model.tok_embeddings if tied else model.output
    weights["output"] = Weight("output", table, kind(head), "the embedding's table: tied" if tied else "")
    return weights


def _packed(parts: list[nn.Module], rows: dict[str, int], columns: int) -> dict[str, Weight]:
    """The matrices that `parts` holds, stacked by rows."""
    weights, start = {}, 0
    ends = np.cumsum([part.weight.shape[0] for part in parts])
    for name, count in rows.items():
        part = parts[int(np.searchsorted(ends, start, side="right"))]
        packed = f"rows {start} to {start + count - 1} of {'|'.join(rows)}" if len(parts) == 1 else ""
        weights[name] = Weight(name, (count, columns), kind(part), packed)
        start += count
    return weights


def kind(module: nn.Module) -> str:
    """The dtype and bits of a module's weight: `float32, 32 bits`, or `affine, 4 bits in groups of 64`."""
    if hasattr(module, "bits"):
        return f"{module.mode}, {module.bits} bits in groups of {module.group_size}"
    return f"{str(module.weight.dtype).removeprefix('mlx.core.')}, {8 * module.weight.dtype.size} bits"
