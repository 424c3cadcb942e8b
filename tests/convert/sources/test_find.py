"""Names of sources: local paths, and names of the hub with its real client and a server on loopback."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import COMMIT, Repository
from meta_checkpoint import write_meta
from tiny_gguf import write_tiny
from tiny_models import ARGS, random_weights, write_folder

from convert.sources import find as module
from convert.sources.find import find_source
from mlx_llama3.errors import UserError
from mlx_llama3.system.hub import ALIASES

# Run in a process of its own, because the hub client reads its settings when it is imported.
FIND = """
import json, sys
from convert.sources.find import find_source
from mlx_llama3.errors import UserError
for name in sys.argv[1:]:
    try:
        print(json.dumps(["found", str(find_source(name))]))
    except UserError as error:
        print(json.dumps(["error", str(error)]))
"""
SAFETENSORS = {
    "model.safetensors.index.json": b"{}",
    "model-00001-of-00002.safetensors": b"1",
    "model-00002-of-00002.safetensors": b"2",
}
COMPANIONS = {"config.json": b"{}", "tokenizer.json": b"{}", "tokenizer.model": b"t", "LICENSE.txt": b"be kind"}
TORCH = {"pytorch_model-00001-of-00002.bin": b"1", "pytorch_model-00002-of-00002.bin": b"2"}
ORIGINAL = {
    "original/consolidated.00.pth": b"0",
    "original/params.json": b"{}",
    "original/tokenizer.model": b"t",
    "original/orig_params.json": b"{}",
}
META = {"consolidated.00.pth": b"0", "consolidated.01.pth": b"1", "params.json": b"{}", "tokenizer.model": b"t"}
SPLIT = {f"BF16/m-BF16-0000{n}-of-00002.gguf": b"%d" % n for n in (1, 2)}
GGUFS = {"m-Q4_K_M.gguf": b"4", "m-Q8_0.gguf": b"8", "mmproj-m.gguf": b"p"}
OTHERS = {"README.md": b"#", "onnx/model.onnx": b"o", "adapter_model.safetensors": b"a"}


def find(environment: dict[str, str], *names: str) -> list[list[str]]:
    command = [sys.executable, "-c", FIND, *names]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def snapshot(environment: dict[str, str], repository: str) -> Path:
    return Path(environment["HF_HOME"], "hub", f"models--{repository.replace('/', '--')}", "snapshots", COMMIT)


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


# repository: its files, the name after it, the files that are fetched, the place that is opened
CASES = {
    "org/shards": ({**SAFETENSORS, **TORCH, **ORIGINAL, **COMPANIONS, **OTHERS}, "", {**SAFETENSORS, **COMPANIONS}, ""),
    "org/torch": ({**TORCH, **ORIGINAL, **COMPANIONS, **OTHERS}, "", {**TORCH, **COMPANIONS}, ""),
    "org/only-original": ({**ORIGINAL, **COMPANIONS}, "", ORIGINAL, "original"),
    "org/both": ({**SAFETENSORS, **ORIGINAL, **COMPANIONS}, "/original", ORIGINAL, "original"),
    "org/meta": ({**META, **OTHERS}, "", META, ""),
    "org/meta-twice": (
        {**META, "consolidated.safetensors": b"s"},
        "",
        {"consolidated.safetensors": b"s", "params.json": b"", "tokenizer.model": b""},
        "",
    ),
    "org/one-GGUF": ({"m.gguf": b"4", "mmproj-m.gguf": b"p", "config.json": b"{}"}, "", {"m.gguf"}, "m.gguf"),
    "org/GGUFs": ({**GGUFS, **SPLIT}, "/m-Q8_0.gguf", {"m-Q8_0.gguf"}, "m-Q8_0.gguf"),
    "org/split": ({**SPLIT, **OTHERS}, "", SPLIT, "BF16/m-BF16-00001-of-00002.gguf"),
    "org/split-part": (SPLIT, "/BF16/m-BF16-00002-of-00002.gguf", SPLIT, "BF16/m-BF16-00002-of-00002.gguf"),
    "org/revision": ({**GGUFS}, f"@{COMMIT}/m-Q8_0.gguf", {"m-Q8_0.gguf"}, "m-Q8_0.gguf"),
    "org/branch": ({**SAFETENSORS, **COMPANIONS}, "@main", {**SAFETENSORS, **COMPANIONS}, ""),
}


def test_one_set_of_weights_is_fetched_and_later_runs_ask_nobody(hub, environment):
    alias = ALIASES["llama3.2-1b"]
    hub.repositories = {name: Repository(dict(stored)) for name, (stored, *_) in CASES.items()}
    hub.repositories[alias] = Repository({**SAFETENSORS, **COMPANIONS})
    names = [name + part for name, (_, part, *_) in CASES.items()]
    results = find(environment, *names, "llama3.2-1b")
    for (name, (_, _, fetched, place)), answer in zip(CASES.items(), results[:-1], strict=True):
        assert answer == ["found", str(snapshot(environment, name) / place)], name
        assert files(snapshot(environment, name)) == set(fetched), name
    assert results[-1] == ["found", str(snapshot(environment, alias))]
    hub.requests.clear()
    assert find(environment, *names, "llama3.2-1b") == results
    assert hub.requests == []


REFUSED = {
    "org/GGUFs": (
        {**GGUFS, **SPLIT},
        "holds 3 GGUF models; name one, as in org/GGUFs/BF16/m-BF16-00001-of-00002.gguf: "
        "BF16/m-BF16-00001-of-00002.gguf, m-Q4_K_M.gguf, m-Q8_0.gguf",
    ),
    "org/a/m-Q5_K.gguf": (GGUFS, "has no m-Q5_K.gguf (its GGUF files: m-Q4_K_M.gguf, m-Q8_0.gguf, mmproj-m.gguf)"),
    "org/b/original": (SAFETENSORS, "holds no original/ with Meta's params.json and consolidated files"),
    "org/text": ({"README.md": b"#"}, "holds no weights that are read (its files: README.md)"),
    "org/lora": (
        {"adapter_config.json": b"{}", "adapter_model.safetensors": b"a", "config.json": b"{}"},
        "holds no weights that are read (its files: adapter_config.json",
    ),
    "org/none": (None, "neither a folder here nor a model on the hub: check the name"),
    "org/c@v9/m.gguf": (GGUFS, "has no revision 'v9': leave @v9 out"),
}


def test_refusals_say_what_there_is(hub, environment):
    for name, (stored, _) in REFUSED.items():
        if stored is not None:
            hub.repositories["/".join(name.split("@")[0].split("/")[:2])] = Repository(stored)
    for (name, (_, expected)), (kind, text) in zip(REFUSED.items(), find(environment, *REFUSED), strict=True):
        assert kind == "error" and expected in text and "\n" not in text, (name, text)
    assert hub.fetched() == [], "nothing is downloaded to find that out"
    [[kind, text]] = find(environment | {"HF_HUB_OFFLINE": "1"}, "org/new")
    assert kind == "error" and text.endswith("HF_HUB_OFFLINE forbids the download: unset it")


def test_the_commands_take_names_of_the_hub(hub, environment, tmp_path):
    """convert to both formats, and verify: the card and the GGUF's name name the repository, not its commit."""
    folder = write_folder(tmp_path / "tiny", ARGS, random_weights(ARGS))
    write_tiny(tmp_path / "tiny.gguf")
    hub.repositories["org/tiny"] = Repository({path.name: path.read_bytes() for path in folder.iterdir()})
    original = {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in write_meta(tmp_path / "original").iterdir()
    }
    hub.repositories["org/more"] = Repository({"a.gguf": (tmp_path / "tiny.gguf").read_bytes(), **original})

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "app.cli", *arguments]
        return subprocess.run(command, env=environment, text=True, capture_output=True, timeout=120)

    out = str(tmp_path / "out")
    done = run("convert", "org/tiny", out)
    assert (done.returncode, done.stderr) == (0, "")
    card = Path(out, "README.md").read_text()
    assert "\nbase_model: org/tiny\n---\n\n# tiny, for MLX\n" in card
    assert f"from org/tiny, commit {COMMIT}: Hugging Face folder" in card
    done = run("verify", out, "--against", "org/tiny", "--no-run")
    assert done.returncode == 0 and done.stdout.endswith("verified\n")

    done = run("convert", "org/more/a.gguf", str(tmp_path / "x.gguf"), "--to", "gguf", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    done = run("convert", "org/more/original", str(tmp_path / "meta"))
    assert done.returncode == 0 and "# more, for MLX" in (tmp_path / "meta" / "README.md").read_text()

    hub.requests.clear()
    done = run("convert", "org/unseen", out)
    assert done.returncode == 2 and "exists already" in done.stderr
    assert hub.requests == [], "the target is looked at first"


def test_local_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "list_files", lambda *_: pytest.fail("the hub was asked"))
    Path("org/name").mkdir(parents=True)
    Path("a.gguf").write_bytes(b"GGUF")
    assert find_source("org/name") == Path("org/name")
    assert find_source("a.gguf") == Path("a.gguf")
    local = (
        "org/name/b.gguf",
        "./x/y/c.gguf",
        "../x/y",
        "./x",
        "x/m.gguf",
        "/x/y/c.gguf",
        "a/b/c",
        "~/nowhere",
        "m.gguf",
    )
    for name in local:
        with pytest.raises(UserError, match=f"^{name}: no such file or folder$"):
            find_source(name)
    with pytest.raises(UserError, match="'lama' is no known model: use demo, llama3.2-1b"):
        find_source("lama")


def test_the_demo_model_is_its_gguf(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "demo_gguf", lambda progress: tmp_path / f"{progress}.gguf")
    Path("demo").mkdir()
    assert find_source("demo", progress=False) == tmp_path / "False.gguf"
    assert find_source("./demo") == Path("demo")


def test_a_cached_model_without_a_listing_is_found_without_a_network(environment):
    """As a program leaves it that downloads file by file."""
    offline = environment | {"HF_HUB_OFFLINE": "1"}
    folder = snapshot(environment, "org/tiny")
    folder.mkdir(parents=True)
    for name, content in {**SAFETENSORS, **COMPANIONS}.items():
        (folder / name).write_bytes(content)
    (folder.parent.parent / "refs").mkdir()
    (folder.parent.parent / "refs" / "main").write_text(COMMIT)
    assert find(offline, "org/tiny", "org/tiny@main") == [["found", str(folder)]] * 2
    [[kind, text]] = find(offline, "org/tiny@other")
    assert kind == "error" and "not wholly in the hub's cache" in text
