"""The models of the benchmarks, in the format of each engine, created once in a cache folder."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

# Llama 3.2 1B's widths: dim 2048, hidden_dim 8192, 32 heads, 8 KV heads.
WIDTHS_1B = {"dim": 2048, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.5, "multiple_of": 256}


def cache() -> Path:
    """The folder of the models, in the user's cache folder; a gigabyte in all."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mlx-llama3" / "benchmarks"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def demo() -> dict[str, Path]:
    """SmolLM2-135M: the GGUF file of the wheel, and its conversions."""
    from convert.demo import demo_model
    from convert.sources.demo_gguf import demo_gguf

    gguf, dense = demo_gguf(), cache() / "smollm2-dense"
    _convert(gguf, dense, "--dequantize", "--dtype", "float16")
    return {"folder": demo_model(), "gguf": gguf, "dense": dense}


def random_1b(layers: int) -> dict[str, Path]:
    """Random weights in 1B's widths with `layers` layers: bfloat16, 4 bits in groups of 64, and GGUF (Q4_1)."""
    folder = cache() / f"random-1b-{layers}-layers"
    dense, packed, gguf = folder / "dense", folder / "4bit", folder / "4bit.gguf"
    if not dense.exists():
        folder.mkdir(exist_ok=True)
        _write_meta(folder / "meta", layers)
        _convert(folder / "meta", dense)
        shutil.rmtree(folder / "meta")
    _convert(dense, packed, "--quantize", "4")
    _convert(dense, gguf, "--to", "gguf-q4_1")
    return {"folder": packed, "gguf": gguf, "dense": dense}


def n_weights(model: dict[str, Path]) -> int:
    """The number of weights in all matrices."""
    from mlx_llama3.checkpoint.folder import Checkpoint

    return Checkpoint(model["folder"]).n_weights


def for_engine(model: dict[str, Path], engine: str) -> Path:
    """The path of a model in the format that an engine reads."""
    return model[{"llama.cpp": "gguf", "transformers": "dense"}.get(engine, "folder")]


def _convert(source: Path, target: Path, *options: str) -> None:
    if target.exists():
        return
    print(f"making {target.name} ...", file=sys.stderr)
    command = [sys.executable, "-m", "app.cli", "convert", str(source), str(target), "--quiet", *options]
    subprocess.run(command, cwd=ROOT, check=True)


def _write_meta(folder: Path, layers: int) -> None:
    """Write a Meta checkpoint of random bfloat16 numbers, with Meta's tokenizer: llama.cpp needs all its tokens."""
    import llama_models
    from convert_memory import COMMON, write_checkpoint

    if folder.exists():  # incomplete, from an interrupted run
        shutil.rmtree(folder)
    params = WIDTHS_1B | COMMON | {"n_layers": layers}
    write_checkpoint(folder, params, 1, tied=True)
    tokenizer = Path(llama_models.__file__).parent / "llama3" / "tokenizer.model"
    shutil.copy(tokenizer, folder / "tokenizer.model")
    assert json.loads((folder / "params.json").read_text()) == params
