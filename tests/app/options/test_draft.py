"""`--draft` and `--draft-tokens` in generate, chat and app: the same answers, their share in the stats, refusals."""

import io
import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
from watched_model import WatchedModel

from app import cli
from app.chat import loop as chat
from app.options import request
from app.options.draft import Drafting
from app.options.model import OpenModel
from app.ui.panels.models import Loader
from app.ui.session.mlx_thread import Engine
from app.ui.session.session import ChatRequest, Session, Sessions
from mlx_llama3.tokenizer.tokenizer import Tokenizer, load_tokenizer

QUESTION = "Repeat word for word: The keeper climbed the stairs, cleaned the glass and lit the flame."
WORDS = "one two three four five six seven. "


@pytest.fixture
def answered(opened, monkeypatch, capsys):
    """Run `generate --json` with the demo model; returns the object and what went to standard error."""
    monkeypatch.setattr(request, "open_model", lambda name: opened)

    def run(*words: str) -> tuple[dict, str]:
        assert cli.main(["generate", "--prompt", QUESTION, "--json", "--max-tokens", "24", *words]) == 0
        out, err = capsys.readouterr()
        return json.loads(out), err

    return run


def test_ngram_gives_the_same_answer_and_its_share(answered):
    plain, _ = answered()
    assert "draft" not in plain["stats"]
    drafted, err = answered("--draft", "ngram", "--verbose")
    assert drafted["ids"] == plain["ids"]
    stats = drafted["stats"]["draft"]
    assert list(stats) == ["proposed", "accepted", "acceptance", "undrafted"]
    assert 0 < stats["accepted"] < stats["proposed"]
    assert stats["acceptance"] == pytest.approx(stats["accepted"] / stats["proposed"], abs=1e-3)
    assert err.splitlines()[3] == (
        f"drafts: {stats['accepted']} of {stats['proposed']} tokens right ({stats['acceptance']:.0%}), "
        f"{stats['undrafted']} tokens without a draft"
    )


def test_an_answer_that_nothing_could_be_drafted_for(answered):
    drafted, err = answered("--draft", "ngram", "--verbose", "--max-tokens", "1")
    assert drafted["stats"]["draft"]["proposed"] == 0
    assert err.splitlines()[3] == "drafts: none in 1 tokens"


def test_a_model_drafts_and_a_seed_says_the_same(answered):
    """The demo model for itself: every token is right."""
    words = ("--temp", "0.8", "--seed", "3")
    plain, _ = answered(*words)
    drafted, _ = answered(*words, "--draft", "demo", "--draft-tokens", "2")
    assert drafted["ids"] == plain["ids"]
    assert drafted["stats"]["draft"]["acceptance"] == 1 and drafted["stats"]["draft"]["proposed"] >= 4


