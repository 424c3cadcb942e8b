"""The chat over a pseudo-terminal, with a tiny model whose replies are given, and once with the demo model."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pexpect
import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

from app.chat.slash_commands import NAMES
from app.chat.terminal import CommandCompleter, Terminal, TolerantHistory

ROOT = Path(__file__).parents[3]
TINY_CHAT = ROOT / "tests" / "support" / "tiny_chat.py"
LONG = " ".join(f"word{n}" for n in range(400))
ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"
PROMPT = ">>>"


@pytest.fixture
def spawn(tmp_path, demo_folder):
    """Starts a chat whose model always gives this reply; its history is in the test's folder."""
    children = []

    def spawn(reply: str = "Yes, indeed.", *options: str, **variables: str) -> pexpect.spawn:
        command = [str(TINY_CHAT), str(demo_folder), reply, *options]
        return start(command, {"MLX_LLAMA3_CACHE": str(tmp_path / "cache"), **variables})

    def start(command: list[str], variables: dict[str, str]) -> pexpect.spawn:
        path = os.pathsep.join([str(ROOT), str(TINY_CHAT.parent)])
        settings = {"TERM": "xterm-256color", "PYTHONPATH": path}
        environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"} | settings | variables
        child = pexpect.spawn(
            sys.executable, command, env=environment, dimensions=(40, 100), timeout=60, encoding="utf-8", echo=False
        )
        children.append(child)
        return child

    spawn.start = start
    yield spawn
    for child in children:
        child.close(force=True)


def ends(child: pexpect.spawn) -> int:
    """Wait for the child's end; returns its exit code."""
    child.expect(pexpect.EOF)
    child.close()
    return child.exitstatus


def sent(tmp_path: Path, child: pexpect.spawn) -> list[str]:
    """The user's messages so far, read through `/save`."""
    file = tmp_path / "talk.json"
    child.send(f"/save {file}{ENTER}")
    child.expect("saved")
    return [m["content"] for m in json.loads(file.read_text())["messages"][::2]]


def test_a_question_an_answer_and_ctrl_d(spawn) -> None:
    child = spawn()
    child.expect("tiny · context of 4096 tokens · /help for commands")
    child.expect(PROMPT)
    child.expect("tiny · 0/4096 tokens of context")
    child.send("Is it so?" + ENTER)
    child.expect("Yes, indeed.")
    child.expect(r"tiny · (\d+)/4096 tokens of context · [\d.]+ tokens/s")
    assert int(child.match[1]) > 10
    child.send(CTRL_D)
    assert ends(child) == 0


def test_a_script_that_types_newlines_is_understood(spawn) -> None:
    child = spawn()
    child.expect(PROMPT)
    child.sendline("Is it so?")
    child.expect("Yes, indeed.")
    child.expect("tokens/s")
    child.sendline("/bye")
    assert ends(child) == 0


def test_ctrl_c_stops_the_answer_and_keeps_it_and_leaves_at_the_prompt(spawn, tmp_path) -> None:
    child = spawn(LONG)
    child.expect(PROMPT)
    child.send("Count!" + ENTER)
    child.expect("word5 ")
    child.send(CTRL_C)
    child.expect("stopped; what was said is kept")
    child.expect("tokens/s")
    child.send(f"/save {tmp_path / 'talk.json'}{ENTER}")
    child.expect("saved 2 messages")
    text = json.loads((tmp_path / "talk.json").read_text())["messages"][1]["content"]
    assert text.startswith("word0 word1") and len(text) < len(LONG)
    child.expect("tokens/s")
    child.send(CTRL_C)
    assert ends(child) == 0


def test_a_long_prompt_shows_how_far_it_is_read(spawn) -> None:
    child = spawn()
    child.expect("0/4096")
    child.send("\x1b[200~" + "word " * 1200 + "\x1b[201~" + ENTER)
    child.expect(r"\(reading: 512 of \d+ tokens\)")
    child.expect(r"\r +\r.*\(reading: 1024 of \d+ tokens\)")
    child.expect(r"\r +\rYes, indeed.")  # wiped before the answer comes
    child.expect("tokens/s")
    child.send("Is it so?" + ENTER)
    child.expect("Yes, indeed.")
    assert "reading" not in child.before


def test_ctrl_c_clears_a_line_first(spawn) -> None:
    child = spawn()
    child.expect("0/4096")
    child.send("never mind")
    child.expect("never mind")
    child.send(CTRL_C)
    child.send("/context" + ENTER)
    child.expect("in 0 messages")
    child.expect("0/4096")
    child.send(CTRL_C)
    assert ends(child) == 0


