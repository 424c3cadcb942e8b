"""The quantized KV cache: its stored values and its attention against float64; and all features that take a cache."""

from pathlib import Path

import numpy as np
import pytest
from interruptions import interrupted_at_each_line
from tiny_models import tiny_args, tiny_model

from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.errors import UserError
from mlx_llama3.generation.decoding import prefill
from mlx_llama3.model.cache import quantized as quantized_cache
from mlx_llama3.model.cache.kv_cache import KVCache
from mlx_llama3.model.cache.quantized import QuantizedKVCache
from mlx_llama3.model.cache.settings import CacheSettings, make_layers
from mlx_llama3.model.hooks.edits import Scale, edited
from mlx_llama3.model.kernels.kv_packing import PackedLayout
from mlx_llama3.tokenizer.tokenizer import load_tokenizer
from mlx_llama3.trace.position import look

import mlx.core as mx

FIRST, NEWEST, BLOCK = QuantizedKVCache.FIRST, QuantizedKVCache.NEWEST, QuantizedKVCache.BLOCK
FOUR, EIGHT = CacheSettings(kv_bits=4), CacheSettings(kv_bits=8)


def random_kv(length: int, *, seed: int = 0, n_kv_heads: int = 2, head_dim: int = 64, batch: int = 1) -> mx.array:
    return mx.random.normal((2, batch, n_kv_heads, length, head_dim), key=mx.random.key(seed))


def random_q(length: int, *, seed: int = 9, n_heads: int = 4, head_dim: int = 64, batch: int = 1) -> mx.array:
    return mx.random.normal((batch, n_heads, length, head_dim), key=mx.random.key(seed))


def filled(kv: mx.array, chunks: list[int], *, bits: int = 4) -> tuple[QuantizedKVCache, np.ndarray]:
    """A cache that was fed `kv` in chunks, and the outputs of attention for them; the queries are always the same."""
    cache, start, outputs = QuantizedKVCache(PackedLayout(kv.shape[-1], bits)), 0, []
    q = random_q(kv.shape[3], n_heads=2 * kv.shape[2], head_dim=kv.shape[4], batch=kv.shape[1])
    for length in chunks:
        new = kv[:, :, :, start : start + length]
        mask = "causal" if length > 1 else None
        outputs.append(cache.attend(q[:, :, start : start + length], new, 0.125, mask))
        start += length
    return cache, np.array(mx.concatenate(outputs, axis=2), np.float64)


