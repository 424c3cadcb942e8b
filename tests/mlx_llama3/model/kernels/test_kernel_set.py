"""At which numbers of rows a model runs a kernel."""

import pytest
from tiny_models import tiny_args

from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.kernels import (
    add_rms_norm,
    norm_rope_qkv,
    norm_swiglu_qmv,
    rope_qkv,
    sdpa_quantized,
    swiglu_qmv,
)
from mlx_llama3.model.kernels.kernel_set import FUSED, NAMES, REFERENCE, Kernels, Rows
from mlx_llama3.model.transformer import Transformer

import mlx.core as mx

FILES = {
    "add_rms_norm": add_rms_norm,
    "rope_qkv": rope_qkv,
    "swiglu_qmv": swiglu_qmv,
    "sdpa_quantized": sdpa_quantized,
    "norm_rope_qkv": norm_rope_qkv,
    "norm_swiglu_qmv": norm_swiglu_qmv,
}


def test_the_numbers_of_rows():
    counts = {1: Rows.ONE, 2: Rows.FEW, 8: Rows.FEW, 9: Rows.MANY, 4096: Rows.MANY}
    assert {count: Rows.of(count) for count in counts} == counts
    labels = {Rows.NONE: "none", Rows.ONE | Rows.MANY: "1 row, prompts", Rows.FEW: "2 to 8 rows", Rows.ALL: "all rows"}
    assert {rows: rows.label for rows in labels} == labels


def test_all_kernels_and_none():
    assert FUSED.at(3) == set(NAMES) and REFERENCE.at(3) == set()
    assert Kernels(rope_qkv=Rows.FEW | Rows.ONE, swiglu_qmv=Rows.ONE).at(2) == {"rope_qkv"}
    assert all(getattr(FUSED, name) == Rows.ALL and getattr(REFERENCE, name) == Rows.NONE for name in NAMES)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("rows", [Rows.NONE, Rows.ONE, Rows.FEW, Rows.MANY], ids=str)
def test_a_kernel_runs_at_its_rows_alone(monkeypatch, name, rows):
    """Passes of 1 position, of 3, of 3 in each of 3 sequences, and of 9. The kernel's reference stands for it."""
    called = []

    def fused(*args):
        called.append(passing)
        return FILES[name].reference(*args)

    monkeypatch.setattr(FILES[name], "fused", fused)
    monkeypatch.setattr(FILES[name], "takes", lambda *_: True)  # the model's matrices are dense
    model = Transformer(tiny_args(dim=64, n_layers=2, head_dim=64))
    model.use(Kernels(**{name: rows}))
    for passing in ((1, 1), (1, 3), (3, 3), (1, 9)):
        cache = model.make_cache(CacheSettings(kv_bits=8)) if name == "sdpa_quantized" else None
        mx.eval(model(mx.zeros(passing, mx.int32), 0, cache))
    # The cache's kernel counts the positions of one sequence, of which it takes 8 at most.
    many = Rows.FEW if name == "sdpa_quantized" else Rows.MANY
    expected = {(1, 1): Rows.ONE, (1, 3): Rows.FEW, (3, 3): many, (1, 9): Rows.MANY}
    if name == "sdpa_quantized":
        del expected[1, 9]
    assert set(called) == {passing for passing, wanted in expected.items() if wanted in rows}
