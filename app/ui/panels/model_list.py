"""Which models there are on this machine, and how much memory one needs before it is loaded."""

from pathlib import Path

from app.ui.html import size
from app.ui.session.saved_conversations import data_dir
from mlx_llama3.checkpoint.folder import Checkpoint
from mlx_llama3.checkpoint.tensor_shapes import count_weights
from mlx_llama3.errors import UserError
from mlx_llama3.system.hub import ALIASES, DEMO, HUB_ID, demo_folder
from mlx_llama3.system.memory import available_memory

import mlx.core as mx


def models_dir() -> Path:
    """The folder (it need not exist) for models that are converted in the app."""
    return data_dir() / "models"


def choices() -> list[tuple[str, str]]:
    """(label, name) of the demo, what was converted here, what lies in the hub's cache, and the aliases."""
    found = [("demo · SmolLM2 135M", DEMO)]
    found += [(path.name, str(path)) for path in sorted(models_dir().glob("*/config.json")) for path in [path.parent]]
    cached = _cached()
    found += [(name, name) for name in cached]
    return found + [(f"{alias} · download", alias) for alias, name in ALIASES.items() if name not in cached]


def estimate(name: str) -> str:
    """One sentence: the memory that a model needs, beside what there is. Reads headers only; asks no network."""
    folder = _local(name)
    if folder is None:
        if name == DEMO:
            return "Load fetches it (93 MB)"
        return (
            "not on this machine: Load downloads it" if HUB_ID.fullmatch(ALIASES.get(name, name)) else "no such model"
        )
    try:
        weights, cache = needs(folder)
    except UserError as error:
        return str(error)
    return (
        f"needs about {size(weights)}, and {size(cache)} for a full context; {size(available_memory())} are available"
    )


def needs(folder: Path) -> tuple[int, int]:
    """Bytes of a model's weights in memory, and of the keys and values of a full context.

    Raises `UserError` if the folder is no model folder.
    """
    checkpoint = Checkpoint(folder)
    args = checkpoint.args
    width, weights = checkpoint.dtype.size, checkpoint.nbytes
    if mx.default_device() == mx.cpu:  # where weights are unpacked to float32, as `load_model` says
        width = mx.float32.size
        weights = width * count_weights(args)
    return weights, 2 * args.n_layers * args.n_kv_heads * args.head_dim * args.max_seq_len * width


def _local(name: str) -> Path | None:
    """The folder of a model that is here already."""
    if name == DEMO:
        return demo_folder() if demo_folder().is_dir() else None
    name = ALIASES.get(name, name)
    folder = Path(name).expanduser()
    return folder if folder.exists() else _cached().get(name)


def _cached() -> dict[str, Path]:
    """Snapshots in the hub's cache that hold safetensors of a Llama architecture, by repository."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return {}
    found = {}
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        for revision in sorted(repository.revisions, key=lambda each: each.last_modified):
            if repository.repo_type == "model" and _is_llama(revision.snapshot_path):
                found[repository.repo_id] = revision.snapshot_path
    return found


def _is_llama(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.is_file() or not any(folder.glob("*.safetensors")):
        return False
    return '"llama"' in config.read_text(encoding="utf-8", errors="replace")
