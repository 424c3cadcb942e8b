"""LoRA adapters of PEFT and mlx-lm: read into one table of updates, and fused into the rows of a checkpoint."""

from convert.lora.adapter import Adapter, LoRAUpdate, read_adapter
from convert.lora.fuse import with_adapter

__all__ = ["Adapter", "LoRAUpdate", "read_adapter", "with_adapter"]
