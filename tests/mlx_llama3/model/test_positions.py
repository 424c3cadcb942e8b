"""Positions up to 131,071: RoPE tables and logits against transformers, and against float64.

`tests/data/README.md` says how the values were made. All have float32 angles, as Meta's code: at position p these are
off by up to p * 2**-23 radians, some 0.012 at 100,000. The tolerances allow for it.
"""

from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_args

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.config import RopeScaling
from mlx_llama3.model.layers.rope import Rope, rotate
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

DATA = Path(__file__).parents[2] / "data" / "transformers"
SCALINGS = {"plain": None, "factor8": RopeScaling(8.0), "factor32": RopeScaling(32.0)}
MODELS = ["gqa2", "rope8-mha", "tied-rope32"]
LAST = 100_000


@pytest.fixture(scope="module")
def golden() -> dict[str, mx.array]:
    return mx.load(str(DATA / "positions.safetensors"))


def angle_error(position: np.ndarray | int) -> np.ndarray:
    """The error of a float32 angle: half a unit in the last place of the frequency, and of its product with p."""
    return 1e-6 + np.asarray(position) * 2.0**-23


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tables_of_transformers(golden, head_dim, scaling):
    rope = Rope(tiny_args(head_dim=head_dim, rope_theta=500000.0, rope_scaling=SCALINGS[scaling]))
    positions = golden["rope.positions"].tolist()
    for row, position in enumerate(positions):
        cos, sin = rope.frequencies(position, 1, table=True).table
        for name, ours in (("cos", cos), ("sin", sin)):
            theirs = golden[f"rope.{head_dim}.{scaling}.{name}"][row]
            assert mx.abs(ours[0] - theirs).max().item() <= angle_error(position), (position, name)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("table", [True, False], ids=["table", "mx.fast.rope"])
def test_rotations_at_far_positions(scaling, table):
    """The CPU's table, and `mx.fast.rope` with periods as on the GPU (here its fallback), against float64."""
    args = tiny_args(head_dim=64, rope_theta=500000.0, rope_scaling=SCALINGS[scaling])
    rope, x = Rope(args), np.random.default_rng(0).standard_normal((1, 2, 3, 64)).astype(np.float32)
    inv_freq = inv_freq64(64, SCALINGS[scaling])
    for start in (8191, 32768, 99_998, 131_069):
        angles = np.arange(start, start + 3)[:, None] * inv_freq
        rotated = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * angles)
        ours = np.array(rotate(mx.array(x), start, rope.frequencies(start, 3, table=table)))
        expected = np.concatenate([rotated.real, rotated.imag], -1)
        assert np.abs(ours - expected).max() <= angle_error(start + 2) * np.abs(rotated).max()


def inv_freq64(head_dim: int, scaling: RopeScaling | None) -> np.ndarray:
    inv_freq = 1.0 / 500000.0 ** (np.arange(0, head_dim, 2) / head_dim)
    if scaling is None:
        return inv_freq
    smooth = np.clip((8192 * inv_freq / (2 * np.pi) - 1) / (4 - 1), 0, 1)
    return (1 - smooth) * inv_freq / scaling.factor + smooth * inv_freq


def run(model: Transformer, tokens: mx.array, start: int, cache: list[KVCache]) -> mx.array:
    """A forward pass whose positions may start anywhere after those in the cache."""
    x, freqs = model.tok_embeddings(tokens), model.rope.frequencies(start, tokens.shape[1])
    for block, entry in zip(model.layers, cache, strict=True):
        x = block(x, start, freqs, "causal", entry)
    return model.head(x)


@pytest.mark.parametrize("name", MODELS)
def test_logits_across_a_gap(golden, name):
    """40 tokens at position 0, and 24 that end at position 100,000 and attend to them."""
    model = load_model(DATA / name, dtype=mx.float32)
    tokens = mx.load(str(DATA / f"{name}.expected.safetensors"))["tokens"]
    cache = model.make_cache()
    run(model, tokens[:, :40], 0, cache)
    logits = run(model, tokens[:, 40:64], LAST - 24, cache)
    assert mx.abs(logits - golden[f"{name}.jump"]).max().item() < 5e-3
    near = model(tokens[:, :64])[:, 40:]
    assert mx.abs(near - golden[f"{name}.jump"]).max().item() > 1  # the logits if the start position were ignored


@pytest.mark.parametrize("name", MODELS)
def test_logits_after_a_cache_of_100_000_positions(golden, name):
    """8 tokens after random keys at positions 0 ... 99,999, large enough that few of them get most of the attention. A
    frequency that is off by one part in 10,000 changes these logits by 4."""
    model = load_model(DATA / name, dtype=mx.float32)
    tokens = mx.load(str(DATA / f"{name}.expected.safetensors"))["tokens"]
    cache = model.make_cache()
    fill(model, cache)
    logits = model(tokens[:, :8], LAST, cache)
    assert mx.abs(logits - golden[f"{name}.cache"]).max().item() < 5e-3


def fill(model: Transformer, cache: list[KVCache]) -> None:
    """Fill the cache as for the stored logits. NumPy never changes the stream of `RandomState`."""
    args = model.args
    shape = (args.n_layers, 2, 1, args.n_kv_heads, LAST, args.head_dim)
    random = mx.array(np.random.RandomState(0).standard_normal(shape).astype(np.float32))
    freqs = model.rope.frequencies(0, LAST)
    for entry, (keys, values) in zip(cache, random, strict=True):
        entry.update_and_fetch(mx.stack([rotate(4 * keys, 0, freqs), values]))
