"""Recognises what a path holds and opens it with the right reader."""

from pathlib import Path

from convert.gguf import open_gguf
from convert.huggingface import open_huggingface, weight_files
from convert.meta import is_meta_folder, open_meta
from convert.source import Source
from mlx_llama3.errors import UserError

_SHOWN = 6


def open_source(path: Path | str, *, rope_factor: float | None = None, exact_scales: bool = False) -> Source:
    """Open a checkpoint of any known kind: a `.gguf` file, or a folder of Meta's, of Hugging Face's or of MLX's.

    `rope_factor` is for Meta's checkpoints alone (`meta.open_meta`), `exact_scales` for GGUF (`gguf.open_gguf`).
    UserError says what was found if it is none of these.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.is_file():
        if path.suffix == ".gguf":
            return open_gguf(path, exact_scales=exact_scales)
        raise UserError(f"{path}: give the folder that holds it, or a .gguf file")
    if (path / "config.json").exists() and weight_files(path):
        return open_huggingface(path)
    for folder in (path, path / "original"):
        if folder.is_dir() and is_meta_folder(folder):
            return open_meta(folder, rope_factor=rope_factor)
    if any(path.glob("*.gguf")):
        return open_gguf(path, exact_scales=exact_scales)
    raise UserError(f"{path}: no checkpoint: {_missing(path)}")


def _missing(folder: Path) -> str:
    """What there is, and what would have been needed."""
    names = sorted(path.name for path in folder.iterdir())
    if (folder / "config.json").exists():
        return "config.json is there, but no model*.safetensors and no pytorch_model*.bin"
    if any(name.startswith("consolidated") for name in names):
        return "consolidated files are there, but no params.json"
    if any(name.endswith((".safetensors", ".bin")) for name in names):
        return "weights are there, but no config.json"
    shown = ", ".join(names[:_SHOWN]) + (" ..." if names[_SHOWN:] else "")
    return (
        f"found {shown or 'nothing'}; expected params.json with consolidated.*.pth, or config.json with "
        "model*.safetensors, or a .gguf file"
    )
