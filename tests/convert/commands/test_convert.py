"""The converter's command line: `python -m convert` and `mlx-llama3 convert` behave the same."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from meta_checkpoint import PARAMS, write_meta, write_tokenizer_model
from tiny_gguf import write_tiny
from tiny_models import ARGS, random_weights, write_folder

from app import cli
from convert.__main__ import main

import mlx.core as mx

HALF = {name: array.astype(mx.float16) for name, array in random_weights(ARGS).items()}


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_folder(tmp_path / "in", ARGS, HALF)


def packing(target: Path) -> dict | None:
    return json.loads((target / "config.json").read_text()).get("quantization")


def module(*arguments: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "convert", *map(str, arguments)], capture_output=True, text=True)


def test_both_commands_have_the_same_help(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    help_texts = []
    for command, argv in ((main, ["--help"]), (cli.main, ["convert", "--help"])):
        with contextlib.suppress(SystemExit):
            command(argv)
        help_texts.append(capsys.readouterr().out.split("\n\n", 1)[1])
    ours = [line for line in help_texts[0].splitlines() if "--debug" not in line]
    assert ours == help_texts[1].splitlines() and any("--quantize" in line for line in ours)


def test_help_needs_no_mlx():
    program = "import sys, convert.__main__ as m\ntry: m.main(['--help'])\nexcept SystemExit: pass\n"
    program += "assert not {'mlx.core', 'numpy', 'tqdm'} & set(sys.modules), 'heavy'"
    assert subprocess.run([sys.executable, "-c", program], stdout=subprocess.DEVNULL).returncode == 0


def test_report_on_standard_output_and_nothing_else_in_a_pipe(folder, tmp_path):
    done = module(folder, tmp_path / "out")
    assert done.returncode == 0 and done.stderr == ""
    first, second, third, note = done.stdout.splitlines()
    assert first == f"{tmp_path / 'out'}: 30 tensors, 0.00 GB, float16"
    assert second.startswith("from Hugging Face folder, 1 safetensors file: ")
    assert "MB/s; names and shapes as the configuration means" in third
    assert note == "note: no tokenizer.json in the source: the new folder runs, but not on text"


@pytest.mark.parametrize("to", ["mlx", "gguf"])
def test_progress_on_a_terminal(tmp_path, to):
    write_tiny(tmp_path / "in.gguf")
    command = ["-m", "convert", str(tmp_path / "in.gguf"), str(tmp_path / "out"), "--to", to]
    # Redrawn at every update, because the conversion ends before the next timed redraw.
    environment = os.environ | {"TQDM_MININTERVAL": "0"}
    child = pexpect.spawn(sys.executable, command, env=environment, dimensions=(24, 120), timeout=60)
    child.expect(pexpect.EOF)
    shown = child.before.decode()
    # Percentage, bytes of total bytes, time left, bytes per second, tensor i of n.
    bar = r"convert: +\d+%\|.*\| \S+M?/\S+M \[\d\d:\d\d<\d\d:\d\d, .*B/s, tensor \d+/20\]"
    assert re.search(bar, shown), shown
    assert "MB/s" in shown.rstrip().splitlines()[-1], "the report, without a bar behind it"


def test_control_c(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("convert.conversion.to_mlx.make_plan", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert main([str(folder), str(tmp_path / "out")]) == 130
    assert not (tmp_path / "out").exists()


def test_quiet(folder, tmp_path, capsys):
    assert main([str(folder), str(tmp_path / "out"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], None),
        (["--quantize", "4", "--group-size", "32"], {"group_size": 32, "bits": 4, "mode": "affine"}),
        (["--quantize", "mxfp4"], {"group_size": 32, "bits": 4, "mode": "mxfp4"}),
    ],
)
def test_options_reach_the_converter(folder, tmp_path, options, expected):
    assert main([str(folder), str(tmp_path / "out"), *options, "--quiet"]) == 0
    assert packing(tmp_path / "out") == expected


def test_dense_embedding_head_and_another_type(folder, tmp_path):
    options = ["--quantize", "8", "--group-size", "32", "--keep-embeddings", "--keep-head", "--dtype", "bfloat16"]
    assert main([str(folder), str(tmp_path / "out"), *options, "--quiet"]) == 0
    tensors = mx.load(str(tmp_path / "out" / "model.safetensors"))
    assert tensors["model.embed_tokens.weight"].dtype == tensors["lm_head.weight"].dtype == mx.bfloat16
    assert tensors["model.layers.0.mlp.up_proj.weight"].dtype == mx.uint32


def test_to_gguf(tmp_path, capsys):
    write_tokenizer_model(write_meta(tmp_path / "in", params=PARAMS | {"vocab_size": 556}) / "tokenizer.model", 300)
    for kind, type_name in (("gguf", "F16"), ("gguf-q8_0", "Q8_0")):
        assert main([str(tmp_path / "in"), str(tmp_path / f"{kind}.gguf"), "--to", kind]) == 0
        assert type_name in capsys.readouterr().out
        assert (tmp_path / f"{kind}.gguf").read_bytes().startswith(b"GGUF")
    assert main([str(tmp_path / "in"), str(tmp_path / "gguf.gguf"), "--to", "gguf"]) == 2
    assert "gguf.gguf: exists already; give another, or --overwrite" in capsys.readouterr().err
    assert main([str(tmp_path / "in"), str(tmp_path / "x.gguf"), "--to", "gguf", "--quantize", "4"]) == 2
    assert "--quantize is for MLX folders; the type of a GGUF file is part of --to" in capsys.readouterr().err


def test_adapter(tmp_path, capsys):
    peft = Path(__file__).parents[2] / "data" / "peft"
    assert main([str(peft / "base"), str(tmp_path / "out"), "--adapter", str(peft / "lora")]) == 0
    assert "note: the adapter lora is fused into 8 tensors" in capsys.readouterr().out


def test_overwrite(folder, tmp_path):
    assert main([str(folder), str(tmp_path / "out"), "--quiet"]) == 0
    assert main([str(folder), str(tmp_path / "out"), "--quiet"]) == 2
    assert main([str(folder), str(tmp_path / "out"), "--quiet", "--overwrite", "--quantize", "4"]) == 0
    assert packing(tmp_path / "out")["bits"] == 4


@pytest.mark.parametrize(
    "arguments, named",
    [
        (["nowhere/model.gguf", "out"], "nowhere/model.gguf: "),
        (["{folder}", "out", "--group-size", "64"], "--group-size says how to quantize"),
        (["{folder}", "out", "--recipe", "best"], "--recipe best: no such file"),
        (["{folder}", "{folder}"], "exists already"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(folder, tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tmp_path)
    assert main([argument.replace("{folder}", str(folder)) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and named in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_debug_shows_the_traceback(folder):
    done = module(folder, folder, "--debug")
    assert done.returncode == 1 and "Traceback" in done.stderr and "exists already" in done.stderr


@pytest.mark.parametrize("value", ["7", "int4", "16"])
def test_unknown_numbers_of_bits(folder, tmp_path, capsys, value):
    with pytest.raises(SystemExit) as left:
        main([str(folder), str(tmp_path / "out"), "--quantize", value])
    assert left.value.code == 2 and "argument --quantize: invalid choice" in capsys.readouterr().err
