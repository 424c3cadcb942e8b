"""Tiled products, split over the cores, equal whole ones, in any thread."""

import math
import threading

import pytest
from cpu_only import cpu_only
from tiny_models import quantized, random_weights, tiny_args, tiny_model, write_folder

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.layers import tiled_linear

import mlx.core as mx
import mlx.nn as nn

pytestmark = cpu_only


@pytest.fixture(params=[1, 2, 3, 8])
def cores(request, monkeypatch):
    monkeypatch.setattr(tiled_linear, "n_cpu_streams", lambda: request.param)
    monkeypatch.setattr(tiled_linear, "_local", threading.local())
    return request.param


@pytest.mark.parametrize("rows", [1, 2, 7, 96])
@pytest.mark.parametrize("shape", [(64,), (1, 1, 64), (2, 5, 64)])
def test_equals_a_whole_product(cores, rows, shape):
    weight = mx.random.normal((rows, 64), key=mx.random.key(0))
    x = mx.random.normal(shape, key=mx.random.key(1))
    y = tiled_linear.TiledLinear(weight)(x)
    assert y.shape == (*shape[:-1], rows)
    assert mx.abs(y - x @ weight.T).max().item() < 1e-5


@pytest.mark.parametrize("rows", [4800, 4801])  # whole tiles; a last one of a single row
@pytest.mark.parametrize("count", [1, 2, 25, 48, 509, 512])
def test_many_rows_of_x(cores, rows, count):
    weight = mx.random.normal((rows, 640), key=mx.random.key(0)) / 25
    x = mx.random.normal((1, count, 640), key=mx.random.key(1))
    y = tiled_linear.TiledLinear(weight)(x)
    assert y.shape == (1, count, rows)
    assert mx.abs(y - x @ weight.T).max().item() < 1e-5


@pytest.mark.parametrize(
    ("width", "counts"),
    [
        (
            640,
            {1: (1, 1), 24: (1, 24), 25: (2, 13), 64: (4, 16), 509: (22, 24), 512: (32, 16)},
        ),  # at most 24 rows
        (2048, {7: (1, 7), 8: (2, 4), 9: (3, 3), 13: (2, 7), 64: (16, 4), 512: (128, 4)}),  # at most 7
        (4096, {3: (1, 3), 4: (2, 2), 64: (32, 2), 65: (1, 65)}),  # at most 3: one group for many rows
        (20_000, {1: (1, 1), 2: (2, 1), 65: (1, 65)}),  # at most 1
    ],
)
def test_row_groups_fit_the_small_kernels(width, counts):
    assert {count: tiled_linear._row_groups(count, width) for count in counts} == counts


