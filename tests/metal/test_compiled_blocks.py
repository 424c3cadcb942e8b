"""Compiled blocks with the fused kernels inside: a tiny model decodes and shows the norms as without either.

`mx.compile` does nothing under emulation, so the Python of a block's halves runs for every token.
"""

from functools import partial

import numpy as np
import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.compiled import CompiledBlock
from mlx_llama3.model.hooks.norms import NormCapture
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE, Kernels, Rows
from mlx_llama3.model.layers import tiled_linear
from tests.metal_harness.emulator import emulated

import mlx.core as mx

ARGS = tiny_args(dim=128, hidden_dim=256, head_dim=64)
PROMPT, TOKENS = [3, 14, 159, 26, 5], 6
NAMES = ("add_rms_norm", "rope_qkv", "swiglu_qmv", "sdpa_quantized", "norm_rope_qkv", "norm_swiglu_qmv")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with weights in 4 bits and RoPE without a table, as on a GPU."""
    folder = tmp_path_factory.mktemp("model")
    write_folder(folder, ARGS, quantized(random_weights(ARGS)), quantization={"bits": 4, "group_size": 32})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled_linear, "use_tiled_layers", lambda model, dtype: None)
        model = load_model(folder)
    model.rope.frequencies = partial(model.rope.frequencies, table=False)
    return model


def decoded(model, kernels: Kernels, *, compiles: bool, watched: bool):
    """Greedy decoding over a quantized cache: the tokens, the logits of each step, and the norms if watched."""
    model.use(kernels)
    model.compiles = compiles
    capture = NormCapture(model) if watched else None
    run, cache = capture.model if watched else model, model.make_cache(CacheSettings(kv_bits=4))
    logits, fed = [], PROMPT
    for _ in range(TOKENS):
        logits.append(run(mx.array([fed]), cache[0].offset, cache)[0, -1])
        fed = [mx.argmax(logits[-1]).item()]
    norms = capture.read(capture.take()) if watched else np.zeros(0)
    return [int(mx.argmax(each)) for each in logits], np.array(mx.stack(logits)), norms


@pytest.mark.parametrize("watched", [False, True], ids=["plain", "watched"])
@pytest.mark.parametrize("kernels", [FUSED, *(Kernels(**{name: Rows.ALL}) for name in NAMES)], ids=str)
def test_the_same_tokens_logits_and_norms(model, kernels, watched):
    tokens, logits, norms = decoded(model, REFERENCE, compiles=False, watched=watched)
    with emulated() as emulation:
        ours = decoded(model, kernels, compiles=True, watched=watched)
        blocks = model.compiled_blocks.of(model.layers)
    assert all(isinstance(block, CompiledBlock) for block in blocks)
    assert all(block._halves or block._residual_halves for block in blocks)  # none called the block as it is
    assert ours[0] == tokens
    np.testing.assert_allclose(ours[1], logits, atol=1e-4)
    np.testing.assert_allclose(ours[2], norms, rtol=1e-4)
    assert {name: emulation.called(f"llama3_{name}") for name in NAMES} == calls(kernels, len(model.layers))


def calls(kernels: Kernels, layers: int) -> dict[str, int]:
    """The calls of each kernel in a decoding. The prompt has more positions than the products take."""
    tokens = TOKENS - 1
    expected = {
        "add_rms_norm": 2 * layers * TOKENS,
        "rope_qkv": layers * TOKENS,
        "swiglu_qmv": layers * tokens,
        "sdpa_quantized": layers * TOKENS,
        "norm_rope_qkv": (layers - 1) * tokens,  # the norm of the first layer has no add before it
        "norm_swiglu_qmv": layers * tokens,
    }
    used = {name: count if getattr(kernels, name) else 0 for name, count in expected.items()}
    if kernels == FUSED:  # the products with the norm come before the kernels apart
        used["add_rms_norm"] -= used["norm_rope_qkv"] + used["norm_swiglu_qmv"]
        used["rope_qkv"] -= used["norm_rope_qkv"]
        used["swiglu_qmv"] -= used["norm_swiglu_qmv"]
    return used
