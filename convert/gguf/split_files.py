"""GGUF models in one file, or split into parts `NAME-00001-of-00003.gguf`; which files of a folder are models."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from convert.gguf.reader import MAGIC, GGUFError, GGUFHeader, GGUFTensor, read_header
from mlx_llama3.system.files import read_bytes

PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


def is_model_name(name: str) -> bool:
    """Whether a file's name is that of a GGUF model: no image encoder or importance matrix, and no `._` of a Mac's."""
    return name.lower().endswith(".gguf") and not name.lower().startswith((".", "mmproj", "imatrix"))


def is_gguf(path: Path) -> bool:
    """Whether a file is GGUF, by its name or its first bytes: Ollama calls it `sha256-` and 64 digits."""
    return path.suffix.lower() == ".gguf" or read_bytes(path, len(MAGIC)) == MAGIC


@dataclass(frozen=True)
class GGUFModel:
    """All parts of one model as if they were one file, with the metadata of the first part."""

    files: tuple[Path, ...]
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def read_gguf(path: Path) -> GGUFModel:
    """Read the headers of a model: `path` is a GGUF file, any part of a split one, or a folder that holds one model.

    Raises:
        GGUFError: the folder holds no model or several; parts are missing or of different models; a file is damaged.
    """
    files = _parts(_choose(path))
    headers = [read_header(file) for file in files]
    for number, header in enumerate(headers):
        _check_part(header, number, len(headers))
    tensors: dict[str, GGUFTensor] = {}
    for header in headers:
        for name in header.tensors.keys() & tensors.keys():
            raise GGUFError(f"{header.path}: tensor {name!r} is in {tensors[name].path.name} too; parts of two models?")
        tensors |= header.tensors
    stated = headers[0].metadata.get("split.tensors.count", len(tensors))
    if stated != len(tensors):
        raise GGUFError(f"{files[0]}: split.tensors.count is {stated!r:.60}, the parts hold {len(tensors)} tensors")
    return GGUFModel(files, headers[0].metadata, tensors)


def _choose(path: Path) -> Path:
    if not path.is_dir():
        return path
    files = sorted(file for file in path.iterdir() if is_model_name(file.name))
    models = {match["stem"] if (match := PART.fullmatch(file.name)) else file.name: file for file in files}
    if not models:
        raise GGUFError(f"{path}: no .gguf file in this folder")
    if len(models) > 1:
        raise GGUFError(f"{path}: several models ({', '.join(models)}); name one of the files")
    return files[0]


def _parts(path: Path) -> tuple[Path, ...]:
    match = PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise GGUFError(f"{path}: part {int(match['number'])} of {count} cannot be; rename the file")
    parts = tuple(
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}{match['suffix']}") for number in range(1, count + 1)
    )
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise GGUFError(f"{path.parent}: missing {', '.join(missing)}; download all {count} parts into this folder")
    return parts


def _check_part(header: GGUFHeader, number: int, count: int) -> None:
    stated = header.metadata.get("split.count", 0)
    if stated != count and not (stated == 0 and count == 1):
        raise GGUFError(
            f"{header.path}: split.count is {stated!r:.60}, its name says {count}; keep the name it was given"
        )
    if header.metadata.get("split.no", number) != number:
        raise GGUFError(
            f"{header.path}: split.no is {header.metadata['split.no']!r:.60}, its name says part {number + 1}"
        )
