"""`python matrix_program.py OUT FOLDER...`: the logits of each folder's model with each cache and set of kernels.

Writes them to OUT (safetensors), by `FOLDER'S NAME|CACHE|KERNELS`; prints the fused kernels that ran, as JSON.
"""

import json
import sys
from pathlib import Path

import mlx_llama3  # first: it puts a fast BLAS in place before MLX is loaded  # noqa: F401
from mlx_llama3.checkpoint.loading import load_model
from mlx_llama3.generation.decoding import prefill
from mlx_llama3.model.cache.settings import CacheSettings
from mlx_llama3.model.kernels.kernel_set import FUSED, REFERENCE, Kernels
from mlx_llama3.model.transformer import Transformer
from tests.mac.compute import kernel_calls

import mlx.core as mx

PROMPT = [(17 * i * i + 3 * i) % 40_000 for i in range(200)]  # longer than what a quantized cache leaves unpacked
FORCED = [5, 17, 200, 3]
CACHES = {
    "plain": CacheSettings(),
    "8 bits": CacheSettings(kv_bits=8),
    "4 bits": CacheSettings(kv_bits=4),
    "rotating": CacheSettings(max_kv_size=100),
}


def logits(model: Transformer, settings: CacheSettings, kernels: Kernels) -> mx.array:
    """The logits after the prompt and after each forced token, float32 `(5, vocab)`."""
    model.use(kernels)
    cache = model.make_cache(settings)
    rows = [prefill(model, PROMPT, cache, chunk=64).reshape(1, -1)]
    for i, token in enumerate(FORCED):
        rows.append(model(mx.array([[token]]), len(PROMPT) + i, cache)[:, -1])
    return mx.concatenate(rows).astype(mx.float32)


def main(out: Path, folders: list[Path]) -> None:
    found, ran = {}, {}
    sets = {"references": REFERENCE, "fused": FUSED} if mx.metal.is_available() else {"references": REFERENCE}
    for folder in folders:
        model = load_model(folder)
        for cache, settings in CACHES.items():
            for kernels, chosen in sets.items():
                before = kernel_calls()
                found[f"{folder.name}|{cache}|{kernels}"] = logits(model, settings, chosen)
                mx.eval(found)
                calls = kernel_calls()
                ran[f"{folder.name}|{cache}|{kernels}"] = sorted(
                    name for name in calls if calls[name] > before.get(name, 0)
                )
    mx.save_safetensors(str(out), found)
    print(json.dumps(ran))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
