"""From a model's name to a local folder: an existing folder, an alias, or a repository of the Hugging Face hub.

The `huggingface_hub` client does the work (cache, progress, offline mode, tokens). This file selects the files to
download, and turns the client's errors into messages of one line.
"""

import errno
import glob
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from mlx_llama3.errors import UserError

DEMO = "demo"
# Incremented when the converter writes the demo model differently; the old folder is then no longer used.
DEMO_FORMAT = 1

ALIASES = {
    "llama3.2-1b": "mlx-community/Llama-3.2-1B-Instruct-4bit",
    "llama3.2-3b": "mlx-community/Llama-3.2-3B-Instruct-4bit",
    "llama3.1-8b": "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit",
    "llama3.3-70b": "mlx-community/Llama-3.3-70B-Instruct-4bit",
}

MODEL_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
# The model is at the top of its repository. Folders hold other formats of it (`original/`, `onnx/`), and Meta's
# consolidated file would be a second copy of the safetensors shards.
EXCLUDED_PATTERNS = ["*/*", "consolidated*"]

# Weights that the converter reads, in the order in which an error message suggests them.
CONVERTIBLE = [
    (r"^original/", "Meta's own files"),
    (r"^consolidated.*\.(pth|safetensors)$", "Meta's own files"),
    (r"\.(?i:gguf)$", "GGUF files"),
    (r"^pytorch_model.*\.bin$", "PyTorch files"),
]

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", re.ASCII)
MODEL_FILE = re.compile(r"\.(gguf|safetensors|pth|bin)$", re.IGNORECASE)


def cache_dir() -> Path:
    """Return this project's cache folder (it need not exist): `MLX_LLAMA3_CACHE`, or the platform's default."""
    if chosen := os.environ.get("MLX_LLAMA3_CACHE"):
        return Path(chosen).expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mlx-llama3"
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification says to ignore relative paths.
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "mlx-llama3"


def demo_folder() -> Path:
    """Return the path of the converted demo model, which need not exist yet."""
    return cache_dir() / f"SmolLM2-135M-Instruct-v{DEMO_FORMAT}"


def resolve(name: str | Path, on_progress: Callable[[int, int], None] | None = None) -> Path:
    """Return the local folder that holds the model called `name`.

    Args:
        name: `demo`; an alias (`ALIASES`); a local folder; or a hub id `organisation/name`, with `@revision` for a
            branch, tag or commit. An alias wins over a folder of the same name (`./demo` is the folder), and a folder
            wins over a hub id. Files that are not in the hub's cache yet are downloaded.
        on_progress: called with (bytes so far, all known bytes) during a download, from other threads, one at a
            time.

    Raises:
        UserError: no such folder, alias or repository; no access; no network; no weights that this project can read.
    """
    name = str(name)
    if name == DEMO:
        return _existing_demo()
    if name in ALIASES:
        return _download(ALIASES[name], None, on_progress)
    if path := local_path(name):
        if path.is_dir():
            return path
        raise UserError(f"{name}: a file, not a model folder: `mlx-llama3 convert {name} FOLDER` makes one of it")
    if HUB_ID.fullmatch(name) and not name.startswith(".") and not MODEL_FILE.search(name):
        repository, _, revision = name.partition("@")
        return _download(repository, revision or None, on_progress)
    if "/" in name or name.startswith((".", "~")) or MODEL_FILE.search(name):
        raise UserError(f"{name}: there is no such folder")
    raise UserError(
        f"{name!r} is no known model: use {DEMO}, {', '.join(ALIASES)}, a hub id such as {ALIASES['llama3.2-1b']},"
        " or a folder"
    )


def local_path(name: str) -> Path | None:
    """Return the existing folder or file called `name`, or None. Raises `UserError` for an impossible path."""
    if not name:
        return None  # `Path("")` would be the current folder
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError) as error:  # too long, not permitted, or the home of an unknown user
        raise UserError(f"{name:.100}: there can be no such folder: {getattr(error, 'strerror', error)}") from error


