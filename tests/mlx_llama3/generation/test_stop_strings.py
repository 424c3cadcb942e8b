import pytest
from hypothesis import example, given, strategies as st

from mlx_llama3.errors import UserError
from mlx_llama3.generation.stop_strings import StopStrings


def expected(text, stops):
    """The definition, character by character: the stop string that ends first counts, of several the longest."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


def run(pieces, stops):
    watcher, shown = StopStrings(stops), ""
    for piece in pieces:
        safe, stopped = watcher.add(piece)
        shown += safe
        if stopped:
            return shown, True
    return shown + watcher.finish(), False


few = st.text("ab\n", max_size=8)


@given(st.lists(few), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
@example(["a", "ab"], ["aab"])
@example(["aaa", "b"], ["aab"])
@example(["abc"], ["abc", "b"])
def test_any_split_gives_what_the_whole_text_gives(pieces, stops):
    assert run(pieces, stops) == expected("".join(pieces), stops)


@given(st.lists(few), st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3))
def test_only_the_beginning_of_a_stop_string_is_delayed(pieces, stops):
    watcher = StopStrings(stops)
    for piece in pieces:
        if watcher.add(piece)[1]:
            return
    rest = watcher.finish()
    assert rest == "" or any(stop.startswith(rest) for stop in stops)


def test_text_is_delayed_until_it_is_no_stop_string():
    watcher = StopStrings(["\n\nUser:"])
    assert watcher.add("Hello.\n") == ("Hello.", False)
    assert watcher.add("\n") == ("", False)
    assert watcher.add("Us") == ("", False)
    assert watcher.add("ual") == ("\n\nUsual", False)
    assert watcher.add("\n\nUser: next") == ("", True)
    assert watcher.finish() == ""


def test_one_string_alone_and_none():
    assert run(["stop", "ping"], "pp") == ("sto", True)
    assert run(["a", "b"], ()) == ("ab", False)


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UserError, match="a stop string is empty"):
        StopStrings(["x", ""])