def attention64(q: mx.array, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Float64 attention of the last queries `(B, H, S, D)` over `(B, n_kv_heads, T, D)`, causal, scale 0.125."""
    q, group = np.array(q, np.float64), q.shape[1] // keys.shape[1]
    keys, values = (np.repeat(part.astype(np.float64), group, axis=1) for part in (keys, values))
    S, T = q.shape[2], keys.shape[2]
    scores = 0.125 * q @ keys.swapaxes(-1, -2)
    scores[..., np.arange(T) > np.arange(T - S, T)[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights @ values / weights.sum(-1, keepdims=True)


def arrays(cache: KVCache) -> tuple[np.ndarray, np.ndarray]:
    keys, values = cache.fetch()
    return np.array(keys), np.array(values)


def step_of(x: np.ndarray, group: int, bits: int) -> np.ndarray:
    """The quantization step of each number's group, in the shape of x."""
    groups = x.reshape(*x.shape[:-1], -1, group)
    return np.repeat((groups.max(-1) - groups.min(-1)) / (2**bits - 1), group, axis=-1)


CHUNKS = [[400], [1] * 400, [130, 1, 1, 5, 63, 200], [20, 20] + [8] * 45]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("chunks", CHUNKS, ids=["at once", "one by one", "mixed", "drafts"])
def test_both_ends_are_exact_and_the_rest_is_within_half_a_step(bits, chunks):
    kv = random_kv(400)
    cache, _ = filled(kv, chunks, bits=bits)
    assert cache.offset == 400
    for stored, given, is_key in zip(arrays(cache), np.array(kv), (True, False), strict=True):
        error = np.abs(stored - given)
        newest = 400 - NEWEST
        assert error[:, :, :FIRST].max() == 0 and error[:, :, newest:].max() == 0
        group, its_bits = (64, 8) if is_key else (8 * bits, bits)
        # Scale and bias are rounded to float16, an error of 2**-11 of the bias and of the range.
        allowed = 0.5 * step_of(given, group, its_bits) + 2**-11 * 2 * np.abs(given).max()
        assert (error <= allowed).all()
        packed = error[:, :, FIRST : newest - BLOCK]  # positions that must be packed by now
        assert (packed.max(-1) > 0).all()


@pytest.mark.parametrize("chunks", CHUNKS, ids=["at once", "one by one", "mixed", "drafts"])
@pytest.mark.parametrize(("batch", "head_dim", "bits"), [(1, 64, 4), (2, 128, 8)])
def test_attends_to_the_stored_values(chunks, batch, head_dim, bits):
    """Each chunk attends to itself unquantized and to the past as `fetch` returns it; within 5e-6 of float64."""
    kv = random_kv(400, batch=batch, head_dim=head_dim)
    cache, start = QuantizedKVCache(PackedLayout(head_dim, bits)), 0
    for number, length in enumerate(chunks):
        q, new = random_q(length, batch=batch, head_dim=head_dim, seed=number), kv[:, :, :, start : start + length]
        past = arrays(cache) if start else [np.zeros((batch, 2, 0, head_dim))] * 2
        out = np.array(cache.attend(q, new, 0.125, "causal" if length > 1 else None))
        keys, values = [np.concatenate(pair, axis=2) for pair in zip(past, np.array(new), strict=True)]
        if number % 7 == 0 or length > 1:
            np.testing.assert_allclose(out, attention64(q, keys, values), atol=5e-6)
        start += length


def test_quantizes_no_worse_than_mlx():
    """Mean squared error against `mx.quantize` with the same groups and bits, for float32 and bfloat16 input."""
    for dtype in (mx.float32, mx.bfloat16):
        kv = random_kv(256).astype(dtype)
        cache, _ = filled(kv.astype(mx.float32), [256])
        for stored, given, (group, bits) in zip(arrays(cache), kv, ((64, 8), (32, 4)), strict=True):
            parts = mx.quantize(given, group_size=group, bits=bits)
            of_mlx = np.array(mx.dequantize(*parts, group_size=group, bits=bits).astype(mx.float32))
            given = np.array(given.astype(mx.float32))
            middle = slice(FIRST, FIRST + BLOCK)
            ours, theirs = (np.square(x - given)[:, :, middle].mean() for x in (stored, of_mlx))
            assert ours < theirs


@pytest.mark.parametrize("value", [0.0, 3.25, 1e-7, -7e4 + 0.5], ids=str)
def test_groups_without_a_range(value):
    """Equal numbers in a group cause no division by 0. Beyond float16 they become infinite, for the NaN check."""
    cache, _ = filled(mx.full((2, 1, 2, 300, 64), value), [300])
    keys, values = arrays(cache)
    if abs(value) < 65504:
        np.testing.assert_allclose(keys, value, atol=1e-7)
        np.testing.assert_allclose(values, value, atol=1e-7)
    else:
        assert not np.isfinite(keys[:, :, FIRST]).any()


def test_grows_in_steps():
    cache, sizes = QuantizedKVCache(PackedLayout(64, 4)), set()
    kv, q = random_kv(1), random_q(1)
    for _ in range(700):
        cache.attend(q, kv, 0.125, None)
        sizes.add(tuple(array.shape[-2] for array in cache.state))
    assert sizes == {(QuantizedKVCache.ROOM, 256), (QuantizedKVCache.ROOM, 512), (QuantizedKVCache.ROOM, 768)}


@pytest.mark.parametrize("left", [399, 380, 330, 200, FIRST + 1, FIRST, 10, 0])
def test_trims_into_every_part_and_can_be_extended(left):
    kv, more = random_kv(400), random_kv(150, seed=5)
    cache, _ = filled(kv, [100, 300])
    before = arrays(cache)
    cache.trim(400 - left)
    assert cache.offset == left
    if left:
        for stored, given in zip(arrays(cache), before, strict=True):
            np.testing.assert_array_equal(stored, given[:, :, :left])
    for start in range(0, 150, 5):
        q, new = random_q(5, seed=start), more[:, :, :, start : start + 5]
        past = arrays(cache) if cache.offset else [np.zeros((1, 2, 0, 64))] * 2
        keys, values = [np.concatenate(pair, axis=2) for pair in zip(past, np.array(new), strict=True)]
        out = np.array(cache.attend(q, new, 0.125, "causal"))
        np.testing.assert_allclose(out, attention64(q, keys, values), atol=5e-6)
    for stored, given in zip(arrays(cache), np.array(more), strict=True):
        np.testing.assert_array_equal(stored[:, :, -NEWEST:], given[:, :, -NEWEST:])
    for count in (-1, cache.offset + 1):
        with pytest.raises(ValueError, match="trim"):
            cache.trim(count)


@pytest.mark.parametrize(("before", "new"), [(0, 300), (200, 150), (FIRST + NEWEST + BLOCK - 1, 1), (420, 600)])
def test_ctrl_c_in_a_pass_leaves_the_cache_as_before(before, new):
    """Once the interrupted pass's positions are trimmed, the cache is as before the pass, and can be extended."""
    kv, more = random_kv(before + new), random_kv(3, seed=5)

    def make() -> QuantizedKVCache:
        return filled(kv, [before], bits=8)[0] if before else QuantizedKVCache(PackedLayout(64, 8))

    def run(cache: QuantizedKVCache) -> None:
        cache.attend(random_q(new), kv[:, :, :, before:], 0.125, "causal" if new > 1 else None)

    for cache in interrupted_at_each_line(quantized_cache.__file__, make, run):
        cache.trim(cache.offset - before)
        cache.attend(random_q(3), more, 0.125, "causal")
        for stored, given, added in zip(arrays(cache), np.array(kv), np.array(more), strict=True):
            np.testing.assert_allclose(stored[:, :, :before], given[:, :, :before], atol=0.03)
            np.testing.assert_array_equal(stored[:, :, before:], added)


@pytest.mark.parametrize("count", [400, 350, 200, 20])
def test_a_prefix_and_its_origin_are_independent(count):
    """The prefix has the cache's positions, and writing to one never changes the other."""
    cache, _ = filled(random_kv(400), [400])
    before = arrays(cache)
    prefix = cache.prefix(count)
    for stored, given in zip(arrays(prefix), before, strict=True):
        np.testing.assert_array_equal(stored, given[:, :, :count])
    prefix.attend(random_q(1), random_kv(1, seed=1), 0.125, None)
    prefix.attend(random_q(300), random_kv(300, seed=2), 0.125, "causal")
    extended = arrays(prefix)
    for stored, given in zip(arrays(cache), before, strict=True):
        np.testing.assert_array_equal(stored, given)
    cache.attend(random_q(200), random_kv(200, seed=3), 0.125, "causal")
    for stored, given in zip(arrays(prefix), extended, strict=True):
        np.testing.assert_array_equal(stored, given)


@pytest.mark.parametrize("length", [20, 300])
def test_a_restored_cache_gives_the_same_outputs(length):
    cache, _ = filled(random_kv(length), [length])
    restored = QuantizedKVCache(PackedLayout(64, 4))
    restored.restore(cache.tensors(), length)
    q, kv = random_q(200), random_kv(200, seed=1)
    for lengths in ([1] * 5, [195]):
        for n in lengths:
            new = (q[:, :, :n], kv[:, :, :, :n], 0.125, "causal")
            np.testing.assert_array_equal(*(np.array(one.attend(*new)) for one in (cache, restored)))


def test_an_array_as_mask():
    """A mask that is an array is applied to a single position too; within 5e-6 of full attention with it."""
    cache, _ = filled(random_kv(50), [50])
    keys, values = arrays(cache)
    q, new = random_q(1), random_kv(1, seed=4)
    seen = np.arange(51) % 3 == 0
    visible = [np.concatenate(pair, axis=2)[:, :, seen] for pair in zip((keys, values), np.array(new), strict=True)]
    out = cache.attend(q, new, 0.125, mx.array(seen)[None])
    np.testing.assert_allclose(np.array(out), attention64(q, *visible), atol=5e-6)


# The cache in a model.


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"), tiny_args(head_dim=64, max_seq_len=4096))


IDS = [(7 * i + i // 9) % 300 for i in range(500)]


def test_a_prompt_peaks_no_higher_than_with_a_plain_cache(tmp_path):
    args = tiny_args(n_layers=6, n_heads=4, n_kv_heads=4, head_dim=64, max_seq_len=4096)
    model = tiny_model(tmp_path / "m", args)
    ids, peaks = [i % 300 for i in range(1200)], {}
    for settings in (CacheSettings(), FOUR, EIGHT):
        cache = model.make_cache(settings)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        mx.eval(prefill(model, ids, cache, chunk=100), [layer.state for layer in cache])
        peaks[settings.kv_bits] = mx.get_peak_memory() - before
    assert peaks[4] <= peaks[8] < peaks[None]


def test_look_does_not_change_the_cache(model):
    cache = model.make_cache(EIGHT)
    logits = prefill(model, IDS, cache)
    before = [arrays(layer) for layer in cache]
    position = look(model, IDS, 499, cache=cache)
    # Prefill attended to the unquantized prompt, this pass to most of it in 8 bits.
    np.testing.assert_allclose(np.array(position.logits), np.array(logits[0]), atol=0.02)
    assert [layer.offset for layer in position.cache] == [500] * 3
    look(model, IDS, 30, cache=cache)
    for layer, given in zip(cache, before, strict=True):
        np.testing.assert_array_equal(arrays(layer), given)


def test_runs_under_an_edit(model):
    quiet = edited(model, [Scale(1, "attention", 0.0)])
    caches = quiet.make_cache(EIGHT), quiet.make_cache()
    logits = [np.array(prefill(quiet, IDS, cache, chunk=100)) for cache in caches]
    np.testing.assert_allclose(*logits, atol=0.02)
    assert np.abs(logits[0] - np.array(prefill(model, IDS, model.make_cache(EIGHT), chunk=100))).max() > 0.1


def test_a_conversation_reuses_undoes_and_is_saved(tmp_path_factory, llama31):
    args = tiny_args(vocab_size=llama31.vocab_size, n_layers=1, head_dim=64, max_seq_len=4096)
    model = tiny_model(tmp_path_factory.mktemp("chat"), args)
    chat = Conversation(model, llama31, system="Be kind. " * 60, cache_settings=FOUR, settings={"max_tokens": 20})
    assert all(isinstance(layer, QuantizedKVCache) for layer in chat.cache)
    list(chat.send("Hello there " * 20))
    assert chat.fed == len(chat.prompt_ids)
    first = [step.token for step in chat.retry()]
    assert chat.fed < 20
    list(chat.send("And now?"))
    assert chat.fed < 40
    chat.undo()
    assert chat.undo() and not chat.ids
    list(chat.send("Hello there " * 20))
    assert chat.fed < 80 and len(first) > 0  # the start of the system prompt is reused
    loaded = Conversation.from_json(chat.to_json(), model, llama31, cache_settings=FOUR)
    assert loaded.ids == chat.ids
    chat.use(edited(model, [Scale(0, "mlp", 0.5)]))
    assert isinstance(chat.cache[0], QuantizedKVCache) and chat.cache[0].offset == 0


def test_the_demo_model_predicts_the_same(demo_folder):
    """Over 24 tokens after 300 tokens of English: the mean KL divergence from the plain cache in nats (measured: 2e-4
    with 4 bits, 1.4e-5 with 8), and how many of the most likely tokens are the same."""
    model, tokenizer = load_model(demo_folder, dtype=mx.float32), load_tokenizer(demo_folder)
    ids = tokenizer.encode((Path(__file__).parents[4] / "LICENSE").read_text(encoding="utf-8"))[:324]
    logs = {}
    for settings in (CacheSettings(), FOUR, EIGHT):
        cache = model.make_cache(settings)
        mx.eval(prefill(model, ids[:300], cache, chunk=150))
        draft = [model(mx.array([ids[i : i + 8]]), i, cache)[0] for i in (300, 308, 316)]
        logits = mx.concatenate(draft)
        logs[settings.kv_bits] = np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True), np.float64)
    plain = logs[None]
    for bits, divergence, same in ((4, 1e-3, 23), (8, 1e-4, 24)):
        assert (np.exp(plain) * (plain - logs[bits])).sum(-1).mean() < divergence
        assert (plain.argmax(-1) == logs[bits].argmax(-1)).sum() >= same


@pytest.mark.parametrize("head_dim", [16, 80, 96])
def test_refuses_other_head_sizes(head_dim):
    with pytest.raises(UserError, match=f"needs heads of a multiple of 64, and this model's have {head_dim}"):
        make_layers(FOUR, tiny_args(head_dim=head_dim))


@pytest.mark.parametrize("bits", [0, 2, 16])
def test_refuses_other_bits(bits):
    with pytest.raises(UserError, match=f"kv_bits is {bits}; values of the cache take 4 or 8 bits"):
        CacheSettings(kv_bits=bits)


def test_refuses_a_window_beside_it():
    with pytest.raises(UserError, match="max_kv_size and kv_bits do not go together"):
        CacheSettings(kv_bits=4, max_kv_size=100)