@pytest.mark.parametrize("command", ["generate", "chat", "app"])
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--draft-tokens", "3"], "--draft-tokens needs --draft: a smaller model, or ngram"),
        (["--draft", "ngram", "--draft-tokens", "33"], "--draft-tokens is 33; it must be a whole number from 1 to 32"),
        (["--draft", "ngram", "--draft-tokens", "0"], "argument --draft-tokens: 0 is less than 1"),
    ],
)
def test_bad_options_are_refused_before_a_model_is_loaded(command, words, complaint, monkeypatch, capsys):
    for module in (chat, request):
        monkeypatch.setattr(module, "open_model", lambda name: pytest.fail("a model was loaded"))
    prompt = ["--prompt", "a"] if command == "generate" else []
    assert cli.main([command, *prompt, *words]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("name", ["./missing", "no-such-model"])
def test_a_draft_that_is_not_there(answered, opened, name, capsys):
    assert cli.main(["generate", "--prompt", "a", "--draft", name]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and name in err and err.count("\n") == 1


def test_another_tokenizer_is_refused_before_the_draft_is_loaded(demo_folder, tmp_path, monkeypatch, capsys):
    """The large model's tokenizer has two tokens the other way round."""
    from dataclasses import replace

    from mlx_llama3 import api

    right = load_tokenizer(demo_folder)
    tokens = list(right.vocabulary.tokens)
    tokens[500], tokens[501] = tokens[501], tokens[500]
    other = Tokenizer(replace(right.vocabulary, tokens=tokens), templates=right.chat_templates)
    monkeypatch.setattr(request, "open_model", lambda name: OpenModel("x", WatchedModel(vocab_size=49152), other))
    monkeypatch.setattr(api, "load_model", lambda *_: pytest.fail("the draft was loaded"))
    assert cli.main(["generate", "--prompt", "a", "--draft", "demo"]) == 2
    assert f"cannot draft for this model, since token 500 is {right.decode([500])!r} there" in capsys.readouterr().err


@pytest.fixture
def talk(tokenizer, monkeypatch, capsys):
    model = WatchedModel(vocab_size=tokenizer.vocab_size, max_seq_len=2048)
    monkeypatch.setattr(chat, "open_model", lambda name: OpenModel("tiny", model, tokenizer))

    def talk(*lines: str, replies: tuple[str, ...], options: tuple[str, ...]) -> tuple[int, str, str]:
        model.replies = [[*tokenizer.encode(reply), tokenizer.special_tokens["<|im_end|>"]] for reply in replies]
        stdin = io.BytesIO("".join(line + "\n" for line in lines).encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdin))
        return cli.main(["chat", *options]), *capsys.readouterr()

    return talk


def test_the_chat_tells_the_share_of_its_last_answer(talk, tmp_path):
    file = tmp_path / "talk.json"
    replies = (WORDS * 4, "Yes.")
    lines = ("Count.", "/stats", f"/save {file}", f"/load {file}", "Really?", "/stats")
    code, out, err = talk(*lines, replies=replies, options=("--draft", "ngram", "--draft-tokens", "4"))
    assert (code, err) == (0, "")
    drafts = [line for line in out.splitlines() if line.startswith("drafts: ")]
    right, proposed = drafts[0].split()[1], drafts[0].split()[3]
    assert 10 < int(right) <= int(proposed)
    assert len(drafts) == 2  # a loaded conversation is drafted too
    assert "draft" not in file.read_text()


@pytest.fixture
def opened_tiny(tokenizer, tmp_path, monkeypatch) -> OpenModel:
    monkeypatch.setenv("MLX_LLAMA3_DATA", str(tmp_path))
    return OpenModel("tiny", WatchedModel(vocab_size=tokenizer.vocab_size, max_seq_len=2048), tokenizer)


def test_every_tab_drafts_with_its_own(opened_tiny):
    sessions = Sessions()
    sessions.open_model(opened_tiny, Drafting("ngram", 4).open(opened_tiny))
    first, second = sessions.add(), sessions.add()
    assert first.conversation.draft is not second.conversation.draft
    tokenizer = opened_tiny.tokenizer
    opened_tiny.model.replies = [[*tokenizer.encode(WORDS * 4), min(tokenizer.stop_ids)]]
    steps = first.answer(ChatRequest(partial(first.send, "Count."), [], ""))
    assert "".join(step.text for step in steps) == WORDS * 4
    assert first.conversation.draft.accepted > 10 and second.conversation.draft.proposed == 0
    assert first.trace.norms.shape[-1] == len(first.trace.tokens) >= first.conversation.used  # every kept position
    sessions.close_model()
    assert first.draft is None
    sessions.open_model(opened_tiny)
    assert first.conversation.draft is None


def test_a_tab_without_drafts_has_none(opened_tiny):
    assert Session(opened_tiny).conversation.draft is None


def test_a_model_that_the_draft_does_not_fit_is_loaded_without(demo_folder, opened_tiny, llama_tokens):
    """The app goes on, and says why."""
    services = SimpleNamespace(engine=Engine(), sessions=Sessions())
    loader = Loader(services, "tiny", Drafting(str(demo_folder), None))
    try:
        shown, draft = drained(loader._read_draft(opened_tiny._replace(tokenizer=llama_tokens)))
        assert draft is None
        assert "answers are not drafted: " in loader._loaded() and "cannot draft for this model" in loader._loaded()
        assert 'class="notice warning"' in loader._loaded()  # which page.css shows whole
        shown, draft = drained(loader._read_draft(opened_tiny))
        assert draft.tokens == 4 and "not drafted" not in loader._loaded()
    finally:
        services.engine.close()
        loader._fetcher.close()


@pytest.fixture
def llama_tokens() -> Tokenizer:
    from tokenizer_samples import META_MODEL

    from mlx_llama3.tokenizer.vocabulary.vocabulary import Vocabulary

    return Tokenizer(Vocabulary.from_tokenizer_model(META_MODEL, "3.1"))


def drained(generator) -> tuple[list, object]:
    """What a generator yields, and what it returns."""
    shown = []
    while True:
        try:
            shown.append(next(generator))
        except StopIteration as end:
            return shown, end.value


def test_the_gauge_of_the_page_tells_the_share(opened_tiny):
    from app.ui.panels.chat import _gauge

    session = Session(opened_tiny, Drafting("ngram", 4).open(opened_tiny))
    assert 'title=""' in _gauge(session, 9.5)
    tokenizer = opened_tiny.tokenizer
    opened_tiny.model.replies = [[*tokenizer.encode(WORDS * 4), min(tokenizer.stop_ids)]]
    list(session.answer(ChatRequest(partial(session.send, "Count."), [], "")))
    draft = session.conversation.draft
    assert f'title="{draft.acceptance:.0%} of {draft.proposed} drafted tokens were right"' in _gauge(session, 9.5)
