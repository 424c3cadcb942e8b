"""From names to folders: local names in this process, hub names with the real client against a server on loopback."""

import errno
import json
import signal
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from hub_server import COMMIT, Repository
from huggingface_hub.errors import RevisionResolutionError

from mlx_llama3.errors import UserError
from mlx_llama3.system import hub as names

# Runs in its own process, because the hub client reads its settings when it is imported.
RESOLVE = """
import json, sys
from mlx_llama3.errors import UserError
from mlx_llama3.system.hub import resolve
for name in sys.argv[1:]:
    seen = []
    try:
        folder = str(resolve(name, lambda *bytes: seen.append(bytes)))
        print("progress:", *seen[-1:], file=sys.stderr)
        print(json.dumps(["folder", folder]))
    except UserError as error:
        print(json.dumps(["error", str(error)]))
"""
SHARD_1 = bytes(range(256)) * (24 << 12)  # 24 MiB: the client writes 10 MiB at a time
SHARD_2 = bytes(reversed(range(256))) * 1024
MODEL = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "model.safetensors.index.json": b'{"weight_map": {}}',
    "model-00001-of-00002.safetensors": SHARD_1,
    "model-00002-of-00002.safetensors": SHARD_2,
}
SUPERFLUOUS = {
    "README.md": b"# A model",
    "consolidated.safetensors": b"twice",
    "original/consolidated.00.pth": b"twice",
    "original/params.json": b"{}",
    "pytorch_model.bin": b"twice",
}


def start(environment: dict[str, str], *models: str) -> subprocess.Popen:
    command = [sys.executable, "-c", RESOLVE, *models]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def resolve(environment: dict[str, str], *models: str) -> list[list[str]]:
    process = start(environment, *models)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return [json.loads(line) for line in out.splitlines()]


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


# ---- names that need no network


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert names.resolve(str(tmp_path)) == tmp_path
    assert names.resolve(tmp_path) == tmp_path
    assert names.resolve("org/name") == Path("org/name")


