"""One of each command on the stand-in, in the modes and types that differ; and a part of the suite.

`make test-mac` runs the whole suite on it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import run_ranks

from tests.mac import lines
from tests.mac.compute import COMPILED, KERNELS, MODES
from tests.mac.start import HOOK, VARIABLE
from tests.mac.tests.conftest import on_a_mac

RECORDED: dict[str, str] = {}  # in the environment of all programs, once the folder is known
QUESTION = ("--prompt", "What is the capital of France?", "--max-tokens", "4", "--temp", "0")


def program(mode: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
    """`mlx-llama3 ARGUMENTS`, with the kernels untried unless the variables say otherwise."""
    options["env"] = {"MLX_LLAMA3_KERNELS": "fused", **RECORDED} | options.pop("env", {})
    done = on_a_mac(mode, "-m", "mlx_llama3", *arguments, **options)
    assert done.returncode == 0, done.stderr
    return done


def ids(mode: str, folder: Path, *options: str, **variables: str) -> list[int]:
    return json.loads(program(mode, "generate", "-m", folder, *QUESTION, "--json", *options, env=variables).stdout)[
        "ids"
    ]


@pytest.fixture(scope="module", autouse=True)
def lines_folder(tmp_path_factory) -> Path:
    """Where the programs note the lines that they run."""
    folder = tmp_path_factory.mktemp("lines")
    RECORDED[lines.VARIABLE] = str(folder)
    return folder


@pytest.fixture(scope="module")
def answer(folder_of) -> list[int]:
    """The answer of the float32 model by the references."""
    return ids(KERNELS, folder_of("float32"), MLX_LLAMA3_KERNELS="reference")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("options", [(), ("--kv-bits", "8"), ("--max-kv-size", "64")])
def test_generate(folder_of, answer, mode, options):
    assert len(answer) == 4
    assert ids(mode, folder_of("float32"), *options) == answer
    assert ids(mode, folder_of("float32"), "--temp", "1", "--seed", "3") != answer


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_doctor_tries_the_kernels(folder_of, dtype, tmp_path):
    variables = {"MLX_LLAMA3_KERNELS": "auto", "MLX_LLAMA3_CACHE": str(tmp_path)}
    report = json.loads(program(KERNELS, "doctor", "-m", folder_of(dtype), "--json", env=variables).stdout)
    machine, model = report["machine"], report["model"]
    assert machine["metal"] and machine["chip"] == "Apple M1" and machine["system"].startswith("macOS 15")
    assert model["dtype"] == dtype
    plain = 2 * 2 * 2 * 64 * 2  # layers, keys and values, KV heads, numbers, bytes
    assert model["caches"][0]["bytes a token"] == plain
    decided = json.loads((tmp_path / "kernels.json").read_text())["decisions"]
    states = {decision["state"] for by_rows in decided.values() for decision in by_rows.values()}
    assert decided and states <= {"used", "slower"}, decided  # none is wrong, in either type
    text = program(KERNELS, "doctor", "-m", folder_of(dtype), env=variables).stdout
    assert "on the GPU, with Metal" in text


def test_chat(folder_of):
    done = program(COMPILED, "chat", "-m", folder_of("float16"), "--max-tokens", "4", input="Hello\nAnd now?\n")
    assert len(done.stdout.splitlines()) >= 2


def test_trace(folder_of, tmp_path):
    file = tmp_path / "t.safetensors"
    program(
        COMPILED, "trace", "-m", folder_of("float16"), *QUESTION, "--out", file, "--save", "norms,residuals,attention"
    )
    shown = program(COMPILED, "trace", "--show", file).stdout
    assert "resid_post" in shown


def test_bench(folder_of, tmp_path):
    file = tmp_path / "b.json"
    options = ("--prompt", 8, "--tokens", 4, "--rounds", 1, "--json", file)
    done = program(COMPILED, "bench", "-m", folder_of("float16"), *options)
    assert "Apple M1" in done.stdout and json.loads(file.read_text())


def test_convert_and_verify(tmp_path):
    source, target = "tests/data/llama3-1shard", tmp_path / "out"
    program(COMPILED, "convert", source, target, "--quantize", "mxfp4", "--quiet")
    assert "WRONG" not in program(COMPILED, "verify", target, "--against", source).stdout


@pytest.mark.parametrize("split", [(), ("--pipeline",)])
def test_ranks(folder_of, answer, tmp_path, split):
    variables = {VARIABLE: KERNELS, "PYTHONPATH": HOOK, "MLX_LLAMA3_KERNELS": "fused", **RECORDED}
    command = [
        sys.executable,
        "-m",
        "mlx_llama3",
        "generate",
        "-m",
        str(folder_of("float32")),
        *QUESTION,
        "--json",
        *split,
    ]
    front, other = run_ranks(tmp_path, 2, command, environment=dict.fromkeys(range(2), variables))
    assert front.code == other.code == 0, front.err + other.err
    assert json.loads(front.out)["ids"] == answer


def suite(mode: str, *tests: str) -> str:
    """The last line of pytest for these tests on the stand-in."""
    done = on_a_mac(mode, "-m", "pytest", "-p", "no:xdist", "-p", "tests.mac.plugin", "-rs", *tests, env=RECORDED)
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.parametrize("mode", MODES)
def test_a_room_of_the_suite(mode):
    layers = "tests/mlx_llama3/model/layers"
    shown = suite(mode, layers, "tests/mlx_llama3/model/test_compiled.py", "tests/mlx_llama3/model/test_transformer.py")
    assert "a form for the CPU; here is a GPU" in shown


def test_the_page_answers_a_question():
    shown = suite(COMPILED, "tests/app/ui/test_page.py::test_first_question_to_streamed_answer")
    assert "1 passed" in shown or "no chromium" in shown


def test_folders_of_a_person(tmp_path):
    """`~/Library` holds them on a Mac."""
    code = "from app.ui.session.saved_conversations import data_dir; from mlx_llama3.system.hub import cache_dir\n"
    code += "print(data_dir(), cache_dir())"
    none = {"MLX_LLAMA3_CACHE": "", "MLX_LLAMA3_DATA": "", "HOME": str(tmp_path)}
    done = on_a_mac(COMPILED, "-c", code, env={**RECORDED, **none})
    library = tmp_path / "Library"
    assert done.stdout.split() == [str(library / "Application"), "Support/mlx-llama3", f"{library}/Caches/mlx-llama3"]


def test_all_that_only_a_mac_runs_was_run(lines_folder):
    """By the programs of this file; `python -m tests.mac.lines FOLDER` prints it."""
    ran = lines.recorded(lines_folder)
    if len(list(lines_folder.iterdir())) < 20:
        pytest.skip("not all tests of this file ran")
    assert [branch for branch in lines.branches() if branch.line not in ran.get(branch.file, ())] == []
