"""The command line as a whole: quick help, exit codes, one line for each error."""

import subprocess
import sys
from pathlib import Path

import pytest

from app import cli
from app.commands import chat as chat_command
from mlx_llama3.errors import UserError


def run(*words: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "app.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("command", ["", *(name for name, (module, _) in cli.COMMANDS.items() if module[:4] == "app.")])
def test_help_imports_nothing_heavy(command) -> None:
    """Not even this project's library, whose import loads its BLAS. benchmarks/startup.py has the milliseconds."""
    words = [command, "--help"] if command else ["--help"]
    code = f"import sys; from app import cli; cli.main({words}); print(*sorted(sys.modules), file=sys.stderr)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(run.stderr.split())
    assert not {"mlx", "numpy", "mlx_llama3", "convert"} & imported
    assert len(imported) < 150  # 71 of them are argparse and what Python itself starts with


@pytest.mark.parametrize("words", [["--help"], ["chat", "--help"], ["generate", "--help"], ["convert", "--help"]])
def test_help(words, capsys) -> None:
    assert cli.main(words) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("usage: mlx-llama3")
    assert all(command in shown for command in cli.COMMANDS) or len(words) > 1


@pytest.mark.parametrize("command", ["app", "trace"])
def test_the_first_word_of_help_and_no_other_is_capitalized(command, capsys) -> None:
    assert cli.main([command, "--help"]) == 0
    summary = cli.COMMANDS[command][1]
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{summary[0].upper()}{summary[1:]}." in shown


def test_version(capsys) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "mlx-llama3 0.1.0\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "error: the following arguments are required: COMMAND; see mlx-llama3 --help"),
        (["chatt"], "error: argument COMMAND: invalid choice: 'chatt'"),
        (["chat", "--top-k", "x"], "error: argument --top-k: 'x' is not a whole number; see mlx-llama3 chat --help"),
        (["chat", "--context", "0"], "error: argument --context: 0 is less than 1"),
        (["chat", "--overflow", "wrap"], "error: argument --overflow: invalid choice: 'wrap'"),
        (["chat", "--system", "\udcff"], "error: argument --system: it is not UTF-8 at character 1"),
        (["generate", "--raw", "a", "--ids", "1"], "error: argument --ids: not allowed with argument --raw"),
        (["generate", "--ids", "1,x"], "error: argument --ids: 'x' is not a whole number"),
        (["chat", "--temperature", "-1"], "error: --temperature is -1.0; it must be a number from 0 (greedy)"),
        (["generate", "--prompt", "a", "--top-p", "2"], "error: --top-p is 2.0; it must be a number from 0 to 1"),
    ],
)
def test_errors_are_one_line_and_code_2(words, complaint, capsys) -> None:
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(complaint)
    assert shown.err.count("\n") == 1


def failing(error: BaseException):
    def run(_args) -> int:
        raise error

    return run


def test_a_traceback_only_with_debug(monkeypatch, capsys) -> None:
    monkeypatch.setattr(chat_command, "run", failing(UserError("the file\nis broken")))
    assert cli.main(["chat"]) == 2
    assert capsys.readouterr().err == "error: the file is broken\n"
    for words in (["--debug", "chat"], ["chat", "--debug"]):
        assert cli.main(words) == 2
        assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_faults_of_the_program_keep_their_traceback(monkeypatch) -> None:
    monkeypatch.setattr(chat_command, "run", failing(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["chat"])


def test_ctrl_c_is_quiet(monkeypatch, capsys) -> None:
    monkeypatch.setattr(chat_command, "run", failing(KeyboardInterrupt()))
    assert cli.main(["chat"]) == 130
    monkeypatch.setattr(cli, "build_parser", failing(KeyboardInterrupt()))
    assert cli.main(["chat"]) == 130
    assert capsys.readouterr().err == ""


def shell(redirection: str, script: str) -> subprocess.CompletedProcess:
    """The script with `cli` and a `chat_command` whose run may be replaced, its streams redirected by a shell."""
    imports = "import sys; from app import cli; from app.commands import chat as chat_command"
    script = f"{imports}\n{script}\nsys.exit(cli.main(['chat']))"
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_closed_streams_are_nowhere() -> None:
    # A file that is opened later must not come to stand in the place of standard input.
    talk = "chat_command.run = lambda args: print('said', sys.stdin.read() == '', open('/dev/null').fileno() > 2)"
    done = shell("<&- >&-", talk)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = shell("<&-", talk)
    assert (done.returncode, done.stdout, done.stderr) == (0, "said True True\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("flush", [True, False])
def test_a_full_disk_is_an_error_of_one_line(flush) -> None:
    done = shell(">/dev/full", f"chat_command.run = lambda args: print('x' * 100_000, flush={flush})")
    assert (done.returncode, done.stderr) == (2, "error: standard output: the disk is full; make room\n")


def test_a_reader_that_leaves_is_no_error() -> None:
    script = (
        "import sys; from app import cli; from app.commands import chat as chat_command\n"
        "chat_command.run = lambda args: print('x' * 100_000, flush=True)\n"
        "sys.exit(cli.main(['chat']))"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.read(10)
    child.stdout.close()
    assert child.wait(60) == 141
    assert child.stderr.read() == b""
