"""What `--overwrite` replaces: the files of a model, as a conversion writes them. It never replaces its own source.

All else in a folder is the person's own (notes, adapters, `original/`) and is carried over into the new folder.
"""

import shutil
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from mlx_llama3.errors import UserError
from mlx_llama3.system.files import read_bytes

# What a conversion writes, and with it the whole set of weights that readers of model folders would load.
MODEL_FILES = (
    "config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "README.md",
    "LICENSE*", "USE_POLICY*", "NOTICE*", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja",
    "chat_template.json", "additional_chat_templates/*.jinja",
)  # fmt: skip
_FOLDERS = {pattern.partition("/")[0] for pattern in MODEL_FILES if "/" in pattern}


def carried_over(folder: Path) -> list[str]:
    """The names, relative to `folder`, of all that is not replaced; a folder without a model's files is one name."""
    return sorted(str(path.relative_to(folder)) for path in _others(folder))


def carry_over(old: Path, new: Path) -> None:
    """Move all that is not replaced from the folder `old` to `new`, then remove `old`.

    It may be called again after a process was killed in the middle of it.
    """
    for path in _others(old):
        place = new / path.relative_to(old)
        place.parent.mkdir(exist_ok=True)
        if not (place.exists() or place.is_symlink()):
            path.rename(place)
    shutil.rmtree(old)


def check_source_stays(files: Iterable[Path], target: Path) -> None:
    """Raise `UserError` if writing `target`, a folder or file, would replace one of a source's `files`."""
    place = target.resolve()
    for file in files:
        real = file.resolve()
        inside = real.relative_to(place) if real.is_relative_to(place) else None
        if inside is not None and (real == place or _is_replaced(inside)):
            raise UserError(f"{target}: its {real.name} is part of the source and would be lost; give another target")


def check_gguf_target(target: Path) -> None:
    """Raise `UserError` if `target` is a file that is not GGUF: its name may be a mistake."""
    if target.is_file() and read_bytes(target, 4) not in (b"", b"GGUF"):
        raise UserError(f"{target}: is no GGUF file, so it is not overwritten; give another target")


def _is_replaced(path: Path) -> bool:
    # fnmatch lets `*` match a slash too, so the depth is compared.
    return any(
        fnmatchcase(path.as_posix(), pattern) and len(path.parts) == pattern.count("/") + 1 for pattern in MODEL_FILES
    )


def _others(folder: Path) -> Iterator[Path]:
    for path in list(folder.iterdir()):
        if path.name in _FOLDERS and path.is_dir() and not path.is_symlink():
            yield from (inner for inner in list(path.iterdir()) if not _is_replaced(inner.relative_to(folder)))
        elif not _is_replaced(path.relative_to(folder)) or (path.is_dir() and not path.is_symlink()):
            yield path
