"""`mlx-llama3 generate --batch`: answers in order, as single runs give them; resumed, refused, interrupted."""

import io
import json
import os
import sys
import threading
from pathlib import Path

import pytest

from app import cli
from app.generate import batch
from app.options import request

PROMPTS = [
    "What is the capital of France?",
    {"prompt": "Name three colours.", "id": "c", "system": "Be brief.", "stop": ","},
    {"messages": [{"role": "user", "content": "Count to five."}], "temperature": 0.8, "seed": 3, "max_tokens": 9},
    {"prompt": "Say hi", "max_tokens": 3},
]
SINGLE = [
    ["-p", "What is the capital of France?"],
    ["-p", "Name three colours.", "--system", "Be brief.", "--stop", ","],
    ["-p", "Count to five.", "--temperature", "0.8", "--seed", "3", "--max-tokens", "9"],
    ["-p", "Say hi", "--max-tokens", "3"],
]


@pytest.fixture
def run(opened, monkeypatch, capsys):
    """Run the command in this process with the model that is loaded already; returns (code, output, errors)."""
    for module in (batch, request):
        monkeypatch.setattr(module, "open_model", lambda name: opened)

    def run(*words: object, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = cli.main(["generate", *map(str, words)])
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n\n".join(map(json.dumps, PROMPTS)))
    return path


@pytest.fixture
def no_model(monkeypatch):
    def fail(name):
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(batch, "open_model", fail)


def test_answers_are_those_of_single_runs(run, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    code, output, errors = run("--batch", prompts, "--out", out, "--max-tokens", 12, "--batch-size", 3, "-v")
    assert (code, output) == (0, "")
    assert "4 answers" in errors and "3 at a time" in errors
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["line"] for answer in answers] == [1, 3, 5, 7]
    assert [answer.get("id") for answer in answers] == [None, "c", None, None]
    for answer, words in zip(answers, SINGLE, strict=True):
        words = words if "--max-tokens" in words else [*words, "--max-tokens", "12"]
        single = json.loads(run(*words, "--json")[1])
        assert answer["text"] == single["text"]
        assert answer["finish_reason"] == single["finish_reason"]
        assert answer["tokens"] == len(single["ids"])
        assert answer["prompt_tokens"] == len(single["prompt_ids"])


def test_goes_on_where_it_was_interrupted(run, prompts, tmp_path):
    """Cut anywhere, a second run leaves the same bytes."""
    out, options = tmp_path / "out.jsonl", ["--max-tokens", 4, "--batch-size", 2]
    assert run("--batch", prompts, "--out", out, *options)[0] == 0
    whole = out.read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    for cut in (30, ends[0], ends[1] + 40, len(whole)):
        out.write_bytes(whole[:cut])
        code, _, errors = run("--batch", prompts, "--out", out, *options)
        assert (code, out.read_bytes()) == (0, whole)
        done = sum(end <= cut for end in ends)
        assert f"holds {done} of 4 answers" in errors if done else "holds" not in errors


def test_ctrl_c_leaves_what_was_answered(run, prompts, tmp_path, monkeypatch):
    out, options = tmp_path / "out.jsonl", ["--max-tokens", 4, "--batch-size", 1]
    real = batch.generate_batch

    def interrupted(*arguments, **keywords):
        steps = real(*arguments, **keywords)
        yield next(steps)
        raise KeyboardInterrupt

    monkeypatch.setattr(batch, "generate_batch", interrupted)
    assert run("--batch", prompts, "--out", out, *options)[0] == 130
    assert out.read_bytes().count(b"\n") == 1
    monkeypatch.setattr(batch, "generate_batch", real)
    assert run("--batch", prompts, "--out", out, *options)[0] == 0
    assert out.read_bytes().count(b"\n") == 4


def test_a_file_that_another_run_writes_is_left_alone(run, prompts, tmp_path):
    out, options = tmp_path / "out.jsonl", ["--max-tokens", 2]
    with batch.AnswerFile(out, ["a", "b"]) as other:
        other.write({"text": "first"})
        code, _, errors = run("--batch", prompts, "--out", out, *options)
        assert (code, errors) == (2, f"error: {out}: another run writes it now; wait for it, or choose another --out\n")
        other.write({"text": "second"})
    assert out.read_text().count("\n") == 2
    out.unlink()
    assert run("--batch", prompts, "--out", out, *options)[0] == 0


def test_what_is_not_its_own_is_left_alone(run, prompts, tmp_path):
    out, options = tmp_path / "out.jsonl", ["--max-tokens", 3]
    run("--batch", prompts, "--out", out, *options)
    others = tmp_path / "others.jsonl"
    others.write_text('"Another prompt"\n')
    for words, content in (
        (["--batch", others, *options], None),
        (["--batch", prompts, "--max-tokens", 4], None),
        (["--batch", prompts, *options], b"my diary"),
        (["--batch", prompts, *options], b"my diary\n"),
        (["--batch", prompts, *options], b"[]\n"),
    ):
        if content is not None:
            out.write_bytes(content)
        before = out.read_bytes()
        code, output, errors = run(*words, "--out", out)
        assert (code, output) == (2, "")
        assert "choose another --out" in errors and errors.count("\n") == 1
        assert out.read_bytes() == before
    assert run("--batch", prompts, "--out", prompts)[2].startswith("error: --out")


def test_a_place_for_the_answers_is_looked_for_before_the_model_is_loaded(run, no_model, prompts, tmp_path):
    for out, said in (
        (tmp_path / "no" / "out.jsonl", "there is no folder"),
        (tmp_path, "is a folder"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        code, output, errors = run("--batch", prompts, "--out", out)
        assert (code, output) == (2, "")
        assert said in errors and errors.count("\n") == 1


def test_answers_into_a_device_or_a_pipe(run, prompts, tmp_path):
    assert run("--batch", prompts, "--out", os.devnull, "--max-tokens", 2) == (0, "", "")
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    assert run("--batch", prompts, "--out", pipe, "--max-tokens", 2) == (0, "", "")
    reader.join()
    assert read[0].count(b"\n") == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_told_with_the_file(run, prompts):
    code, output, errors = run("--batch", prompts, "--out", "/dev/full", "--max-tokens", 2)
    assert (code, output) == (2, "")
    assert errors == "error: /dev/full: cannot be written: No space left on device; run again to go on\n"


def test_a_token_that_the_vocabulary_has_not_is_found_before_anything_is_answered(run, tmp_path):
    path, out = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    path.write_text('"fine"\n{"prompt": "a", "logit_bias": {"49152": 1}}\n')
    code, _, errors = run("--batch", path, "--out", out, "--batch-size", 1, "--max-tokens", 2)
    assert (code, errors) == (2, f"error: {path}, line 2: logit_bias names token 49152; the vocabulary ends at 49151\n")
    assert not out.exists()


def test_standard_input_and_output(run):
    code, output, _ = run("--batch", "-", "--max-tokens", 3, stdin='"Say hi"\n')
    assert code == 0
    assert json.loads(output)["line"] == 1


@pytest.mark.parametrize(
    "line, said",
    [
        ("{", "is not JSON"),
        ("3", 'expected a text, or an object with either "prompt" or "messages"'),
        ("{}", 'expected a text, or an object with either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', "either"),
        ('{"prompt": "a", "temprature": 1}', "there is no key 'temprature'"),
        ('{"prompt": "a", "temperature": -1}', "temperature is -1"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens is 0"),
        ('{"prompt": "a", "max_tokens": true}', "max_tokens is True"),
        ('{"prompt": "a", "seed": "x"}', "seed is x"),
        ('{"prompt": "a", "stop": [""]}', "stop must be a list of texts"),
        ('{"prompt": ""}', "is empty"),
        ('{"prompt": 3}', "expected text as content"),
        ('{"messages": [{"role": "user", "content": "a"}], "system": "b"}', "does not go with"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "the last message is the assistant's, and is not continued; end with the user's",
        ),
    ],
)
def test_a_bad_line_is_named(run, no_model, tmp_path, line, said):
    path = tmp_path / "p.jsonl"
    path.write_text(f'"fine"\n\n{line}\n')
    code, output, errors = run("--batch", path)
    assert (code, output) == (2, "")
    assert f"{path}, line 3" in errors and said in errors and errors.count("\n") == 1


def test_a_prompt_that_is_too_long_is_named(run, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('"Hi"\n' + json.dumps("word " * 60))
    code, _, errors = run("--batch", path, "--context", 50)
    assert code == 2
    assert f"{path}, line 2: the prompt has" in errors


@pytest.mark.parametrize(
    "words, said",
    [
        (["-p", "x"], "--prompt"),
        (["--json"], "--json"),
        (["--logprobs", "0"], "--logprobs"),
        (["--draft", "ngram"], "--draft"),
        (["--draft-tokens", "2"], "--draft-tokens"),
        (["--max-kv-size", "64"], "--max-kv-size"),
        (["--kv-bits", "8"], "--kv-bits"),
        (["--scale", "1:mlp=0"], "--scale"),
    ],
)
def test_options_that_do_not_go_together(run, no_model, prompts, words, said):
    code, _, errors = run("--batch", prompts, *words)
    assert code == 2
    assert f"--batch does not go with {said}" in errors


def test_files_that_hold_no_prompts(run, no_model, tmp_path):
    path = tmp_path / "p.jsonl"
    assert "no such file" in run("--batch", path)[2]
    path.write_text("\n \n")
    assert "holds no prompts" in run("--batch", path)[2]
