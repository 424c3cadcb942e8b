"""The CPU's RMSNorm and feed-forward give the same results as the model's own."""

import threading

import pytest
from cpu_only import cpu_only
from tiny_models import quantized, random_weights, tiny_args, write_folder

from mlx_llama3.checkpoint.cpu_blocks import TiledFeedForward, _silu, use_cpu_blocks
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.layers import tiled_linear as cpu
from mlx_llama3.model.transformer import FeedForward, Transformer

import mlx.core as mx
from mlx.utils import tree_flatten

pytestmark = cpu_only

ARGS = tiny_args(hidden_dim=320)  # 5 tiles, which only 1 of the tested numbers of streams divides


@pytest.fixture(params=[1, 2, 3, 8])
def cores(request, monkeypatch):
    monkeypatch.setattr(cpu, "n_cpu_streams", lambda: request.param)
    monkeypatch.setattr(cpu, "_local", threading.local())
    return request.param


def feed_forward() -> FeedForward:
    mx.random.seed(3)
    model = Transformer(ARGS)
    cpu.use_tiled_layers(model, mx.float32)
    return model.layers[0].feed_forward


@pytest.mark.parametrize("shape", [(), (1, 1), (2, 5), (1, 200)])  # 200: large enough for the power of two in silu
def test_feed_forward(cores, shape):
    whole = feed_forward()
    x = mx.random.normal((*shape, whole.w2.weight.shape[0]), key=mx.random.key(1))
    tiled = TiledFeedForward(whole)
    y = tiled(x)
    assert y.shape == x.shape
    assert mx.abs(y - whole(x)).max().item() < 1e-6


def test_w1_and_w3_that_are_stored_apart(cores):
    """As under a quantization recipe that gives one of them other bits."""
    whole, x = feed_forward(), mx.random.normal((1, 64), key=mx.random.key(1))
    expected = TiledFeedForward(whole)(x)
    w13 = whole.w13.parts[0].weight
    whole.w13.parts = [cpu.TiledLinear(w13[:320]), cpu.TiledLinear(w13[320:])]
    mx.eval(whole.parameters())
    before = mx.get_active_memory()
    tiled = TiledFeedForward(whole)
    assert mx.array_equal(tiled(x), expected).item()
    assert mx.get_active_memory() - before < w13.nbytes / 4  # views, no copy


def test_gates_of_any_size():
    """For a very negative gate the power of two overflows, and the result is 0 as it should be."""
    gate = mx.array([0.0, 1e-6, 3.0, -3.0, 90.0, -90.0, 1000.0, -1000.0])
    expected = gate * mx.sigmoid(gate)
    output = _silu(mx.repeat(gate, 1000))[::1000]
    assert mx.abs(output - expected).max().item() < 1e-6
    assert mx.array_equal(_silu(gate), expected).item()


def test_a_new_weight_counts(cores):
    tiled, x = TiledFeedForward(feed_forward()), mx.ones((1, 1, 64))
    assert mx.abs(tiled(x)).max().item() > 0
    tiled.w13.parts[0].weight = mx.zeros_like(tiled.w13.parts[0].weight)
    assert mx.abs(tiled(x)).max().item() == 0
    tiled = TiledFeedForward(feed_forward())
    before = tiled(x)
    tiled.w2.weight = 2 * tiled.w2.weight
    assert mx.abs(tiled(x) - 2 * before).max().item() < 1e-6


def test_from_another_thread():
    tiled, x, outputs = TiledFeedForward(feed_forward()), mx.ones((1, 1, 64)), []
    mx.eval(tiled.parameters(), x)
    expected = tiled(x).tolist()
    thread = threading.Thread(target=lambda: outputs.append(tiled(x).tolist()))
    thread.start()
    thread.join()
    assert outputs == [expected]


def test_a_loaded_model_is_tiled_and_holds_its_weights_once(tmp_path):
    args = ARGS
    settings = {"bits": 4, "group_size": 32}
    before = mx.get_active_memory()
    model = load_model(write_folder(tmp_path, args, quantized(random_weights(args)), quantization=settings))
    assert all(isinstance(layer.feed_forward, TiledFeedForward) for layer in model.layers)
    mx.eval(model(mx.array([[1, 2, 3]])), model(mx.array([[1]])))
    mx.clear_cache()
    weights = sum(weight.nbytes for _, weight in tree_flatten(model.parameters()))
    assert mx.get_active_memory() - before < 1.1 * weights + 50_000


def test_a_model_that_is_not_tiled_stays_as_it_is():
    model = Transformer(tiny_args())
    before = [layer.feed_forward for layer in model.layers]
    use_cpu_blocks(model)
    assert [layer.feed_forward for layer in model.layers] == before


def test_hidden_units_that_are_no_whole_tiles_are_not_tiled(tmp_path):
    model = load_model(write_folder(tmp_path, tiny_args(hidden_dim=96)))
    assert [type(layer.feed_forward) for layer in model.layers] == [FeedForward] * 3