def list_files(repository: str, revision: str | None) -> tuple[str, list[str]]:
    """Return the commit of `revision` (None: the newest), and the names of all its files.

    Both come from the hub's cache if it has them. Without a network the names are those in the cache, where another
    program may have put the model without a listing. Raises `UserError` as `resolve` does.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants, get_cached_repo_tree, list_repo_files, resolve_revision
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, HfHubHTTPError, HTTPError, RevisionResolutionError

    with _user_errors(repository, revision):
        try:
            commit = resolve_revision(repository, revision=revision, local_files_only=True).resolved
            return commit, [file.path for file in get_cached_repo_tree(repository, revision=commit)]
        except (RevisionResolutionError, CachedRepoTreeNotFoundError):
            # Asked first, because the client prints a warning where it cannot ask the hub.
            if constants.HF_HUB_OFFLINE and (cached := _cached_files(repository, revision)):
                return cached
            try:
                commit = resolve_revision(repository, revision=revision).resolved
                return commit, list_repo_files(repository, revision=commit)
            except (HTTPError, OSError, RevisionResolutionError) as error:
                cached = None if isinstance(error, HfHubHTTPError) else _cached_files(repository, revision)
                if cached is None:
                    raise
                return cached


def _cached_files(repository: str, revision: str | None) -> tuple[str, list[str]] | None:
    """As `list_files`, of the files that the hub's cache holds; None if it has none of this revision."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder.name, [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def download(
    repository: str,
    commit: str,
    files: Sequence[str],
    on_progress: Callable[[int, int], None] | None = None,
    *,
    progress: bool = True,
) -> Path:
    """Download `files` of a commit (both as from `list_files`); return their folder in the hub's cache.

    `on_progress` as for `resolve`; `progress` shows bars on a terminal. Raises `UserError` as `resolve` does.
    """
    # The client expects patterns, so names are escaped.
    selection = {"revision": commit, "allow_patterns": [glob.escape(name) for name in files]}
    with _user_errors(repository, commit):
        return _snapshot(repository, selection, on_progress, progress)


def cached_repository(path: Path) -> tuple[str, str] | None:
    """Return the repository and commit of a path in the hub's cache; None for any other path."""
    match = re.search(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})(?:/|$)", path.absolute().as_posix())
    return (f"{match[1]}/{match[2]}", match[3]) if match else None


def _existing_demo() -> Path:
    folder = demo_folder()
    if not folder.is_dir():
        raise UserError("the demo model has not been made yet: run `mlx-llama3 chat` or `convert.demo.demo_model()`")
    return folder


def _download(repository: str, revision: str | None, on_progress: Callable[[int, int], None] | None) -> Path:
    selection = {"revision": revision, "allow_patterns": MODEL_PATTERNS, "ignore_patterns": EXCLUDED_PATTERNS}
    with _user_errors(repository, revision):
        folder = _snapshot(repository, selection, on_progress)
    if not any(folder.glob("*.safetensors")):
        _raise_missing_weights(repository, revision)
    return folder


def _snapshot(
    repository: str, selection: dict, on_progress: Callable[[int, int], None] | None, progress: bool = True
) -> Path:
    """Return the repository's snapshot in the hub's cache; download what is missing from it.

    A complete snapshot is used without a request to the hub: starting is faster, and the hub learns nothing.
    `hf download` fetches a newer one.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download  # here, because this import is slower than all others together

    folder = _complete_snapshot(repository, selection)
    if folder is None:
        with _bars(on_progress, progress) as bar_class:
            folder = Path(snapshot_download(repository, tqdm_class=bar_class, **selection))
    return folder


@contextmanager
def _user_errors(repository: str, revision: str | None) -> Iterator[None]:
    """Turn the hub client's errors into `UserError`."""
    from huggingface_hub.errors import HTTPError, RevisionResolutionError

    try:
        yield
    except (HTTPError, OSError, ValueError, RevisionResolutionError) as error:
        _raise_user_error(error, repository, revision)


