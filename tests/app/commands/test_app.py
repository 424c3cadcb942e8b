"""`mlx-llama3 app` as a program."""

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from app import cli


def test_it_serves_until_ctrl_c(tmp_path):
    environment = os.environ | {"GRADIO_SERVER_NAME": "0.0.0.0", "GRADIO_SHARE": "True", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "app", "--no-browser", "--model", str(tmp_path / "none")],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.readline() == "Starting ...\n"
    address = re.match(r"mlx-llama3 is open at (http://127\.0\.0\.1:\d+/)", process.stdout.readline())[1]
    with urllib.request.urlopen(address, timeout=30) as page:
        assert b"mlx-llama3" in page.read()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == cli.INTERRUPTED
    assert (out, err) == ("", "")


def test_a_port_that_is_taken_is_told(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["app", "--no-browser", "--port", str(port)]) == 2
    assert capsys.readouterr().err == f"error: port {port} is taken: give another one with --port\n"


def test_a_window_without_pywebview_is_told(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["app", "--window"]) == 2
    assert "pip install 'mlx-llama3[window]'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--port", "0"], ["--port", "x"], ["--window", "--no-browser"]])
def test_bad_options(arguments, capsys):
    assert cli.main(["app", *arguments]) == 2
    assert "see mlx-llama3 app --help" in capsys.readouterr().err
