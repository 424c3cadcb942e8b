"""The chat in a pipe, its slash commands, and saved conversations; in this process, and once with the demo model."""

import errno
import io
import json
import os
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from watched_model import WatchedModel

from app import cli
from app.chat import loop
from app.chat.pipe import Plain
from app.chat.session import Chat
from app.options.model import OpenModel
from mlx_llama3.conversation.conversation import Conversation
from mlx_llama3.tokenizer.tokenizer import Tokenizer

FRANCE = "What is the capital of France?"
PARIS = "The capital of France is Paris."


@pytest.fixture
def talk(tokenizer, monkeypatch, capsys):
    """Run the chat on these lines with a tiny model that gives these replies; returns (code, output, errors)."""
    model = WatchedModel(vocab_size=tokenizer.vocab_size)
    monkeypatch.setattr(loop, "open_model", lambda name: OpenModel("tiny", model, tokenizer))

    def talk(*lines: str, replies: tuple[str, ...] = (), options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        end = tokenizer.special_tokens["<|im_end|>"]
        model.replies = [[*tokenizer.encode(reply), end] for reply in replies]
        stdin = io.BytesIO("".join(line + "\n" for line in lines).encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stdin))
        code = cli.main(["chat", *options])
        return code, *capsys.readouterr()

    return talk


