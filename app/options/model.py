"""From `--model` to a loaded model and its tokenizer, with a status line meanwhile."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from app.console import status_while
from convert.demo import demo_model
from mlx_llama3.api import load_folder
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.parallel.rank0 import this_rank0
from mlx_llama3.system.hub import DEMO, demo_folder, resolve
from mlx_llama3.tokenizer.tokenizer import Tokenizer


class OpenModel(NamedTuple):
    """A loaded model with its tokenizer, and the name to show for it."""

    name: str
    model: Transformer
    tokenizer: Tokenizer


def open_model(name: str) -> OpenModel:
    """Download a model if need be, and load it. Raises `UserError` if it is absent, broken or too large."""
    title, folder = find_model(name)
    with status_while(f"Loading {title} ..."):
        return load_found(title, folder)


def find_model(name: str, on_progress: Callable[[int, int], None] | None = None) -> tuple[str, Path]:
    """The name to show for a model, and its folder; downloads it if need be. on_progress: as for `resolve`."""
    folder = demo_model() if name == DEMO else resolve(name, on_progress)
    is_local = name == DEMO or folder == Path(name).expanduser()
    return folder.resolve().name if is_local else name, folder


def load_found(title: str, folder: Path) -> OpenModel:
    """Load the model of a folder, or this rank's part of it. Raises `UserError` if it is broken or too large."""
    rank0 = this_rank0()
    if rank0 is None:
        return OpenModel(title, *load_folder(folder))
    return OpenModel(title, *rank0.load(DEMO if folder == demo_folder() else title, folder))
