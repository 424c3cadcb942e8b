"""Which kernel does an add and a norm that wait: the product that reads them, or, where that cannot, `add_rms_norm`."""

from functools import partial

import numpy as np
import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.hooks.edits import Scale, edited
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE, Kernels, Rows
from mlx_llama3.model.layers import tiled_linear
from mlx_llama3.model.transformer import Transformer
from tests.metal_harness.emulator import Emulation, emulated

import mlx.core as mx

ARGS = tiny_args(dim=128, hidden_dim=256, head_dim=64)
EIGHT_BITS = ("model.layers.1.self_attn.v_proj", "model.layers.2.mlp.up_proj")
TOKENS = [3, 14, 15]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Transformer:
    """A model with weights in 4 bits, but v of its second layer and w3 of its third in 8: these are not packed."""
    weights = random_weights(ARGS)
    packed, eight = quantized(weights), quantized(weights, bits=8)
    packed |= {name: array for name, array in eight.items() if name.startswith(EIGHT_BITS)}
    settings = {"bits": 4, "group_size": 32} | {name: {"bits": 8, "group_size": 32} for name in EIGHT_BITS}
    folder = write_folder(tmp_path_factory.mktemp("model"), ARGS, packed, quantization=settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled_linear, "use_tiled_layers", lambda model, dtype: None)
        model = load_model(folder)
    model.rope.frequencies = partial(model.rope.frequencies, table=False)
    return model


def decoded(model: Transformer) -> np.ndarray:
    """The logits of each token, fed one at a time."""
    cache = model.make_cache()
    return np.concatenate([np.array(model(mx.array([[token]]), at, cache)) for at, token in enumerate(TOKENS)])


def counts(emulation: Emulation) -> dict[str, int]:
    """The calls of each kernel in one pass."""
    return {name: emulation.called(f"llama3_{name}") // len(TOKENS) for name in vars(FUSED) if name != "double_buffer"}


def test_a_matrix_that_the_product_does_not_take_is_read_by_the_kernels_apart(model):
    model.use(REFERENCE)
    wanted = decoded(model)
    model.use(FUSED)
    with emulated() as emulation:
        np.testing.assert_allclose(decoded(model), wanted, atol=1e-4)
    # Of three layers: the first has no add before its attention, and the last norm has no product.
    assert counts(emulation) == {
        "norm_rope_qkv": 1,
        "norm_swiglu_qmv": 2,
        "add_rms_norm": 1 + 1 + 1,
        "rope_qkv": 2,
        "swiglu_qmv": 0,
        "sdpa_quantized": 0,
    }


def test_a_product_alone_leaves_the_other_adds_to_plain_operations(model):
    model.use(REFERENCE)
    wanted = decoded(model)
    model.use(Kernels(norm_swiglu_qmv=Rows.ONE))
    with emulated() as emulation:
        np.testing.assert_allclose(decoded(model), wanted, atol=1e-4)
    assert {name for name, count in counts(emulation).items() if count} == {"norm_swiglu_qmv"}


def test_edits_take_the_stream_as_an_array(model):
    """So none of the kernels that add runs, and those that do not add still run."""
    edits = [Scale(1, "mlp", 0.5), Scale(2, "head", 0.0, head=1)]
    model.use(REFERENCE)
    wanted, plain = decoded(edited(model, edits)), decoded(model)
    assert np.abs(wanted - plain).max() > 1e-2
    model.use(FUSED)
    with emulated() as emulation:
        np.testing.assert_allclose(decoded(edited(model, edits)), wanted, atol=1e-4)
    used = {name for name, count in counts(emulation).items() if count}
    assert used == {"rope_qkv", "swiglu_qmv"}