def test_the_real_chat(demo_folder) -> None:
    """The demo model in a subprocess, with standard input as `make chat` passes it on."""
    done = subprocess.run(
        [sys.executable, "-m", "app.cli", "chat"], input=f"{FRANCE}\n", capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{PARIS}\n", "")


def test_each_line_is_a_message_and_the_end_of_input_the_end(talk) -> None:
    code, out, err = talk(FRANCE, "", "  ", "And of Italy?", replies=(PARIS, "one two three four"))
    assert (code, out, err) == (0, f"{PARIS}\none two three four\n", "")


def test_an_answer_that_is_cut_off_says_so(talk) -> None:
    code, out, err = talk("Count!", replies=("one two three four",), options=("--max-tokens", "2"))
    assert (code, out) == (0, "one two\n")
    assert err == "(cut off at 2 tokens; /set max_tokens N allows more)\n"


def test_a_model_that_says_nothing(talk) -> None:
    code, out, err = talk("Hello", "/context", replies=("",))
    assert out.splitlines()[1].startswith("0 of 512 tokens")
    assert err == "(the model said nothing; the message is not kept)\n"


def test_a_retry_that_says_nothing_keeps_the_answer_before(talk) -> None:
    code, out, err = talk("Hello", "/retry", "/context", replies=("Hello, Ada.", ""), options=("--temp", "1"))
    assert out.splitlines()[2].endswith("in 2 messages; when it is full: stop")
    assert err == "(the model said nothing; the answer before is kept)\n"


def test_no_input_is_no_chat(talk) -> None:
    assert talk() == (0, "", "")


def test_the_system_prompt_and_the_options_reach_the_model(talk, tmp_path) -> None:
    file = tmp_path / "talk.json"
    options = ("--system", "You are a pirate.", "--temp", "0.8", "--seed", "1", "--max-tokens", "5", "--stop", "END")
    code, _, _ = talk("Hello", f"/save {file}", options=options)
    saved = json.loads(file.read_text())
    assert code == 0
    assert saved["system"] == "You are a pirate."
    assert saved["settings"] == {"temperature": 0.8, "seed": 1, "max_tokens": 5, "stop": ["END"]}


def test_undo_retry_reset_and_context(talk) -> None:
    lines = ["/context", FRANCE, "/context", "/retry", "/undo", "/context", "/reset"]
    code, out, err = talk(*lines, replies=(PARIS, "It is Paris."), options=("--context", "100"))
    assert code == 0
    assert out.splitlines() == [
        "0 of 100 tokens (0%) in 0 messages; when it is full: stop",
        PARIS,
        "44 of 100 tokens (44%) in 2 messages; when it is full: stop",
        "It is Paris.",
        f"taken back: {FRANCE}",
        "0 of 100 tokens (0%) in 0 messages; when it is full: stop",
        "all messages are forgotten",
    ]
    assert err == "(temperature is 0, so every answer is the same; /set temperature 0.7 varies them)\n"


def test_system_is_shown_changed_and_removed(talk) -> None:
    _, out, _ = talk("/system", "/system Be brief, please.", "/reset", '/system ""')
    assert out.splitlines() == [
        "no system prompt is set",
        "system prompt: Be brief, please.",
        "all messages are forgotten; the system prompt stays",
        "no system prompt is set",
    ]


def test_set_shows_and_changes(talk) -> None:
    lines = ["/set temperature 0.5", "/set top-k 40", "/set logit_bias 5:-1,6:2", "/set stop THE END"]
    lines += ["/set overflow roll", "/set", "/set top_k default", "/set max_tokens 3", FRANCE]
    code, out, err = talk(*lines, replies=(PARIS,))
    shown = out.splitlines()
    assert code == 0
    assert shown[:5] == [
        "temperature 0.5",
        "top_k 40",
        "logit_bias {5: -1.0, 6: 2.0}",
        "stop ['THE END']",
        "overflow roll",
    ]
    table = dict(line.split(None, 1) for line in shown[5:-3])
    assert err == "(cut off at 3 tokens; /set max_tokens N allows more)\n"
    assert table["temperature"] == "0.5" and table["overflow"] == "roll" and table["seed"] == "none"
    assert table["max_tokens"] == "1024" and table["top_p"] == "1.0"
    assert shown[-3:] == ["top_k 0", "max_tokens 3", "The capital of"]


def test_stats(talk) -> None:
    _, out, _ = talk(FRANCE, "/stats", replies=(PARIS,))
    assert out.splitlines()[1].startswith("prompt: 37 tokens, ")
    assert out.splitlines()[2].startswith("answer: 8 tokens, ")
    # 3 layers, keys and values, 2 heads of 16 float32 numbers, 256 positions.
    assert out.splitlines()[4] == f"cache: 45 tokens in {3 * 2 * 2 * 16 * 4 * 256 / 1e6:.1f} MB"


def test_a_quantized_cache_for_the_whole_chat(tokenizer, monkeypatch, capsys, tmp_path) -> None:
    """--kv-bits remains in effect after /undo, /save and /load; /stats shows it."""
    model = WatchedModel(vocab_size=tokenizer.vocab_size, head_dim=64)
    monkeypatch.setattr(loop, "open_model", lambda name: OpenModel("tiny", model, tokenizer))
    model.replies = [[*tokenizer.encode(PARIS), tokenizer.special_tokens["<|im_end|>"]] for _ in range(2)]
    file = tmp_path / "talk.json"
    lines = [FRANCE, "/stats", "/undo", FRANCE, f"/save {file}", f"/load {file}", "/stats"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(lines).encode())))
    assert cli.main(["chat", "--kv-bits", "4"]) == 0
    shown = capsys.readouterr().out.splitlines()
    # 168 dense positions of 2 * 2 heads of 64 numbers, and room for 256 packed positions of 27 words for 2 heads.
    size = 3 * (168 * 2 * 2 * 64 * 4 + 256 * 2 * 27 * 4) / 1e6
    assert shown[4] == f"cache: 45 tokens in {size:.1f} MB (keys in 8 bits, values in 4)"
    assert shown[-1] == "cache: 0 tokens in 0.0 MB (keys in 8 bits, values in 4)"
    assert model.prompts == [37, 1]  # /undo leaves the cache


def test_a_model_that_cannot_have_a_quantized_cache(talk) -> None:
    code, out, err = talk(FRANCE, options=("--kv-bits", "8"))
    assert (code, out) == (2, "")
    assert (
        err
        == "error: a cache in fewer bits needs heads of a multiple of 64, and this model's have 16; leave it as it is\n"
    )


def test_help_lists_every_command(talk) -> None:
    _, out, _ = talk("/help")
    for name in ["help", "system", "reset", "undo", "retry", "save", "load", "set", "stats", "context", "exit"]:
        assert f"\n/{name} " in "\n" + out


@pytest.mark.parametrize("leave", ["/exit", "/bye", "/quit", "/EXIT "])
def test_leaving(talk, leave) -> None:
    assert talk(leave, "/help") == (0, "", "")