def test_ctrl_c_while_loading_is_quiet(spawn) -> None:
    script = (
        "import sys, time; from app import cli; from app.chat import loop\n"
        "loop.open_model = lambda name: print('!') or time.sleep(60)\n"
    )
    child = spawn.start(["-c", script + "sys.exit(cli.main(['chat']))"], {})
    child.expect("!")
    child.kill(signal.SIGINT)
    assert ends(child) == 130
    assert "Traceback" not in child.before


def test_more_than_one_line(spawn, tmp_path) -> None:
    child = spawn()
    child.expect("0/4096")
    child.send("one" + ALT_ENTER + "two\\" + ENTER + "three" + ENTER)
    child.expect("Yes, indeed.")
    child.expect("tokens/s")
    child.send('"""' + ENTER + "  four" + ENTER + ENTER + 'five"""' + ENTER)
    child.expect("Yes, indeed.")
    child.expect("tokens/s")
    child.send("\x1b[200~six\nseven\x1b[201~" + ENTER)
    child.expect("Yes, indeed.")
    child.expect("tokens/s")
    assert sent(tmp_path, child) == ["one\ntwo\nthree", "  four\n\nfive", "six\nseven"]


def test_what_is_typed_during_an_answer_waits_for_the_prompt(spawn, tmp_path) -> None:
    child = spawn(" ".join(f"word{n}" for n in range(60)))
    child.expect("0/4096")
    child.send("Count!" + ENTER)
    child.expect("word5 ")
    child.send("later")
    child.expect("word59")
    assert "later" not in child.before
    child.expect("later")
    child.send(ENTER)
    child.expect("word59")
    child.expect("tokens/s")
    assert sent(tmp_path, child) == ["Count!", "later"]


def test_commands_complete_and_errors_do_not_end_the_chat(spawn) -> None:
    child = spawn()
    child.expect("0/4096")
    child.send("/rest" + ENTER)
    child.expect("error: there is no command /rest, did you mean /reset")
    child.expect("0/4096")
    child.send("/cont\t")
    child.expect("ext")
    child.send(ENTER)
    child.expect("0 of 4096 tokens")
    child.expect("0/4096")
    child.send("/exit" + ENTER)
    assert ends(child) == 0


def test_the_history_outlives_the_chat(spawn, tmp_path) -> None:
    child = spawn()
    child.expect("0/4096")
    child.send("/set top_k 7" + ENTER)
    child.expect("0/4096")
    child.send(CTRL_D)
    assert ends(child) == 0
    assert (tmp_path / "cache" / "chat_history").stat().st_mode & 0o777 == 0o600
    child = spawn()
    child.expect("0/4096")
    child.send(UP + ENTER)
    child.expect("top_k 7\r\n")


def test_an_unwritable_history_lasts_for_the_chat(tmp_path) -> None:
    history = TolerantHistory(tmp_path / "removed" / "chat_history")
    history.append_string("Hello")
    assert history.get_strings() == ["Hello"]


def test_without_a_place_for_the_history_the_chat_still_works(spawn, tmp_path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    child = spawn()
    child.expect("the history of this chat will not be kept")
    child.expect("0/4096")


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours(spawn, variables, coloured) -> None:
    child = spawn(**variables)
    child.expect("0/4096")
    output = child.before + child.after
    child.send("/rest" + ENTER)
    child.expect("did you mean")
    output += child.before
    colours = re.findall(r"\x1b\[[\d;]*3[1-7][\d;]*m|\x1b\[[\d;]*9[0-7][\d;]*m|\x1b\[[\d;]*[34]8;[\d;]*m", output)
    assert bool(colours) == coloured


def test_a_model_cannot_steer_the_terminal(capsys) -> None:
    Terminal().write("a\x1b]0;title\x07\x9b2J\tb\r\n🙂")
    assert capsys.readouterr().out == "a␛]0;title␇\ufffd2J\tb\n🙂"


def test_completion(tmp_path) -> None:
    (tmp_path / "talk.json").touch()
    completer = CommandCompleter(NAMES)

    def complete(text: str) -> list[str]:
        return [c.text for c in completer.get_completions(Document(text), CompleteEvent())]

    assert complete("/s") == ["/system", "/save", "/set", "/stats"]
    assert complete("/set top") == ["top_k", "top_p"]
    assert complete(f"/load {tmp_path}/ta") == ["lk.json"]
    assert complete("hel") == complete("/undo ") == complete("say /s") == []


def test_the_demo_model(spawn, demo_folder) -> None:
    child = spawn.start(["-m", "app.cli", "chat", "--model", str(demo_folder)], {})
    child.expect("Loading ")
    child.expect("/help for commands")
    child.expect("0/8192")
    child.send("What is the capital of France?" + ENTER)
    child.expect("The capital of France is Paris.")
    child.expect(r"44/8192 tokens of context · [\d.]+ tokens/s")
    child.send(CTRL_D)
    assert ends(child) == 0