def test_home_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert names.resolve("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["./foo", "/nowhere/foo", "../foo", "~/no-such", "foo/", "a/b/c", "org/model.gguf"])
def test_what_looks_local_is_never_looked_up(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(names, "_download", lambda *_: pytest.fail("the hub was asked"))
    with pytest.raises(UserError) as error:
        names.resolve(name)
    assert str(error.value) == f"{name}: there is no such folder"


@pytest.mark.parametrize(("name", "why"), [("a" * 5000, "File name too long"), ("~nobody-here/x", "home directory")])
def test_what_can_be_no_folder(name, why):
    with pytest.raises(UserError, match=f"there can be no such folder: .*{why}"):
        names.resolve(name)


def test_no_name_is_not_the_current_folder():
    with pytest.raises(UserError, match="'' is no known model"):
        names.resolve("")


def test_a_bare_word_lists_the_aliases():
    with pytest.raises(UserError) as error:
        names.resolve("lama")
    for known in ("demo", "llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "llama3.3-70b"):
        assert known in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_is_to_be_converted(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(UserError, match=r"mlx-llama3 convert .*x\.gguf FOLDER"):
        names.resolve(str(tmp_path / "x.gguf"))


def test_demo_before_and_after_it_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_LLAMA3_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="has not been made yet"):
        names.resolve("demo")
    names.demo_folder().mkdir()
    assert names.resolve("demo") == names.demo_folder()
    assert names.demo_folder().parent == tmp_path


def test_cache_folder_of_each_platform(monkeypatch):
    monkeypatch.delenv("MLX_LLAMA3_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr(sys, "platform", "linux")
    assert names.cache_dir() == Path("/home/ada/.cache/mlx-llama3")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert names.cache_dir() == Path("/home/ada/.cache/mlx-llama3")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert names.cache_dir() == Path("/caches/mlx-llama3")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert names.cache_dir() == Path("/home/ada/Library/Caches/mlx-llama3")
    monkeypatch.setenv("MLX_LLAMA3_CACHE", "~/elsewhere")
    assert names.cache_dir() == Path("/home/ada/elsewhere")


def test_repository_of_a_path_in_the_hubs_cache():
    snapshot = Path("/h/hub/models--org--a-model.v1/snapshots") / COMMIT
    for path in (snapshot, snapshot / "original", snapshot / "Q4" / "a.gguf"):
        assert names.cached_repository(path) == ("org/a-model.v1", COMMIT)
    for path in (snapshot.parent, Path("/h/models--org--a"), Path("/h/models--org/snapshots") / COMMIT, Path("a.gguf")):
        assert names.cached_repository(path) is None


# ---- the hub


def test_download_takes_the_model_alone_and_later_runs_ask_nobody(hub, environment):
    alias = names.ALIASES["llama3.2-1b"]
    hub.repositories[alias] = Repository(MODEL | SUPERFLUOUS)
    [[kind, folder]] = resolve(environment, "llama3.2-1b")
    assert kind == "folder"
    assert contents(folder) == MODEL
    requested = {path.split("/")[1] for _, path, _ in hub.requests}
    assert requested == {"api", "mlx-community", "cdn"}, "nothing but the model is requested: no telemetry"
    assert not any("agent" in path or "telemetry" in path for _, path, _ in hub.requests)

    hub.requests.clear()
    assert resolve(environment, "llama3.2-1b", alias, f"{alias}@{COMMIT}") == [["folder", folder]] * 3
    assert hub.requests == []
    assert resolve(environment | {"HF_HUB_OFFLINE": "1"}, alias) == [["folder", folder]]


def test_on_a_terminal_bars_are_shown_and_done_with_before_the_chat(hub, environment):
    hub.repositories["org/model"] = Repository(MODEL)
    terminal = pexpect.spawn(
        sys.executable, ["-c", RESOLVE, "org/model"], env=environment, encoding="utf-8", timeout=60
    )
    terminal.expect(pexpect.EOF)
    before, _, after = terminal.before.partition('["folder"')
    assert "25.4M" in before, "the bytes are counted"
    assert after.count("\n") == 1, "nothing is drawn into what follows"


def test_progress_counts_every_byte(hub, environment):
    hub.repositories["org/model"] = Repository(MODEL)
    script = "from mlx_llama3.system.hub import resolve; resolve('org/model', lambda done, known: print(done, known))"
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    reported = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    size = sum(map(len, MODEL.values()))
    assert max(reported) == (size, size)
    assert any(0 < count < size for count, _ in reported), "reported during the download"


def test_progress_counts_bytes_up_to_all_of_them(hub, environment):
    hub.repositories["org/model"] = Repository(MODEL)
    process = start(environment, "org/model", "org/model")
    _, err = process.communicate(timeout=60)
    total = sum(map(len, MODEL.values()))
    assert f"progress: ({total}, {total})\nprogress:\n" in err, "the second time nothing is downloaded"


def test_a_download_that_breaks_off_goes_on_where_it_was(hub, environment):
    hub.repositories["org/model"] = Repository(MODEL)
    hub.cut_once.add("model-00001-of-00002.safetensors")
    [[kind, folder]] = resolve(environment, "org/model")
    assert kind == "folder"
    assert contents(folder) == MODEL
    resumed = [byte_range for method, path, byte_range in hub.requests if method == "GET" and "00001-of" in path]
    assert resumed == [None, f"bytes={10 << 20}-"]


def test_a_killed_download_is_no_model_and_keeps_its_whole_files(hub, environment):
    hub.repositories["org/model"] = Repository(MODEL)
    hub.hang.add("model-00001-of-00002.safetensors")
    process = start(environment, "org/model")
    assert hub.hanging.wait(30)
    snapshot = Path(environment["HF_HOME"]) / "hub" / "models--org--model" / "snapshots" / COMMIT
    while len(list(snapshot.glob("*"))) < len(MODEL) - 1:  # the other files arrive meanwhile
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()

    [[kind, text]] = resolve(environment | {"HF_HUB_OFFLINE": "1"}, "org/model")
    assert kind == "error"
    assert "not wholly in the hub's cache" in text and "HF_HUB_OFFLINE" in text

    hub.hang.clear()
    hub.released.set()
    hub.requests.clear()
    [[kind, folder]] = resolve(environment, "org/model")
    assert kind == "folder"
    assert contents(folder) == MODEL
    assert hub.fetched() == ["model-00001-of-00002.safetensors"]


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this model is restricted."}
UNKNOWN = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Invalid username or password."}
REFUSALS = {
    "org/gated": (Repository(MODEL, file_refusal=(403, GATED)), "gated: accept its licence at "),
    "org/gated-anonymous": (Repository(MODEL, refusal=(401, GATED)), "gated: accept its licence at "),
    "org/none": (None, "neither a folder here nor a model on the hub: check the name"),
    "org/private": (Repository(refusal=(401, UNKNOWN)), "if private, run `hf auth login`"),
    "org/model@v9": (Repository(MODEL), "has no revision 'v9': leave @v9 out"),
    "org/token": (
        Repository(refusal=(401, {"X-Error-Message": "Invalid credentials in Authorization header"})),
        "the hub refuses your access token",
    ),
    "org/ill": (Repository(refusal=(500, {})), "the hub answers with status 500: try again later"),
    "org/bad--name": (None, "no possible name on the hub"),
    "org/gguf": (
        Repository({"a.Q4_K.gguf": b"", "config.json": b""}),
        "GGUF files (a.Q4_K.gguf): `mlx-llama3 convert org/gguf FOLDER` ",
    ),
    "org/meta": (Repository({"original/consolidated.00.pth": b""}), "Meta's own files (original/consolidated.00.pth)"),
    "org/torch": (Repository({"pytorch_model.bin": b"", "config.json": b""}), "PyTorch files (pytorch_model.bin)"),
    "org/text": (Repository({"config.json": b"{}"}), "holds no weights that can be read here (1 files"),
}


def test_each_refusal_says_what_to_do(hub, environment):
    hub.repositories = {name.split("@")[0]: repository for name, (repository, _) in REFUSALS.items() if repository}
    answers = resolve(environment, *REFUSALS)
    for (name, (_, expected)), (kind, text) in zip(REFUSALS.items(), answers, strict=True):
        assert kind == "error", name
        assert text.startswith(name.split("@")[0] + ": ")
        assert expected in text
        assert "\n" not in text
    assert f"{hub.url}/org/gated," in answers[0][1] and "`hf auth login`" in answers[0][1]


def test_nothing_cached_and_no_network(environment):
    [[kind, text]] = resolve(environment | {"HF_HUB_OFFLINE": "1"}, "org/model")
    assert kind == "error"
    assert text == "org/model: not wholly in the hub's cache, and HF_HUB_OFFLINE forbids the download: unset it"
    # Port 1 of loopback answers nobody.
    [[kind, text]] = resolve(environment | {"HF_ENDPOINT": "http://127.0.0.1:1"}, "org/model")
    assert kind == "error"
    assert text.endswith("and http://127.0.0.1:1 cannot be reached: connect and try again")


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full: make room in "),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), "/x/y: Permission denied; name another folder in"),
        (RevisionResolutionError("what is main?"), "not wholly in the hub's cache, and "),
        (OSError("Consistency check failed: size 3\nplease"), "the download broke off (Consistency check failed: size"),
    ],
)
def test_faults_of_the_disk(fault, expected):
    with pytest.raises(UserError) as error:
        names._raise_user_error(fault, "org/model", None)
    assert str(error.value).startswith(f"org/model: {expected}")
    assert "\n" not in str(error.value)


def test_a_fault_of_the_program_stays_one():
    with pytest.raises(ValueError, match="unheard of"):
        names._raise_user_error(ValueError("unheard of"), "org/model", None)


def test_a_token_that_is_not_ascii(hub, environment):
    hub.repositories["org/m"] = Repository(dict(MODEL))
    [[kind, text]] = resolve(environment | {"HF_TOKEN": "hf_é"}, "org/m")
    assert kind == "error" and "token holds letters that no token has: correct HF_TOKEN" in text
