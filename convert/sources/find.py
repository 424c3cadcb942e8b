"""From what a person names to a checkpoint on this disk: a path, the demo model, an alias, or files of the hub.

Of a repository only one set of weights is fetched, with what belongs to it, in the order in which `open_source` looks.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from convert.gguf.split_files import PART
from convert.sources.demo_gguf import demo_gguf
from mlx_llama3.errors import UserError
from mlx_llama3.system.hub import ALIASES, DEMO, HUB_ID, MODEL_FILE, download, list_files, local_path, resolve

# `org/name/file.gguf`, `org/name/folder/file.gguf`, `org/name/original`; the revision stands behind the repository.
_IN_REPOSITORY = re.compile(
    r"(?P<repository>[\w.-]+/[\w.-]+?)(?:@(?P<revision>refs/pr/\d+|[\w.-]+))?/(?P<part>original|.+\.gguf)", re.ASCII
)
_COMPANIONS = ("*.json", "tokenizer.model", "merges.txt", "*.jinja", "LICENSE*", "USE_POLICY*", "NOTICE*")
# Sets of weights in the order of preference: the file that must be beside them, patterns of theirs, and of others'.
_SETS = (
    ("config.json", "*.safetensors", ("consolidated*", "adapter_model*", "adapters*")),
    ("config.json", "pytorch_model*.bin", ()),
    ("params.json", "consolidated*.safetensors", ()),
    ("params.json", "consolidated*.pth", ()),
)
_SHOWN = 12


def find_source(
    name: str | Path, on_progress: Callable[[int, int], None] | None = None, *, progress: bool = True
) -> Path:
    """Return the local path of the checkpoint called `name`, for `open_source`; what is not here yet is fetched.

    Args:
        name: a folder or `.gguf` file; `demo`; an alias (`hub.ALIASES`); or a repository of the hub `org/name`, with
            `@revision` if a branch, tag or commit is meant, and with `/original` for Meta's files in it or
            `/file.gguf` for one of several. Aliases win over paths, paths over the hub.
        on_progress: as for `hub.resolve`.
        progress: show the progress of a download, if standard error is a terminal.

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
    # What looks like a path is never looked up on the hub.
    if match and not name.startswith(".") and not Path(match["repository"]).is_dir():
        repository, revision, part = match["repository"], match["revision"], match["part"]
    elif HUB_ID.fullmatch(wanted) and not name.startswith(".") and not MODEL_FILE.search(wanted):
        repository, _, revision = wanted.partition("@")
        part = None
    elif "/" in name or MODEL_FILE.search(name):
        raise UserError(f"{name}: no such file or folder")
    else:
        return resolve(name)  # which tells the names that are known
    commit, names = list_files(repository, revision or None)
    files, place = _choose(f"{repository}@{revision}" if revision else repository, names, part)
    return download(repository, commit, files, on_progress, progress=progress) / place


def _choose(title: str, names: Sequence[str], part: str | None) -> tuple[list[str], str]:
    """The files to fetch, and which file or folder among them `open_source` shall be given."""
    if part and part != "original":
        return _gguf(title, names, part), part
    for place in ("original",) if part else (".", "original"):
        if files := _weights(names, place):
            return [*files, *_matching(names, place, _COMPANIONS)], place
    models = {_first_part(name) for name in names if name.endswith(".gguf") and not _is_companion(name)}
    if part or not models:
        found = "no original/ with Meta's params.json and consolidated files" if part else "no weights that are read"
        raise UserError(f"{title}: holds {found} (its files: {_listed(names)})")
    if len(models) > 1:
        raise UserError(
            f"{title}: holds {len(models)} GGUF models; name one, as in {title}/{min(models)}: "
            f"{', '.join(sorted(models))}"
        )
    (model,) = models
    return _gguf(title, names, model), model


def _weights(names: Sequence[str], place: str) -> list[str]:
    for beside, pattern, others in _SETS:
        found = _matching(names, place, [pattern])
        found = [name for name in found if not any(fnmatchcase(PurePosixPath(name).name, other) for other in others)]
        if found and _matching(names, place, [beside]):
            return found
    return []


def _matching(names: Iterable[str], place: str, patterns: Sequence[str]) -> list[str]:
    """The files in the folder `place` itself whose names match a pattern."""
    paths = [(name, PurePosixPath(name)) for name in names]
    here = [(name, path.name) for name, path in paths if path.parent == PurePosixPath(place)]
    return [name for name, last in here if any(fnmatchcase(last, pattern) for pattern in patterns)]


def _gguf(title: str, names: Sequence[str], wanted: str) -> list[str]:
    """A GGUF file, with the other parts if it is split."""
    if wanted not in names:
        others = [name for name in names if name.endswith(".gguf")]
        raise UserError(f"{title}: has no {wanted} (its GGUF files: {_listed(others)})")
    return [name for name in names if name.endswith(".gguf") and _first_part(name) == _first_part(wanted)]


def _first_part(name: str) -> str:
    path = PurePosixPath(name)
    match = PART.fullmatch(path.name)
    return str(path.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf")) if match else name


def _is_companion(name: str) -> bool:
    """Whether a GGUF file is an image encoder or an importance matrix, which lie beside models."""
    return PurePosixPath(name).name.startswith(("mmproj", "imatrix"))


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
    return (", ".join(names[:_SHOWN]) or "none") + more
