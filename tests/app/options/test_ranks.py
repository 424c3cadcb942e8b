"""Commands on several ranks: rank 0 in front, the others silent; `mlx.launch` itself; errors and Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import numpy as np
import pytest
import rank_session
from ranks import TAKEN, TRIES, Ranks, free_ports, run_ranks
from tiny_models import random_weights, tiny_args, write_folder

from mlx_llama3.tokenizer.tokenizer import load_tokenizer

PROGRAM = [sys.executable, "-m", "app.cli"]
QUESTION = ["--prompt", "What is the capital of France?", "--max-tokens", "8", "--temp", "1", "--seed", "3"]


@pytest.fixture(scope="module")
def folder(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with the demo's tokenizer, which talks nonsense."""
    vocab_size = load_tokenizer(demo_folder).vocab_size
    args = tiny_args(n_layers=2, vocab_size=vocab_size, tie_word_embeddings=True)
    target = write_folder(tmp_path_factory.mktemp("model") / "tiny", args, random_weights(args))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_folder / name, target)
    return target


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict:
    """What one process answers to `QUESTION`."""
    command = [*PROGRAM, "generate", "-m", str(folder), *QUESTION, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def test_mlx_launch_runs_generate_as_on_one_machine(folder: Path, alone: dict):
    launcher = Path(sysconfig.get_path("scripts")) / "mlx.launch"
    for _ in range(TRIES):
        (port,) = free_ports(1)  # it takes the next one too
        launch = [sys.executable, str(launcher), "-n", "2", "--backend", "ring", "--starting-port", str(port), "--"]
        command = [*launch, *PROGRAM, "generate", "-m", str(folder), *QUESTION, "--json"]
        # Its input stays open: at an end of it the launcher would spin.
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            out, err = process.stdout.read(), process.stderr.read().decode()
        if TAKEN not in err:
            break
    assert not err
    assert json.loads(out)["ids"] == alone["ids"]


def test_chat_talks_on_rank_0_and_the_others_print_nothing(folder: Path, tmp_path: Path):
    command = [*PROGRAM, "chat", "-m", str(folder), "--max-tokens", "6"]
    typed = "Hello\n/undo\nHello\n"
    single = subprocess.run(command, input=typed, capture_output=True, text=True, check=True)
    with Ranks(tmp_path, 2, command) as ranks:
        ranks.processes[0].stdin.write(typed)
        ranks.processes[0].stdin.close()
        front, other = ranks.wait()
    assert (front.code, front.out) == (0, single.stdout)
    assert (other.code, other.out, other.err) == (0, "", "")


def test_an_error_of_rank_1_alone_is_told_by_rank_0(folder: Path, tmp_path: Path):
    homes = [tmp_path / "a", tmp_path / "b"]
    for home in homes:
        home.mkdir()
    shutil.copytree(folder, homes[0] / "tiny")
    environment = {rank: {"HOME": str(home)} for rank, home in enumerate(homes)}
    command = [*PROGRAM, "generate", "-m", str(homes[0] / "tiny"), *QUESTION]
    front, other = run_ranks(tmp_path, 2, command, environment=environment)
    assert (front.code, front.out) == (2, "")
    assert front.err.startswith("error: on rank 1: ") and "tiny" in front.err and front.err.count("\n") == 1
    assert (other.code, other.err) == (0, "")


def test_another_model_under_the_same_name_is_refused(folder: Path, tmp_path: Path):
    homes = [tmp_path / "a", tmp_path / "b"]
    for number, home in enumerate(homes):
        shutil.copytree(folder, home / "tiny")
        config = home / "tiny" / "config.json"
        config.write_text(config.read_text() + "\n" * number)
    environment = {rank: {"HOME": str(home)} for rank, home in enumerate(homes)}
    front, _ = run_ranks(
        tmp_path, 2, [*PROGRAM, "generate", "-m", str(homes[0] / "tiny"), *QUESTION], environment=environment
    )
    assert front.err == f"error: on rank 1: {homes[1]}/tiny is not the model that rank 0 has; copy that one here\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--wrong", "1"], "unrecognized arguments"),
        (["verify", "a", "--against", "b"], "verify runs in one process; start it without mlx.launch"),
        (["generate", "--prompt", "a", "--prompt-cache", "b"], "--prompt-cache needs the whole model in one process"),
    ],
)
def test_an_error_is_printed_once(arguments: list[str], message: str, tmp_path: Path):
    front, other = run_ranks(tmp_path, 2, [*PROGRAM, *arguments])
    assert front.code == 2 and message in front.err and front.err.count("error: ") == 1
    assert not other.out and not other.err


def test_ctrl_c_at_rank_0_ends_all_without_a_word(folder: Path, tmp_path: Path):
    command = [*PROGRAM, "generate", "-m", str(folder), "--prompt", "x", "--max-tokens", "400", "--temp", "1"]
    with Ranks(tmp_path, 2, command) as ranks:
        assert ranks.processes[0].stdout.read(1)
        for process in reversed(ranks.processes):  # a terminal sends it to both
            os.kill(process.pid, signal.SIGINT)
            time.sleep(0.1)
        front, other = ranks.wait()
    assert (front.code, front.err) == (130, "")
    assert (other.code, other.err) == (0, "")


def test_pipeline_answers_as_one_process(folder: Path, alone: dict, tmp_path: Path):
    command = [*PROGRAM, "generate", "-m", str(folder), *QUESTION, "--json", "--pipeline"]
    front, _ = run_ranks(tmp_path, 2, command)
    assert json.loads(front.out)["ids"] == alone["ids"]


def test_pipeline_needs_a_launcher(folder: Path):
    command = [*PROGRAM, "generate", "-m", str(folder), "--prompt", "x", "--pipeline"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: --pipeline splits the layers over several machines; start them with mlx.launch\n"


def test_a_session_of_the_app_runs_on_rank_0_with_norms_and_lens(folder: Path, tmp_path: Path):
    program = [sys.executable, str(Path(rank_session.__file__)), str(folder)]
    kept = {key: value for key, value in os.environ.items() if not key.startswith("MLX_")}
    single = subprocess.run(program, capture_output=True, check=True, env=kept | {"PYTHONPATH": "."})
    expected = json.loads(single.stdout)
    front, other = run_ranks(tmp_path, 2, program, environment={rank: {"PYTHONPATH": "."} for rank in range(2)})
    assert front.code == 0, front.err
    found = json.loads(front.out)
    for turn in ("first", "second"):
        assert found[turn][0] == expected[turn][0]
        assert np.allclose(found[turn][1], expected[turn][1], atol=1e-4)
        assert np.allclose(found[turn][2], expected[turn][2], atol=1e-4)
    assert (other.code, other.out, other.err) == (0, "", "")
