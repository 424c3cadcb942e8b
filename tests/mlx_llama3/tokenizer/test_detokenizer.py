from hypothesis import example, given, strategies as st

from mlx_llama3.tokenizer.detokenizer import Detokenizer

# Single bytes of all kinds, lead bytes without continuation, surrogates, overlong forms, beyond U+10FFFF.
_BROKEN = [b"\xf0\x9f", b"\x80", b"\xe6\x97", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"\xff", b"\xf0", b"a"]
_WHOLE = (
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 日本語 e\u0301\u0304 é \U0001f3f3\ufe0f\u200d\U0001f308 한국어".encode()
)

tokens = st.lists(st.sampled_from(_BROKEN) | st.binary(max_size=4) | st.text(max_size=3).map(str.encode))


def run(pieces):
    detokenizer = Detokenizer(pieces.__getitem__)
    texts = [detokenizer.add(n) for n in range(len(pieces))]
    return texts, detokenizer.finish()


@given(tokens)
@example([b"\xf0\x9f", b"", b"\x98\x80"])
@example([b"\xf0\x9f", b"a", b"\x98\x80"])
def test_stream_equals_the_decoding_of_all_bytes(pieces):
    texts, rest = run(pieces)
    assert "".join(texts) + rest == b"".join(pieces).decode("utf-8", errors="replace")


@given(st.sets(st.integers(0, len(_WHOLE))))
def test_every_split_of_whole_text_shows_only_whole_characters(cuts):
    borders = [0, *sorted(cuts), len(_WHOLE)]
    texts, rest = run([_WHOLE[a:b] for a, b in zip(borders, borders[1:], strict=False)])
    assert "".join(texts) == _WHOLE.decode()
    assert rest == ""


def test_incomplete_characters_are_delayed_and_flushed():
    texts, rest = run([b"a\xf0", b"\x9f", b"\x98", b"\x80b", b"\xe6\x97"])
    assert texts == ["a", "", "", "\U0001f600b", ""]
    assert rest == "\ufffd"


def test_ready_for_the_next_answer_after_finish():
    detokenizer = Detokenizer([b"\xf0\x9f", b"ok"].__getitem__)
    assert detokenizer.add(0) + detokenizer.finish() == "\ufffd"
    assert detokenizer.add(1) + detokenizer.finish() == "ok"
