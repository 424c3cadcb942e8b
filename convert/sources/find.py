"""Finds the checkpoint for a name: a local path, the demo model, an alias, or files downloaded from the hub.

From a repository only one set of weights is downloaded, with the files that belong to it. The sets are tried in the
order in which `open_source` looks for them.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from convert.gguf.split_files import PART, is_model_name
from convert.sources.demo_gguf import demo_gguf
from mlx_llama3.errors import UserError
from mlx_llama3.system.hub import ALIASES, DEMO, HUB_ID, MODEL_FILE, download, list_files, local_path, resolve

# `org/name/file.gguf`, `org/name/folder/file.gguf`, `org/name/original`; `@revision` follows the repository.
_IN_REPOSITORY = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+?)(?:@(?P<revision>refs/pr/\d+|[\w.-]+))?/(?P<part>original|.+\.(?i:gguf))",
    re.ASCII,
)
_COMPANIONS = ("*.json", "tokenizer.model", "merges.txt", "*.jinja", "LICENSE*", "USE_POLICY*", "NOTICE*")
# Sets of weights, best first: the file that must be beside them, the pattern of their names, patterns of other files
# that match it too.
_SETS = (
    ("config.json", "*.safetensors", ("consolidated*", "adapter_model*", "adapters*")),
    ("config.json", "pytorch_model*.bin", ()),
    ("params.json", "consolidated*.safetensors", ()),
    ("params.json", "consolidated*.pth", ()),
)
_MAX_LISTED = 12


def find_source(
    name: str | Path, on_progress: Callable[[int, int], None] | None = None, *, progress: bool = True
) -> Path:
    """Return the local path of the checkpoint called `name`, for `open_source`; download it if needed.

    Args:
        name: a folder or `.gguf` file; `demo`; an alias (`hub.ALIASES`); or a repository of the hub `org/name`. After
            it may follow `@revision` (a branch, tag or commit), then `/original` for Meta's files in it, or
            `/file.gguf` for one of several. Aliases win over paths, paths over the hub.
        on_progress: as for `hub.resolve`.
        progress: show the progress of a download on standard error, if that is a terminal.

    Raises:
        UserError: as `hub.resolve`; the repository holds no weights that the converter reads, or several models.
    """
    name = str(name)
    if name == DEMO:
        return demo_gguf(progress)
    if name not in ALIASES and (path := local_path(name)):
        return path
    wanted = ALIASES.get(name, name)
    match = _IN_REPOSITORY.fullmatch(wanted)
    # A name that looks like a path is never looked up on the hub.
    if match and not name.startswith(".") and not Path(match["repository"]).is_dir():
        repository, revision, part = match["repository"], match["revision"], match["part"]
    elif HUB_ID.fullmatch(wanted) and not name.startswith(".") and not MODEL_FILE.search(wanted):
        repository, _, revision = wanted.partition("@")
        part = None
    elif "/" in name or MODEL_FILE.search(name):
        raise UserError(f"{name}: no such file or folder")
    else:
        return resolve(name)  # its error lists the known names
    commit, names = list_files(repository, revision or None)
    files, place = _choose(f"{repository}@{revision}" if revision else repository, names, part)
    return download(repository, commit, files, on_progress, progress=progress) / place


def _choose(title: str, names: Sequence[str], part: str | None) -> tuple[list[str], str]:
    """The files to download, and the file or folder among them for `open_source`."""
    if part and part != "original":
        return _gguf(title, names, part), part
    for place in ("original",) if part else (".", "original"):
        if files := _weights(names, place):
            return [*files, *_matching(names, place, _COMPANIONS)], place
    models = {_first_part(name) for name in names if is_model_name(PurePosixPath(name).name)}
    if part or not models:
        missing = "no original/ with Meta's params.json and consolidated files" if part else "no weights that are read"
        raise UserError(f"{title}: holds {missing} (its files: {_listed(names)})")
    if len(models) > 1:
        raise UserError(
            f"{title}: holds {len(models)} GGUF models; name one, as in {title}/{min(models)}: "
            f"{', '.join(sorted(models))}"
        )
    (model,) = models
    return _gguf(title, names, model), model


def _weights(names: Sequence[str], place: str) -> list[str]:
    """The files of the best set of weights in the folder `place`; empty if there is none."""
    for beside, pattern, others in _SETS:
        matches = _matching(names, place, [pattern])
        weights = [name for name in matches if not any(fnmatchcase(PurePosixPath(name).name, p) for p in others)]
        if weights and _matching(names, place, [beside]):
            return weights
    return []


def _matching(names: Iterable[str], place: str, patterns: Sequence[str]) -> list[str]:
    """The files directly in the folder `place` whose names match a pattern."""
    paths = [(name, PurePosixPath(name)) for name in names]
    inside = [(name, path.name) for name, path in paths if path.parent == PurePosixPath(place)]
    return [name for name, file_name in inside if any(fnmatchcase(file_name, pattern) for pattern in patterns)]


def _gguf(title: str, names: Sequence[str], wanted: str) -> list[str]:
    """The GGUF file `wanted`, with all other parts if it is split."""
    if wanted not in names:
        others = [name for name in names if name.lower().endswith(".gguf")]
        raise UserError(f"{title}: has no {wanted} (its GGUF files: {_listed(others)})")
    return [name for name in names if name.lower().endswith(".gguf") and _first_part(name) == _first_part(wanted)]


def _first_part(name: str) -> str:
    """The first part of the split GGUF that `name` belongs to; `name` itself if it is not split."""
    path = PurePosixPath(name)
    match = PART.fullmatch(path.name)
    return str(path.with_name(f"{match['stem']}-00001-of-{match['count']}{match['suffix']}")) if match else name


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _MAX_LISTED} more" if names[_MAX_LISTED:] else ""
    return (", ".join(names[:_MAX_LISTED]) or "none") + more