def test_a_slash_inside_or_after_a_space_is_a_message(talk, tmp_path) -> None:
    file = tmp_path / "talk.json"
    talk("/etc/hosts is what?", " /help", f"/save {file}", options=("--max-tokens", "2"))
    assert [m["content"] for m in json.loads(file.read_text())["messages"][::2]] == ["/etc/hosts is what?", " /help"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("/rest", "there is no command /rest, did you mean /reset?; /help lists them"),
        ("/xyzzy", "there is no command /xyzzy; /help lists them"),
        ("/reset now", "/reset takes nothing after it"),
        ("/undo", "there is no message to take back"),
        ("/retry", "there is no message to answer again"),
        ("/stats", "there is no answer yet to measure"),
        ("/save", "name the file: /save FILE"),
        ("/save /no/such/folder/talk.json", "/no/such/folder/talk.json: cannot save the conversation: No such file"),
        ("/save ~nobody-here/talk.json", "~nobody-here/talk.json: there can be no such file: "),
        (f"/save {'x' * 250}", f"{'x' * 250}: cannot save the conversation: File name too long"),
        (f"/save {'x' * 300}", f"{'x' * 300}: cannot save the conversation: File name too long"),
        ("/load", "name the file: /load FILE"),
        ("/load ~nobody-here/talk.json", "~nobody-here/talk.json: there can be no such file: "),
        ("/load missing.json", "missing.json: no such file"),
        ("/set warmth 1", "there is no setting 'warmth'; /set shows all"),
        ("/set temprature 1", "there is no setting 'temprature', did you mean temperature?; /set shows all"),
        ("/set temperature", "temperature: '' is not a number; as in /set temperature T"),
        ("/set temperature hot", "temperature: 'hot' is not a number; as in /set temperature T"),
        ("/set top_p 1.5", "top_p is 1.5; it must be a number from 0 to 1"),
        ("/set max_tokens 0", "max_tokens: 0 is less than 1"),
        ("/set overflow wrap", "overflow is 'wrap'; it must be one of stop, roll"),
    ],
)
def test_errors_end_a_pipe(talk, line, complaint) -> None:
    code, out, err = talk(line, "/help")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {complaint}")
    assert err.count("\n") == 1


def test_a_full_context_ends_a_pipe_unless_it_rolls(talk) -> None:
    long = "word " * 50
    lines, replies = ["Count!", "Once more.", "Once more."], (long, long, long)
    code, out, err = talk(*lines, replies=replies, options=("--context", "60"))
    assert (code, out.count("\n")) == (2, 1)
    assert err.startswith("(the context is full: the answer ends here)\nerror: the context is full: 60 of 60 tokens")
    code, out, err = talk(*lines, replies=replies, options=("--context", "60", "--overflow", "roll"))
    assert (code, out.count("\n")) == (0, 3)
    assert err.count("(the oldest 2 messages were left out to make room)\n") == 2


def test_saved_and_resumed(talk, tmp_path) -> None:
    file = tmp_path / "talk.json"
    assert talk("My name is Ada.", f"/save {file}", replies=("Hello, Ada.",), options=("--system", "Be brief."))[0] == 0
    code, out, _ = talk("/system", "/undo", options=("--resume", str(file)))
    assert (code, out) == (0, "system prompt: Be brief.\ntaken back: My name is Ada.\n")
    _, out, _ = talk(f"/load {file}", "/undo")
    assert out.splitlines()[0].startswith(f"loaded 3 messages from {file}; ")
    assert out.splitlines()[1] == "taken back: My name is Ada."
    _, out, _ = talk("/system", options=("--resume", str(file), "--system", "Be long."))
    assert out == "system prompt: Be long.\n"


