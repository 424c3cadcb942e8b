"""A kernel that fails in its trial is not used, and the model decodes by its reference.

The trials are those of the program, with kernels in the harness; only their timing is replaced. A kernel fails there as
on a Mac: its threadgroup is larger than the GPU allows it, or the compiler does not know one of its types.
"""

from collections.abc import Callable

import pytest
from tiny_models import quantized, random_weights, tiny_args, write_folder

from mlx_llama3.autotune import choice, trial
from mlx_llama3.autotune.choice import KernelChoice, use_chosen
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.kernels.kernel_set import REFERENCE
from mlx_llama3.model.layers import tiled_linear
from mlx_llama3.model.transformer import Transformer
from tests.metal_harness.emulator import Dispatch, emulated

import mlx.core as mx

NAMES = ("add_rms_norm", "rope_qkv", "swiglu_qmv", "sdpa_quantized")


@pytest.fixture
def loaded(tmp_path, monkeypatch) -> Callable[..., Transformer]:
    """A function that loads a tiny model with packed weights; what passes its trial is taken as faster."""
    monkeypatch.setenv("MLX_LLAMA3_CACHE", str(tmp_path))
    monkeypatch.setenv(choice.VARIABLE, "auto")
    monkeypatch.setattr(choice, "has_metal", lambda: True)
    monkeypatch.setattr(trial, "compare", lambda case, device, timing: (0.5, 0.01))
    monkeypatch.setattr(tiled_linear, "use_tiled_layers", lambda model, dtype: None)

    def load(dtype: mx.Dtype = mx.float32, **changes: int) -> Transformer:
        args = tiny_args(**({"n_layers": 1, "dim": 128, "head_dim": 64, "hidden_dim": 32} | changes))
        weights = {name: weight.astype(dtype) for name, weight in random_weights(args).items()}
        folder = write_folder(tmp_path / "model", args, quantized(weights), quantization={"bits": 4, "group_size": 32})
        return load_model(folder, dtype=dtype)

    return load


def failed(chosen: KernelChoice, because: str) -> set[str]:
    """The kernels whose trial failed for this reason."""
    reasons = {name: " ".join(each.reason for each in chosen.decisions[name].values()) for name in NAMES}
    return {name for name, reason in reasons.items() if because in reason}


def decoded(model: Transformer) -> list[int]:
    """The tokens of greedy decoding over a quantized cache."""
    cache, fed, tokens = model.make_cache(CacheSettings(kv_bits=4)), [3, 14, 15], []
    for _ in range(4):
        fed = [mx.argmax(model(mx.array([fed]), cache[0].offset, cache)[0, -1]).item()]
        tokens += fed
    return tokens


@pytest.mark.parametrize(
    ("max_threads", "shape", "too_wide"),
    [
        (896, {"dim": 4096, "head_dim": 128}, ["add_rms_norm"]),
        (384, {"dim": 2048, "head_dim": 128}, ["add_rms_norm", "sdpa_quantized"]),
        (384, {"dim": 1536, "head_dim": 64}, []),
    ],
    ids=str,
)
def test_threadgroups_larger_than_the_gpu_allows(loaded, max_threads, shape, too_wide):
    """An M2 Ultra allowed one kernel 896 threads. 384 is what a thread of 160 registers leaves."""
    model = loaded(**shape)
    with emulated(max_threads=max_threads) as emulation:
        chosen = use_chosen(model)
        assert failed(chosen, f"the maximum allowed threads per threadgroup ({max_threads})") == set(too_wide)
        assert {name for name in NAMES if not getattr(chosen.kernels, name)} == set(too_wide)
        before = emulation.calls.copy()
        tokens = decoded(model)
        used = emulation.calls - before
    assert used and not [call for call in used if call.startswith(tuple(f"llama3_{name}" for name in too_wide))]
    model.use(REFERENCE)
    assert tokens == decoded(model)


def test_a_compiler_without_bfloat(loaded):
    """Metal before 3.1 (macOS 13) has no such type: kernels of a bfloat16 model do not compile there."""

    def compile_without_bfloat(dispatch: Dispatch) -> None:
        if "bfloat" in dispatch.kernel.source:
            raise RuntimeError(
                "[metal::Device] Unable to build metal library from source\n"
                "program_source:1:11: error: unknown type name 'bfloat16_t'"
            )

    for dtype in (mx.bfloat16, mx.float32):
        model = loaded(dtype)
        with emulated(before=compile_without_bfloat) as emulation:
            chosen = use_chosen(model)
            expected = set(NAMES) if dtype == mx.bfloat16 else set()
            assert failed(chosen, "error: unknown type name 'bfloat16_t'") == expected
            assert {name for name in NAMES if not getattr(chosen.kernels, name)} == expected
            before = emulation.calls.copy()
            tokens = decoded(model)
            assert bool(emulation.calls - before) == (dtype == mx.float32)
        model.use(REFERENCE)
        assert tokens == decoded(model)
