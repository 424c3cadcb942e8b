"""`mlx-llama3 generate` with the demo model: the prompt in all its forms, the JSON object, and bad input."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from app import cli
from app.options import request

GOLDEN = json.loads((Path(__file__).parents[2] / "data" / "smollm2-greedy.json").read_text(encoding="utf-8"))
PARIS = "The capital of France is Paris."


@pytest.fixture
def run(opened, monkeypatch, capsys):
    """Run the command in this process with the model that is loaded already; returns (code, output, errors)."""
    monkeypatch.setattr(request, "open_model", lambda name: opened)

    def run(*words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = cli.main(["generate", *words])
        return code, *capsys.readouterr()

    return run


def test_the_real_command(demo_folder) -> None:
    """Prompt, ids and text of the reference, through a process of its own."""
    command = [sys.executable, "-m", "app.cli", "generate", "--prompt", GOLDEN[0]["messages"][0]["content"], "--json"]
    done = subprocess.run([*command, "--max-tokens", "48"], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert list(result) == ["text", "ids", "prompt_ids", "finish_reason", "stats"]
    assert result["text"] == PARIS
    assert result["ids"] == GOLDEN[0]["new_ids"]
    assert result["prompt_ids"] == GOLDEN[0]["prompt_ids"]
    assert result["finish_reason"] == "stop"
    stats = result["stats"]
    assert list(stats) == ["prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "peak_memory_gb"]
    assert stats["prompt_tokens"] == len(GOLDEN[0]["prompt_ids"])
    assert stats["generation_tokens"] == 8
    assert stats["prompt_tps"] > 0 and stats["generation_tps"] > 0 and stats["peak_memory_gb"] > 0.1


@pytest.mark.parametrize(("bits", "size"), [(4, 27), (8, 34)])
def test_in_a_quantized_cache(run, opened, bits, size) -> None:
    """The reference's answer after a prompt that is long enough to be packed, and the memory it is kept in."""
    prompt = "The same again. " * 60 + GOLDEN[0]["messages"][0]["content"]
    words = ["--prompt", prompt, "--max-tokens", "8", "-v"]
    plain, packed = run(*words), run(*words, "--kv-bits", str(bits))
    assert plain[:2] == packed[:2]
    assert plain[2].splitlines()[-1].endswith("MB")
    # 30 layers of 3 heads of 64: 168 dense positions in the dtype of the activations, and 256 records.
    taken = 30 * 3 * (168 * 2 * 64 * opened.model.norm.weight.dtype.size + 256 * size * 4) / 1e6
    assert packed[2].splitlines()[-1].endswith(f" in {taken:.1f} MB (keys in 8 bits, values in {bits})")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--kv-bits", "5"], "argument --kv-bits: invalid choice: 5 (choose from 4, 8)"),
        (["--kv-bits", "x"], "argument --kv-bits: 'x' is not a whole number"),
        (["--kv-bits", "4", "--max-kv-size", "64"], "error: --max-kv-size and --kv-bits do not go together"),
        (["--max-kv-size", "4"], "error: --max-kv-size is 4; it must be above 4"),
    ],
    ids=str,
)
def test_caches_that_cannot_be(run, options, error) -> None:
    code, out, err = run("--prompt", "Hello", *options)
    assert (code, out) == (2, "") and error in err


def test_a_window_is_told_once_it_is_full(run) -> None:
    words = ["--prompt", GOLDEN[0]["messages"][0]["content"], "--max-tokens", "8", "-v", "--max-kv-size"]
    assert run(*words, "44")[2].splitlines()[-1].startswith("cache: 44 tokens in ")
    line = run(*words, "40")[2].splitlines()[-1]
    assert line.startswith("cache: 40 of 44 tokens in ") and line.endswith(" (the system prompt and the last ones)")