def test_what_a_loaded_file_does_not_say_stays_as_it_is(talk, tmp_path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(
        json.dumps({"format": "mlx-llama3 conversation", "version": 1, "messages": [], "settings": {"top_k": 7}})
    )
    options = ("--context", "100", "--overflow", "roll", "--max-tokens", "9", "--temp", "0.5")
    _, out, _ = talk(f"/load {file}", "/set", options=options)
    assert out.startswith(f"loaded 0 messages from {file}; 0 of 100 tokens (0%)")
    table = dict(line.split(None, 1) for line in out.splitlines()[1:])
    assert (table["max_tokens"], table["overflow"], table["top_k"]) == ("9", "roll", "7")
    assert table["temperature"] == "0.0"  # sampling settings come from the file


def test_options_win_over_the_saved_settings(talk, tmp_path) -> None:
    file = tmp_path / "talk.json"
    talk("Hello", f"/save {file}", options=("--max-tokens", "3", "--temp", "0.5", "--seed", "1"))
    _, out, _ = talk("/set", options=("--resume", str(file), "--temp", "0.9"))
    table = dict(line.split(None, 1) for line in out.splitlines())
    assert (table["temperature"], table["max_tokens"], table["seed"]) == ("0.9", "3", "1")


def test_a_file_that_cannot_be_written_leaves_nothing(talk, tmp_path, monkeypatch) -> None:
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "replace", full)
    code, _, err = talk(f"/save {tmp_path / 'talk.json'}")
    assert (code, err) == (
        2,
        f"error: {tmp_path / 'talk.json'}: cannot save the conversation: No space left on device\n",
    )
    assert list(tmp_path.iterdir()) == []


def test_save_replaces_conversations_only(talk, tmp_path) -> None:
    file, notes = tmp_path / "talk.json", tmp_path / "notes.txt"
    assert talk("Hello", f"/save {file}", f"/save {file}", options=("--max-tokens", "2"))[0] == 0
    notes.write_text("mine")
    code, _, err = talk(f"/save {notes}")
    assert (code, err) == (2, f"error: {notes} exists and is not a saved conversation; choose another name\n")
    assert notes.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "talk.json"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--resume", "missing.json"), "missing.json: no such file"),
        (("--context", "99999"), "a context of 99999 tokens is asked for; this model takes from 1 to"),
    ],
)
def test_bad_options(talk, options, complaint) -> None:
    code, out, err = talk("Hello", options=options)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {complaint}")
    assert err.count("\n") == 1


def test_a_damaged_file_is_named(talk, tmp_path) -> None:
    file = tmp_path / "talk.json"
    file.write_bytes(b"\xff")
    assert talk(options=("--resume", str(file)))[2].startswith(f"error: {file} is not UTF-8 text")
    file.write_text("{}")
    assert talk(options=("--resume", str(file)))[2].startswith(f"error: {file} is not a saved conversation: it has no")


def test_a_base_model_is_refused_before_the_first_message(tokenizer, monkeypatch, capsys) -> None:
    base = Tokenizer(tokenizer.vocabulary, source="base")
    model = WatchedModel(vocab_size=base.vocab_size)
    monkeypatch.setattr(loop, "open_model", lambda name: OpenModel("base", model, base))
    assert cli.main(["chat"]) == 2
    assert capsys.readouterr().err.startswith("error: base: a base model without a chat template; ")


class Pressed(Plain):
    """A screen on which Ctrl-C is already pressed."""

    @contextmanager
    def answering(self):
        yield lambda: True


def test_ctrl_c_while_the_prompt_is_read_stops_between_two_chunks(tokenizer, capsys) -> None:
    model = WatchedModel(vocab_size=tokenizer.vocab_size, max_seq_len=4096)
    conversation = Conversation(model, tokenizer)
    session = Chat("tiny", conversation, Pressed())
    session.answer(partial(conversation.send, "word " * 1500))
    assert conversation.messages == []
    assert model.prompts == []  # the first chunk of 512 was fed, the head was never run
    assert capsys.readouterr().err == "(stopped before the answer began; the message is not kept)\n"
    model.replies = [[*tokenizer.encode("Yes."), *tokenizer.stop_ids]]
    list(conversation.send("word " * 1500))
    assert model.prompts[0] == 512 + conversation.fed  # the first attempt's chunk was not fed again
    assert conversation.messages[-1]["content"] == "Yes."


def test_an_input_that_is_not_text(talk, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n")))
    assert cli.main(["chat"]) == 2
    assert capsys.readouterr().err == "error: line 1 of standard input is not UTF-8 text\n"
