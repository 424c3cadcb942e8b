"""Recognises the kind of checkpoint at a path and opens it with its reader."""

from collections.abc import Callable
from pathlib import Path

from convert.gguf.split_files import is_gguf, is_model_name
from convert.sources.gguf import open_gguf
from convert.sources.huggingface import open_huggingface, weight_files
from convert.sources.meta import is_meta_folder, open_meta
from convert.sources.source import Source
from convert.storage.staged_folder import disk_errors_told
from mlx_llama3.checkpoint.folder import adapter_hint, misnamed_hint
from mlx_llama3.errors import UserError

_MAX_LISTED = 6


def open_source(path: Path | str, *, rope_factor: float | None = None, exact_scales: bool = False) -> Source:
    """Open a checkpoint of any known kind: a `.gguf` file, or a folder of Meta, Hugging Face or MLX format.

    `rope_factor` is only for Meta's checkpoints (`meta.open_meta`), `exact_scales` only for GGUF (`gguf.open_gguf`).
    Raises `UserError` if an option is not for this kind, or if the path holds no checkpoint.
    """
    with disk_errors_told(Path(path)):
        return _open(Path(path), rope_factor, exact_scales)


def _open(path: Path, rope_factor: float | None, exact_scales: bool) -> Source:
    opener, location = _recognised(path)
    if rope_factor is not None and opener is not open_meta:
        raise UserError(f"{path}: --rope-factor is for Meta's checkpoints; this one states its own, leave it out")
    if exact_scales and opener is not open_gguf:
        raise UserError(f"{path}: --exact-scales is for GGUF files; leave it out")
    if opener is open_meta:
        return open_meta(location, rope_factor=rope_factor)
    return open_gguf(location, exact_scales=exact_scales) if opener is open_gguf else open_huggingface(location)


def _recognised(path: Path) -> tuple[Callable[..., Source], Path]:
    """The reader for `path`, and the file or folder to give it."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.is_file():
        if is_gguf(path):
            return open_gguf, path
        raise UserError(f"{path}: give the folder that holds it, or a .gguf file")
    if (path / "config.json").exists() and weight_files(path):
        return open_huggingface, path
    for folder in (path, path / "original"):
        if folder.is_dir() and is_meta_folder(folder):
            return open_meta, folder
    if any(is_model_name(file.name) for file in path.iterdir()):
        return open_gguf, path
    raise UserError(f"{path}: no checkpoint: {_missing(path)}")


def _missing(folder: Path) -> str:
    """For a message: what the folder holds, and what is missing."""
    names = sorted(path.name for path in folder.iterdir())
    if (folder / "config.json").exists():
        missing = "config.json is there, but no model*.safetensors and no pytorch_model*.bin"
        hint = adapter_hint(folder) or misnamed_hint(folder)
        return f"{missing}; {hint}" if hint else missing
    if hint := adapter_hint(folder):
        return hint
    if any(name.startswith("consolidated") for name in names):
        return "consolidated files are there, but no params.json"
    if any(name.endswith((".safetensors", ".bin")) for name in names):
        return "weights are there, but no config.json"
    listed = ", ".join(names[:_MAX_LISTED]) + (" ..." if names[_MAX_LISTED:] else "")
    return (
        f"found {listed or 'nothing'}; expected params.json with consolidated.*.pth, or config.json with "
        "model*.safetensors, or a .gguf file"
    )