@pytest.mark.parametrize("options", [["--out", "answers.jsonl"], ["--batch-size", "4"]], ids=str)
def test_options_of_a_batch_need_one(run, options) -> None:
    code, out, err = run("--prompt", "Hello", *options)
    assert (code, out) == (2, "")
    assert err == "error: --out and --batch-size need --batch FILE, a file of prompts\n"


@pytest.mark.parametrize("form", ["prompt", "standard input", "messages", "object", "raw", "ids"])
def test_all_forms_of_a_prompt_are_one(run, tmp_path, form) -> None:
    record = GOLDEN[2]
    system, user = (message["content"] for message in record["messages"])
    file = tmp_path / "talk.json"
    messages = {"messages": record["messages"]} if form == "object" else record["messages"]
    file.write_text(json.dumps(messages), encoding="utf-8")
    words = {
        "prompt": ["--prompt", user, "--system", system],
        "standard input": ["--system", system],
        "messages": ["--messages", str(file)],
        "object": ["--messages", str(file)],
        "raw": ["--raw", record["prompt_text"]],
        "ids": ["--ids", ",".join(map(str, record["prompt_ids"]))],
    }[form]
    code, out, err = run(*words, "--json", "--max-tokens", "5", stdin=user.encode() + b"\n")
    assert (code, err) == (0, "")
    result = json.loads(out)
    assert result["prompt_ids"] == record["prompt_ids"]
    assert result["ids"] == record["new_ids"][:5]
    assert result["finish_reason"] == "length"


def test_text_is_streamed_and_ends_with_a_newline(run) -> None:
    code, out, err = run("--prompt", "What is the capital of France?", "--verbose")
    assert (code, out) == (0, PARIS + "\n")
    assert err.splitlines()[1].startswith("answer: 8 tokens, ")


def test_several_lines_of_standard_input_are_one_message(run) -> None:
    code, out, _ = run("--json", "--max-tokens", "1", stdin="Zwei\nZeilen – 🙂\n".encode())
    ids = json.loads(out)["prompt_ids"]
    assert code == 0
    code, out, _ = run("--json", "--max-tokens", "1", "--prompt", "Zwei\nZeilen – 🙂")
    assert json.loads(out)["prompt_ids"] == ids


def test_options_reach_the_generation(run) -> None:
    question = ["--prompt", "What is the capital of France?", "--max-tokens", "6"]
    assert run(*question, "--stop", " France")[1] == "The capital of\n"
    # 7042 is " Paris": banned, another word must come.
    assert "Paris" not in run(*question, "--logit-bias", "7042:-inf")[1]
    drawn = [run(*question, "--temp", "1.5", "--seed", seed)[1] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]


