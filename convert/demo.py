"""The demo model, SmolLM2-135M-Instruct: fetched and converted once, then read from the user's cache folder."""

from pathlib import Path

from mlx_llama3.system.hub import demo_folder


def demo_model(progress: bool = True) -> Path:
    """Return the folder of the converted demo model; the first call fetches and converts it.

    Several processes may call it at once: one converts, the others wait. Later calls return at once and use neither
    MLX nor pip.

    Args:
        progress: show pip's and the converter's progress on the terminal.

    Raises:
        UserError: no pip and no uv; no network; a wrong SHA-256; a full disk; a cache folder that is not writable.
    """
    folder = demo_folder()
    if folder.is_dir():
        return folder
    # Imported here: both load MLX, which later calls do not need.
    from convert.conversion.to_mlx import convert
    from convert.sources.demo_gguf import cache_lock, demo_gguf

    gguf = demo_gguf(progress)
    with cache_lock():
        if not folder.is_dir():
            convert(gguf, folder, progress=progress)
    return folder
