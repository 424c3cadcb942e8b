"""Whether a source changed while it was read: what was written from it would then be of no model at all."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from mlx_llama3.errors import UserError

# Size in bytes, and time of the last change in nanoseconds.
State = tuple[int, int]


def file_states(files: Iterable[Path]) -> Mapping[Path, State]:
    """The states of files now; the system's errors are passed on."""
    return {file: _state(file) for file in files}


def check_unchanged(before: Mapping[Path, State]) -> None:
    """Raise `UserError` if one of the files is not as it was, or gone."""
    for file, state in before.items():
        if not file.exists() or _state(file) != state:
            raise UserError(f"{file}: changed while it was read, so nothing was written; wait until it is complete")


def _state(file: Path) -> State:
    status = file.stat()
    return status.st_size, status.st_mtime_ns