def test_logprobs(run, opened) -> None:
    code, out, _ = run("--prompt", "What is the capital of France?", "--json", "--logprobs", "3", "--max-tokens", "4")
    result = json.loads(out)
    assert [entry["id"] for entry in result["logprobs"]] == result["ids"]
    for entry in result["logprobs"]:
        assert entry["top"][0] == [entry["id"], entry["logprob"]]  # greedy: the best is the chosen one
        values = [value for _, value in entry["top"]]
        assert len(values) == 3 and values == sorted(values, reverse=True)
    import mlx.core as mx

    logits = np.array(opened.model(mx.array([result["prompt_ids"]]))[0, -1], dtype=np.float64)
    expected = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
    rounding = 1e-3 if opened.model.norm.weight.dtype == mx.float32 else 2e-2
    assert result["logprobs"][0]["logprob"] == pytest.approx(expected.max(), abs=rounding)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--prompt", ""], "message 1 (user) is empty"),
        (["--prompt", " \n"], "message 1 (user) is empty"),
        (["--raw", ""], "the prompt is empty"),
        (["--raw", "a", "--system", "b"], "--system does not go with --raw"),
        (["--ids", "1", "--system", "b"], "--system does not go with --ids"),
        (["--ids", "49152"], "token id 49152 is not in the vocabulary of 0 to 49151"),
        (["--ids", "-1"], "token id -1 is not in the vocabulary"),
        (["--prompt", "a", "--logprobs", "2"], "--logprobs N needs --json"),
        (["--prompt", "a", "--json", "--logprobs", "-1"], "--logprobs N needs --json, and N of at least 0"),
        (["--prompt", "a", "--context", "99999"], "a context of 99999 tokens is asked for; this model takes from 1 to"),
        (["--prompt", "a", "--context", "10"], "tokens, the context holds 10; shorten it, or use a larger context"),
        (["--prompt", "word " * 9000], "shorten"),
        (["--prompt", "a", "--logit-bias", "49152:1"], "logit_bias names token 49152; the vocabulary ends at 49151"),
        (["--prompt", "a", "--logit-bias=-1:1"], "--logit-bias -1:1.0 must be a token id"),
        (["--messages", "missing.json"], "missing.json: no such file"),
        (["--messages", "."], ".: cannot be read: Is a directory"),
    ],
)
def test_bad_input(run, words, complaint) -> None:
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and complaint in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"[", "is not JSON"),
        (b'["\xff"]', "is not JSON"),
        (b"[]", "holds no messages"),
        (b'{"message": []}', "holds no messages"),
        (b'"hello"', "holds no messages"),
        (b"[" * 100_000, "is not JSON"),
        (b'["hello"]', "message 1: expected an object with role and content"),
        (b'[{"content": "a"}]', "message 1: unknown role None"),
        (b'[{"role": "wizard", "content": "a"}]', "message 1: unknown role 'wizard'; expected one of system, user, "),
        (b'[{"role": "user", "content": ""}]', "message 1 (user) is empty"),
        (b'[{"role": "user", "content": [{"type": "image"}]}]', "content of type 'image' is not supported"),
        (b'[{"role": "user"}]', "expected text"),
        (b'[{"role": "system", "content": "a"}]', "there is none from the user"),
    ],
)
def test_bad_files_of_messages(run, tmp_path, monkeypatch, content, complaint) -> None:
    file = tmp_path / "talk.json"
    file.write_bytes(content)
    monkeypatch.setattr(request, "open_model", lambda name: pytest.fail("refused only after the model was loaded"))
    code, out, err = run("--messages", str(file))
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {file}") and complaint in err
    assert err.count("\n") == 1


def test_a_byte_order_mark_is_no_part_of_the_text(run, tmp_path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps(GOLDEN[0]["messages"]), encoding="utf-8-sig")
    words = ["--json", "--max-tokens", "1"]
    assert json.loads(run("--messages", str(file), *words)[1])["prompt_ids"] == GOLDEN[0]["prompt_ids"]
    stdin = GOLDEN[0]["messages"][0]["content"].encode("utf-8-sig")
    assert json.loads(run(*words, stdin=stdin)[1])["prompt_ids"] == GOLDEN[0]["prompt_ids"]


def test_standard_input_that_is_not_text(run) -> None:
    assert run(stdin=b"good\nb\xffd\n")[::2] == (2, "error: line 2 of standard input is not UTF-8 text\n")


def test_a_context_ends_the_answer(run) -> None:
    code, out, _ = run("--prompt", "Tell me a long story.", "--json", "--context", "45")
    result = json.loads(out)
    assert code == 0
    assert result["finish_reason"] == "length"
    assert len(result["prompt_ids"]) + len(result["ids"]) == 45


@pytest.mark.parametrize("name", ["./missing", "no-such-model", "/", "", "~nobody-here/x", "a" * 5000, "\udcff"])
def test_models_that_are_none(name, capsys) -> None:
    assert cli.main(["generate", "--prompt", "a", "--model", name]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and (name in err or ascii(name)[1:90] in err)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_without_a_prompt_it_is_told_what_to_give(run, monkeypatch, capsys, is_terminal) -> None:
    if is_terminal:
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        code, err = cli.main(["generate"]), capsys.readouterr().err
    else:
        code, _, err = run(stdin=b" \n\n")
    assert code == 2
    assert "give --prompt, --messages, --raw or --ids" in err