@pytest.mark.parametrize("count", [50, 300])  # splits the groups; splits the rows
def test_products_beyond_32_bit_indices_are_split(cores, count, monkeypatch):
    """Broadcast copies included, both operands of a product must have fewer elements than the limit."""
    weight = mx.random.normal((640, 32), key=mx.random.key(0))
    x = mx.random.normal((count, 32), key=mx.random.key(1))
    expected, matmul, sizes = x @ weight.T, mx.array.__matmul__, []

    def measured(a: mx.array, b: mx.array) -> mx.array:
        y = matmul(a, b)
        sizes.extend(math.prod(y.shape[:-2]) * operand.shape[-2] * operand.shape[-1] for operand in (a, b))
        return y

    monkeypatch.setattr(tiled_linear, "_row_groups", lambda count, width: (-(-count // 5), 5))
    monkeypatch.setattr(tiled_linear, "_BATCH_INDICES", 40 * 64 * 32)  # the elements of 40 tiles
    monkeypatch.setattr(mx.array, "__matmul__", measured)
    assert mx.abs(tiled_linear.TiledLinear(weight)(x) - expected).max().item() < 1e-5
    assert 0 < max(sizes) < 40 * 64 * 32


def test_a_product_beyond_32_bit_indices():
    """64 groups of one row times 40 tiles of 960,000 numbers: as one matmul, MLX 0.32 reads out of bounds and mostly
    crashes."""
    x, tiles = mx.random.normal((64, 15_000), key=mx.random.key(0)), mx.zeros((40, 15_000, 64))
    tiles[-1] = mx.random.normal((15_000, 64), key=mx.random.key(1))
    mx.eval(x, tiles)
    y = tiled_linear.tiled_matmul(x[None], tiles)
    assert mx.abs(y[-1] - x @ tiles[-1]).max().item() < 1e-2
    assert mx.abs(y[:-1]).max().item() == 0


def test_embedding_and_tied_head(cores):
    weight = mx.random.normal((77, 64), key=mx.random.key(0))
    embedding = tiled_linear.TiledEmbedding(weight)
    tokens = mx.array([[0, 76, 5]])
    assert mx.array_equal(embedding(tokens), weight[tokens]).item()
    x = weight[tokens]
    assert mx.abs(embedding.as_linear(x) - x @ weight.T).max().item() < 1e-4


def test_a_new_weight_is_used(cores):
    layer = tiled_linear.TiledLinear(mx.ones((8, 64)))
    x = mx.ones((1, 64))
    assert layer(x).tolist() == [[64.0] * 8]
    layer.weight = mx.zeros((8, 64))
    assert layer(x).tolist() == [[0.0] * 8]
    assert layer.weight.tolist() == mx.zeros((8, 64)).tolist()
    layer.update(tiled_linear.TiledLinear(mx.full((8, 64), 2.0)).parameters())
    assert layer(mx.ones((2, 64))).tolist() == [[128.0] * 8] * 2


@pytest.mark.parametrize("rows", [1, 63, 64, 130])
def test_the_matrix_and_its_rows_can_be_read(rows):
    weight = mx.random.normal((rows, 32), key=mx.random.key(0))
    layer = tiled_linear.TiledLinear(weight)
    assert mx.array_equal(layer.weight, weight).item()
    assert all(mx.array_equal(layer.row(index), weight[index]).item() for index in range(rows))
    assert [name for name, _ in nn.utils.tree_flatten(layer.parameters())] == ["tiles"]


def test_from_another_thread():
    """MLX's streams belong to the thread that made them; a model loaded in one thread runs in another."""
    layer, x = tiled_linear.TiledLinear(mx.random.normal((96, 64))), mx.ones((1, 64))
    expected, outputs = layer(x).tolist(), []
    thread = threading.Thread(target=lambda: outputs.append(layer(x).tolist()))
    thread.start()
    thread.join()
    assert outputs == [expected]


def test_a_model_loaded_in_one_thread_runs_in_another(tmp_path):
    model, outputs = tiny_model(tmp_path), []
    tokens = mx.array([[1, 2, 3]])
    mx.eval(tokens)

    def run() -> None:
        outputs.append(model(tokens).tolist())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert outputs == [model(tokens).tolist()]


def test_a_loaded_model_has_only_tiled_layers_and_no_second_copy(tmp_path):
    args = tiny_args()
    settings = {"bits": 4, "group_size": 32}
    model = load_model(write_folder(tmp_path, args, quantized(random_weights(args)), quantization=settings))
    kinds = {type(leaf) for _, leaf in nn.utils.tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module)}
    assert kinds & {nn.Linear, nn.QuantizedLinear, nn.Embedding, nn.QuantizedEmbedding} == set()
    assert {tiled_linear.TiledLinear, tiled_linear.TiledEmbedding} <= kinds
    before = mx.get_active_memory()
    mx.eval(model(mx.array([[1, 2, 3]])))
    assert mx.get_active_memory() - before < 100_000  # the streams' parts are views: the weights are 800 kB


@pytest.mark.parametrize(
    "quantization", [(3, 32, "affine"), (4, 64, "affine"), (6, 128, "affine"), (8, 32, "affine"), (4, 32, "mxfp4")]
)
def test_dequantizing_in_blocks_of_rows(cores, quantization, monkeypatch):
    monkeypatch.setattr(tiled_linear, "_BLOCK_BYTES", 3000)  # bytes: one tile
    bits, group_size, mode = quantization
    layer = nn.QuantizedLinear(128, 200, bias=False, group_size=group_size, bits=bits, mode=mode)
    model = nn.Sequential(layer)
    expected = mx.dequantize(
        layer.weight, layer.scales, layer.get("biases"), group_size=group_size, bits=bits, mode=mode, dtype=mx.float32
    )
    tiled_linear.use_tiled_layers(model, mx.float32)
    assert mx.array_equal(model.layers[0].weight, expected).item()
