"""The models on this machine, and the memory that one needs, estimated before it is loaded."""

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
    """The folder for models that were converted in the app; it may not exist."""
    return data_dir() / "models"


def choices() -> list[tuple[str, str]]:
    """(label, name) of the demo model, the models converted here, those in the hub's cache, and the aliases."""
    models = [("demo · SmolLM2 135M", DEMO)]
    models += [(path.name, str(path)) for path in sorted(models_dir().glob("*/config.json")) for path in [path.parent]]
    cached = _cached()
    models += [(name, name) for name in cached]
    return models + [(f"{alias} · download", alias) for alias, name in ALIASES.items() if name not in cached]


def estimate(name: str) -> str:
    """A sentence on the memory that a model needs and that is available. Reads file headers only; no network."""
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
    """(bytes of a model's weights in memory, bytes of the key-value cache of a full context).

    Raises `UserError` if the folder is not a model folder.
    """
    checkpoint = Checkpoint(folder)
    args = checkpoint.args
    width, weights = checkpoint.dtype.size, checkpoint.nbytes
    if mx.default_device() == mx.cpu:  # `load_model` dequantizes to float32 there
        width = mx.float32.size
        weights = width * count_weights(args)
    return weights, 2 * args.n_layers * args.n_kv_heads * args.head_dim * args.max_seq_len * width


def _local(name: str) -> Path | None:
    """The folder of a model that is on this machine; None if it is not."""
    if name == DEMO:
        return demo_folder() if demo_folder().is_dir() else None
    name = ALIASES.get(name, name)
    folder = Path(name).expanduser()
    return folder if folder.exists() else _cached().get(name)


def _cached() -> dict[str, Path]:
    """Repository -> snapshot in the hub's cache, for Llama models in safetensors; the newest snapshot of each."""
    from huggingface_hub import CacheNotFound, constants, scan_cache_dir

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return {}
    snapshots = {}
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        for revision in sorted(repository.revisions, key=lambda revision: revision.last_modified):
            if repository.repo_type == "model" and _is_llama(revision.snapshot_path):
                snapshots[repository.repo_id] = revision.snapshot_path
    return snapshots


def _is_llama(folder: Path) -> bool:
    config = folder / "config.json"
    if not config.is_file() or not any(folder.glob("*.safetensors")):
        return False
    return '"llama"' in config.read_text(encoding="utf-8", errors="replace")
