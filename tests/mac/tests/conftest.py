"""Programs under the stand-in, and a tiny model with the demo model's tokenizer that every fused kernel serves."""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import quantized, random_weights, tiny_args

from mlx_llama3.checkpoint.config_json import to_hf
from tests.mac.imports import ROOT
from tests.mac.start import HOOK, VARIABLE
from tests.metal_harness.host import unsupported

import mlx.core as mx

WHY_NOT = unsupported(sys.platform, platform.machine())
PROGRAMS = Path(__file__).parent


@pytest.fixture(autouse=True)
def on_linux() -> None:
    """The kernels run in the harness, and only a system that is no Mac needs a stand-in."""
    if WHY_NOT:
        pytest.skip(WHY_NOT)


def on_a_mac(mode: str, *arguments: object, **options: object) -> subprocess.CompletedProcess:
    """Run Python with these arguments under the stand-in; `options`: of `subprocess.run`, variables in `env`."""
    environment = os.environ | {VARIABLE: mode, "PYTHONPATH": HOOK} | options.pop("env", {})
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, **options)


@pytest.fixture(scope="session")
def folder_of(demo_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """From a dtype's name to the folder of a 4-bit model of two layers, with scales and norms in it; always the same
    weights."""
    args = tiny_args(dim=128, hidden_dim=256, head_dim=64, n_layers=2, vocab_size=49152)
    packed = quantized(random_weights(args))

    def folder(dtype: str) -> Path:
        target = tmp_path_factory.mktemp("model") / dtype
        target.mkdir()
        for file in demo_folder.iterdir():
            if file.suffix in (".json", ".txt", ".jinja") and file.name != "config.json":
                shutil.copy(file, target)
        settings = {"quantization": {"bits": 4, "group_size": 32}}
        config = json.loads((demo_folder / "config.json").read_text())
        ends = {key: config[key] for key in ("eos_token_id", "bos_token_id") if key in config}
        (target / "config.json").write_text(json.dumps(to_hf(replace(args)) | settings | ends))
        typed = {
            name: w.astype(getattr(mx, dtype)) if mx.issubdtype(w.dtype, mx.floating) else w
            for name, w in packed.items()
        }
        mx.save_safetensors(str(target / "model.safetensors"), typed, {"format": "mlx"})
        return target

    folders: dict[str, Path] = {}
    return lambda dtype: folders.get(dtype) or folders.setdefault(dtype, folder(dtype))
