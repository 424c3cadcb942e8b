"""LoRA adapters for the tiny models: in PEFT's format, and made by mlx-lm's own layers."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx_lm.utils import load_model as peer_load_model


def mlx_adapter(
    folder: Path, adapter: Path, *, dora: bool = False, keys: list[str], seed: int = 0
) -> dict[str, mx.array]:
    """Give mlx-lm's own layers random low-rank weights, save them as it does, and return what it fuses."""
    mx.random.seed(seed)
    model, _ = peer_load_model(folder)
    parameters = {"rank": 4, "scale": 1.5, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, 2, parameters, use_dora=dora)
    trained = {}
    for name, array in tree_flatten(model.parameters()):
        if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b"):
            trained[name] = mx.random.normal(array.shape) * 0.1
        elif name.endswith(".m"):
            trained[name] = array * 1.25
    model.update(tree_unflatten(list(trained.items())))
    adapter.mkdir()
    mx.save_safetensors(str(adapter / "adapters.safetensors"), trained)
    config = {"fine_tune_type": "dora" if dora else "lora", "num_layers": 2, "lora_parameters": parameters}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    fused = [(name, module.fuse()) for name, module in model.named_modules() if hasattr(module, "fuse")]
    model.update_modules(tree_unflatten(fused))
    return dict(tree_flatten(model.parameters()))


def peft_folder(tmp_path: Path, tensors: dict[str, mx.array], **config: Any) -> Path:
    """An adapter in PEFT's format, of rank 4 with lora_alpha 8; config: further settings."""
    (tmp_path / "adapter").mkdir()
    mx.save_safetensors(str(tmp_path / "adapter" / "adapter_model.safetensors"), tensors)
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8} | config
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return tmp_path / "adapter"
