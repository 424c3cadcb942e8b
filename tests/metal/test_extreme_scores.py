"""`sdpa_quantized` where one score outweighs all others, or all are very low or very high; and over long contexts."""

import numpy as np
import pytest
from correctly_rounded import assert_rounded
from quantized_attention import attention64, inputs

from mlx_llama3.model.kernels import sdpa_quantized
from mlx_llama3.model.kernels.kv_packing import PackedLayout, pack
from tests.metal_harness.build import FINITE, RUN
from tests.metal_harness.emulator import emulated

import mlx.core as mx

LAYOUT = PackedLayout(64, 4)
N_KV_HEADS = 2


def emulated_attention(*args, mode=RUN):
    with emulated(sdpa_quantized._attend, sdpa_quantized._reduce, mode=mode):
        out = sdpa_quantized.fused(*args)
        mx.eval(out)
    return out


def attention_over(keys, n_dense, q, mode=RUN):
    """The kernel's output, for keys `(n_kv_heads, T, head_dim)` in its order, dense ones first; and the values as it
    reads them, `(n_kv_heads, T, head_dim)`."""
    values = mx.random.normal(keys.shape, key=mx.random.key(3))
    kv = mx.stack([keys, values])[:, None]
    packed = pack(kv[:, :, :, n_dense:], LAYOUT)
    out = emulated_attention(q, kv[:, :, :, :n_dense], packed, (n_dense, packed.shape[2]), 1.0, LAYOUT, mode=mode)
    dequantized = LAYOUT.values(packed).dequantized(mx.float32)[0]
    return np.array(out), np.array(mx.concatenate([values[:, :n_dense], dequantized], axis=1))


@pytest.mark.parametrize("lengths", [(40, 8448), (120, 16500)], ids=str)
def test_long_contexts(lengths):
    """33 and 64 blocks. A position's weight is about 1 / T, so one that is left out changes the mean by more than the
    allowed error."""
    args = (*inputs(LAYOUT, lengths), lengths, 0.125, LAYOUT)
    assert_rounded([emulated_attention(*args)], [attention64(*args)], [1e-7])


@pytest.mark.parametrize("score", [-4.0e36, -1000.0, 1000.0, 4.0e36])
@pytest.mark.parametrize("lengths", [(5, 1), (40, 300), (40, 1500), (40, 8600)], ids=str)
def test_scores_that_are_all_very_low_or_very_high(lengths, score):
    """All keys are equal, so the output is the mean of the values, however low the scores are."""
    keys = mx.full((N_KV_HEADS, sum(lengths), 64), 32768.0)
    q = mx.full((1, 2 * N_KV_HEADS, 1, 64), score / 64 / 32768)
    out, values = attention_over(keys, lengths[0], q)
    finite, _ = attention_over(keys, lengths[0], q, FINITE)  # where exp(-inf) is not 0
    np.testing.assert_array_equal(finite, out)
    expected = values.mean(1, dtype=np.float64).repeat(2, axis=0)
    np.testing.assert_allclose(out[0, :, 0], expected, atol=2e-7)


@pytest.mark.parametrize(("total", "n_blocks"), [(1500, 8), (8600, 33), (66000, 64)])
def test_a_spike_in_any_block(total, n_blocks):
    """Each row has a high score at one position, whose value is the output. The last total exceeds 16 bits."""
    n_dense, group = 40, 8
    assert sdpa_quantized._blocks(total) == n_blocks
    step = sdpa_quantized._splits(group) * 32 * sdpa_quantized.NUMBERS // 64  # positions that a block reads at a time
    spikes = [block * step + block % step for block in (1, n_blocks // 2, min(32, n_blocks - 2), n_blocks - 1)]
    spikes += [0, n_dense - 1, n_dense, total - 1]
    keys = np.zeros((N_KV_HEADS, total, 64), np.float32)
    q = np.zeros((1, N_KV_HEADS * group, 1, 64), np.float32)
    for row, position in enumerate(spikes):
        keys[:, position, row] = 50
        q[0, row::group, 0, row] = 10
    out, values = attention_over(mx.array(keys), n_dense, mx.array(q))
    for head in range(N_KV_HEADS * group):
        np.testing.assert_array_equal(out[0, head, 0], values[head // group, spikes[head % group]])
