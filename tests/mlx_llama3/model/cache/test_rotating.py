"""The KV cache with a sliding window, against float64 attention under an explicit mask."""

from dataclasses import replace

import numpy as np
import pytest
from interruptions import interrupted_at_each_line
from tiny_models import tiny_args, tiny_model
from watched_model import WatchedModel

from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.errors import UserError
from mlx_llama3.model.cache import rotating as rotating_cache
from mlx_llama3.model.cache.prefix import PrefixCache
from mlx_llama3.model.cache.rotating import RotatingKVCache, Window
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.trace.position import look

import mlx.core as mx

HEADS, KV_HEADS, DIM = 4, 2, 8
TOLERANCE = 2e-6


@pytest.fixture(autouse=True)
def small_slack(monkeypatch):
    """A small ring, so that short sequences go round it several times."""
    monkeypatch.setattr(Window, "SLACK", 5)


def sequence(length: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Queries `(1, HEADS, length, DIM)`; keys and values `(2, 1, KV_HEADS, length, DIM)`."""
    random = np.random.default_rng(seed)
    return random.standard_normal((1, HEADS, length, DIM)), random.standard_normal((2, 1, KV_HEADS, length, DIM))


def attention(q: np.ndarray, kv: np.ndarray, max_size: int, keep: int) -> np.ndarray:
    """Attention of each position to the first `keep` and the latest `max_size - keep` positions, in float64."""
    length = q.shape[2]
    keys, values = (np.repeat(part, HEADS // KV_HEADS, axis=1) for part in kv)
    out = np.zeros(q.shape)
    for p in range(length):
        seen = [k for k in range(p + 1) if k < keep or k > p - (max_size - keep)]
        scores = np.einsum("bhd,bhkd->bhk", q[:, :, p], keys[:, :, seen]) * DIM**-0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, :, p] = np.einsum("bhk,bhkd->bhd", weights / weights.sum(-1, keepdims=True), values[:, :, seen])
    return out


def feed(cache: RotatingKVCache, q: np.ndarray, kv: np.ndarray, chunks: list[int]) -> np.ndarray:
    parts, start = [], cache.offset
    for chunk in chunks:
        part = slice(start, start + chunk)
        mask = "causal" if chunk > 1 else None
        new = mx.array(kv[:, :, :, part].astype(np.float32))
        parts.append(np.array(cache.attend(mx.array(q[:, :, part].astype(np.float32)), new, DIM**-0.5, mask)))
        start += chunk
    assert cache.offset == start
    return np.concatenate(parts, axis=2)


@pytest.mark.parametrize("keep", [0, 1, 4])
@pytest.mark.parametrize("max_size", [5, 12])
@pytest.mark.parametrize(
    "chunks",
    [[1] * 60, [60], [3, 30, 1, 1, 1, 7, 1, 16], [12] * 5, [11, 1, 1] + [1] * 20 + [9, 1, 1, 1, 15]],
    ids=["one by one", "one chunk longer than all", "mixed", "window after window", "across the border"],
)
def test_values_do_not_depend_on_chunks(max_size, keep, chunks):
    q, kv = sequence(60)
    out = feed(RotatingKVCache(Window(max_size, keep)), q, kv, chunks)
    np.testing.assert_allclose(out, attention(q, kv, max_size, keep)[:, :, : sum(chunks)], atol=TOLERANCE)


def test_its_size_is_bounded_by_window_and_slack():
    q, kv = sequence(60)
    cache = RotatingKVCache(Window(12, 4))
    feed(cache, q, kv, [1] * 60)
    assert cache.fetch()[0].shape[2] == 12 + Window.SLACK
    assert not cache.holds_all


@pytest.mark.parametrize("fed", [3, 12, 14, 17, 18, 40])
def test_trim_is_exact_or_refused(fed):
    """After a trim that `trimmable_to` allows, attention to new tokens is exact; any other trim raises."""
    max_size, keep, more = 12, 4, 25
    q, kv = sequence(fed)
    q2, kv2 = sequence(fed + more, seed=1)
    allowed = []
    for length in range(fed + 1):
        cache = RotatingKVCache(Window(max_size, keep))
        feed(cache, q, kv, [fed])
        if cache.trimmable_to(length) != length:
            assert cache.trimmable_to(length) == keep
            with pytest.raises(ValueError, match="cannot trim"):
                cache.trim(fed - length)
            assert cache.offset == fed
            continue
        allowed.append(length)
        cache.trim(fed - length)
        both_q = np.concatenate([q[:, :, :length], q2[:, :, length:]], axis=2)
        both_kv = np.concatenate([kv[:, :, :, :length], kv2[:, :, :, length:]], axis=3)
        out = feed(cache, both_q, both_kv, [2, 1, 7, *[1] * (fed + more - length - 10)])
        np.testing.assert_allclose(out, attention(both_q, both_kv, max_size, keep)[:, :, length:], atol=TOLERANCE)
    assert set(range(min(fed, keep) + 1)) <= set(allowed)
    assert set(range(max(0, fed - Window.SLACK), fed + 1)) <= set(allowed)
    assert len(allowed) == fed + 1 or fed > max_size + Window.SLACK


@pytest.mark.parametrize("new", [1, 4, 30])
@pytest.mark.parametrize("fed", [3, 14, 40])
def test_ctrl_c_in_a_pass_leaves_what_trimmable_to_allows(fed, new):
    """After an interrupted pass, a trim to the length that `trimmable_to` gives leaves an exact cache."""
    q, kv = sequence(fed + new)

    def make() -> RotatingKVCache:
        cache = RotatingKVCache(Window(12, 4))
        feed(cache, q, kv, [fed])
        return cache

    for cache in interrupted_at_each_line(rotating_cache.__file__, make, lambda cache: feed(cache, q, kv, [new])):
        length = cache.trimmable_to(fed)
        cache.trim(cache.offset - length)
        out = feed(cache, q, kv, [2, *[1] * (fed + new - length - 2)] if fed + new - length > 1 else [1])
        np.testing.assert_allclose(out, attention(q, kv, 12, 4)[:, :, length:], atol=TOLERANCE)


def test_a_prefix_and_its_origin_are_independent():
    q, kv = sequence(40)
    q2, kv2 = sequence(50, seed=1)
    cache = RotatingKVCache(Window(12, 4))
    feed(cache, q, kv, [30])
    prefix = cache.prefix(27)
    both = np.concatenate([kv[:, :, :, :27], kv2[:, :, :, 27:]], axis=3)
    feed(prefix, q2, both, [1] * 13)
    rest = feed(cache, q, kv, [1] * 10)
    np.testing.assert_allclose(rest, attention(q, kv, 12, 4)[:, :, 30:], atol=TOLERANCE)


def test_a_restored_cache_gives_the_same_outputs():
    q, kv = sequence(60)
    cache, restored = (RotatingKVCache(Window(12, 4)) for _ in range(2))
    feed(cache, q, kv, [33])
    restored.restore(cache.tensors(), cache.offset)
    assert [restored.trimmable_to(n) for n in range(34)] == [cache.trimmable_to(n) for n in range(34)]
    np.testing.assert_array_equal(feed(restored, q, kv, [1, 9, 17]), feed(cache, q, kv, [1, 9, 17]))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("tiny"), tiny_args(n_layers=2))


def test_prefix_reuse_feeds_again_what_left_the_window(model):
    """The logits after reuse are those of a fresh cache, wherever the new text starts to differ from the old."""
    settings = CacheSettings(max_kv_size=12)
    old = [(7 * i) % 300 for i in range(40)]
    for common in (0, 3, 10, 30, 36, 38, 40):
        new = old[:common] + [(5 * i + 1) % 300 for i in range(9)]
        used, fresh = (PrefixCache(model.make_cache(settings), settings) for _ in range(2))
        model(mx.array([old]), 0, used.layers)
        used.set_ids(old)
        rest = used.reuse(new)
        assert rest == new[len(used.ids) :]
        assert len(used.ids) == (common if common <= 4 or common > 40 - Window.SLACK - 1 else 4)
        logits = model(mx.array([rest]), len(used.ids), used.layers)[0, -1]
        expected = model(mx.array([new]), 0, fresh.layers)[0, -1]
        assert mx.abs(logits - expected).max().item() < 1e-5


def test_settings():
    for keywords, message in (
        ({"max_kv_size": 4}, "above 4"),
        ({"max_kv_size": 0}, "above 4"),
        ({"max_kv_size": 9, "kv_keep": 9}, "above 9"),
        ({"kv_keep": -1}, "kv_keep is -1"),
        ({"max_kv_size": 64, "kv_bits": 8}, "do not go together"),
    ):
        with pytest.raises(UserError, match=message):
            CacheSettings(**keywords)


def test_a_conversation_keeps_its_system_prompt(llama31):
    """The system prompt stays in the window of a long conversation, and each reply is that of a fresh cache."""
    model = WatchedModel(vocab_size=llama31.vocab_size)
    settings = CacheSettings(max_kv_size=60)
    chat = Conversation(model, llama31, system="Be kind.", cache_settings=settings)
    for text in ("one two three four five six", "seven", "eight nine ten"):
        reply = list(chat.send(text, max_tokens=20))
        assert "Be kind." in llama31.decode(chat.ids[: chat.cache[0].window.keep])
        same_keep = replace(settings, kv_keep=chat.cache[0].window.keep)
        fresh = PrefixCache(model.make_cache(same_keep), same_keep)
        logits = model.residual(mx.array([chat.prompt_ids]), 0, fresh.layers)[:, -1]
        assert model.head(logits).argmax().item() == reply[0].token
    assert len(chat.ids) > 60 and not chat.cache[0].holds_all
    before = chat.messages
    list(chat.retry(max_tokens=20))
    assert chat.messages == before
    chat.system = "Be very kind."
    list(chat.send("eleven", max_tokens=3))
    assert "Be very kind." in llama31.decode(chat.ids[: chat.cache[0].window.keep])
    with pytest.raises(UserError, match="system prompt takes .* tokens, and the cache holds 60"):
        chat.system = "kind " * 90
    assert chat.system == "Be very kind."


def test_look_is_refused_once_positions_have_left_the_window(model):
    cache = model.make_cache(CacheSettings(max_kv_size=12))
    ids = list(range(40))
    model(mx.array([ids[:10]]), 0, cache)
    assert look(model, ids, 8, cache=cache).index == 8
    model(mx.array([ids[10:]]), 10, cache)
    with pytest.raises(UserError, match="window"):
        look(model, ids, 38, cache=cache)
