"""The demo model in the cache folder: converted once, then found without pip and MLX."""

import subprocess
import sys

from mlx_llama3.system import hub


def test_the_converted_model(demo_folder):
    assert {"config.json", "tokenizer.json"} <= {path.name for path in demo_folder.iterdir()}
    assert any(demo_folder.glob("*.safetensors"))
    assert hub.resolve("demo") == demo_folder


def test_a_made_model_costs_neither_pip_nor_mlx(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_LLAMA3_CACHE", str(tmp_path / "cache"))
    hub.demo_folder().mkdir(parents=True)
    script = (
        "import subprocess, sys; subprocess.run = None\n"
        "from convert.demo import demo_model\n"
        "print(demo_model())\n"
        "print(*{'mlx', 'numpy', 'huggingface_hub', 'tiktoken'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == f"{hub.demo_folder()}\n\n"
