"""The demo model, SmolLM2-135M-Instruct: fetched and converted once, and kept in the user's cache folder."""

from pathlib import Path

from mlx_llama3.system.hub import demo_folder


def demo_model(progress: bool = True) -> Path:
    """Return the folder of the converted demo model; the first call fetches and converts it.

    Several processes may call it at once: one works, the others wait for it. Later calls return at once, without
    MLX and without pip.

    Args:
        progress: show pip's and the converter's progress on the terminal.

    Raises:
        UserError: neither pip nor uv is there, no network, a hash that differs, a cache folder that is full or closed.
    """
    folder = demo_folder()
    if folder.is_dir():
        return folder
    # These import MLX, which the later calls do without.
    from convert.conversion.to_mlx import convert
    from convert.sources.demo_gguf import cache_lock, demo_gguf

    gguf = demo_gguf(progress)
    with cache_lock():
        if not folder.is_dir():
            convert(gguf, folder, progress=progress)
    return folder