@contextmanager
def _bars(on_progress: Callable[[int, int], None] | None, progress: bool) -> Iterator[type]:
    """Yield a class for the client's progress bars; close them at the end. `on_progress`: see `resolve`.

    The bars are shown on a terminal if `progress`. The client itself leaves two of them open, which would draw
    themselves into the chat once more when they are garbage-collected.
    """
    from huggingface_hub.utils import tqdm

    bars = []
    lock = threading.Lock()

    class Bar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            # None disables a bar unless standard error is a terminal. The client sets it for some of its bars only.
            options["disable"] = options.get("disable") or None if progress else True
            super().__init__(*args, **options)
            self.counts_bytes, self.count = options.get("unit") == "B", 0
            bars.append(self)

        def update(self, n: float | None = 1) -> bool | None:
            with lock:  # called from one thread per file
                self.count += n or 0  # tqdm does not count in a disabled bar
                if on_progress is not None and self.counts_bytes:
                    # One bar counts the bytes from the network, one the bytes written, which may be more.
                    byte_bars = [bar for bar in bars if bar.counts_bytes]
                    on_progress(max(bar.count for bar in byte_bars), max(bar.total or 0 for bar in byte_bars))
            return super().update(n)

    try:
        yield Bar
    finally:
        for bar in reversed(bars):
            bar.close()


def _complete_snapshot(repository: str, selection: dict) -> Path | None:
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, LocalEntryNotFoundError

    try:
        # Without the cached file listing, which other programs may not have stored, the client cannot tell whether a
        # snapshot is complete.
        get_cached_repo_tree(repository, revision=selection["revision"])
        return Path(snapshot_download(repository, local_files_only=True, **selection))
    except (CachedRepoTreeNotFoundError, LocalEntryNotFoundError):
        return None


def _raise_user_error(error: Exception, repository: str, revision: str | None) -> NoReturn:
    """Raise the `UserError` for an error of the hub client; an unknown error is raised unchanged."""
    from huggingface_hub import constants, errors

    chain = [error, error.__cause__]
    status = next((link.response.status_code for link in chain if isinstance(link, errors.HfHubHTTPError)), None)
    match error:
        case errors.GatedRepoError():
            text = f"gated: accept its licence at {constants.ENDPOINT}/{repository}, then run `hf auth login`"
        case errors.RevisionNotFoundError():
            text = f"has no revision {revision!r}: leave @{revision} out for the newest"
        case errors.RepositoryNotFoundError():
            text = "neither a folder here nor a model on the hub: check the name; if private, run `hf auth login`"
        case errors.HFValidationError():
            text = f"no possible name on the hub: {str(error).splitlines()[0]}"
        case UnicodeEncodeError():
            text = "your access token holds letters that no token has: correct HF_TOKEN, or run `hf auth login`"
        case _ if status in (401, 403):
            text = "the hub refuses your access token: run `hf auth login` with one that may read this model"
        case _ if status is not None:
            text = f"the hub answers with status {status}: try again later"
        case _ if any(isinstance(link, errors.OfflineModeIsEnabled) for link in chain):
            text = "not wholly in the hub's cache, and HF_HUB_OFFLINE forbids the download: unset it"
        case errors.LocalEntryNotFoundError() | errors.RevisionResolutionError():
            text = f"not wholly in the hub's cache, and {constants.ENDPOINT} cannot be reached: connect and try again"
        case OSError(errno=errno.ENOSPC):
            text = f"the disk is full: make room in {constants.HF_HUB_CACHE}, or name another folder in HF_HOME"
        case OSError(errno=int(), strerror=str()):
            text = f"{error.filename or constants.HF_HUB_CACHE}: {error.strerror}; name another folder in HF_HOME"
        case errors.HTTPError() | OSError():
            text = f"the download broke off ({str(error).splitlines()[0]}): try again, whole files are kept"
        case _:
            raise error
    raise UserError(f"{repository}: {text}") from error


def _raise_missing_weights(repository: str, revision: str | None) -> NoReturn:
    """Raise the `UserError` for a repository without `*.safetensors` at its top; suggest a conversion if possible."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        names = [file.path for file in get_cached_repo_tree(repository, revision=revision)]
    except CachedRepoTreeNotFoundError:
        raise UserError(f"{repository}: its weights are not in the hub's cache: connect and try again") from None
    for pattern, description in CONVERTIBLE:
        if files := [name for name in names if re.search(pattern, name)]:
            raise UserError(
                f"{repository}: no safetensors but {description} ({files[0]}): "
                f"`mlx-llama3 convert {repository}{f'@{revision}' if revision else ''} FOLDER` makes a model of them"
            )
    raise UserError(f"{repository}: holds no weights that can be read here ({len(names)} files, no *.safetensors)")
