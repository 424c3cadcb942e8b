"""From a model folder to a `Transformer` that is ready to run."""

import logging
from pathlib import Path
from typing import Protocol

from mlx_llama3.checkpoint.cpu_blocks import use_cpu_blocks
from mlx_llama3.checkpoint.folder import Checkpoint
from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.checkpoint.tensor_names import official_to_hf
from mlx_llama3.model.config import ModelArgs
from mlx_llama3.model.layers import tiled_linear as cpu
from mlx_llama3.model.layers.packed_linear import PackedLinear
from mlx_llama3.model.transformer import Transformer
from mlx_llama3.system.memory import available_memory, check_memory

import mlx.core as mx
import mlx.nn as nn

log = logging.getLogger(__name__)


class ModelShard(Protocol):
    """One rank's part of a model that is split over several ranks (`parallel.tensor`, `parallel.pipeline`)."""

    has_ends: bool  # whether this rank has the embedding, the final norm and the head
    first_layer: int

    def checkpoint(self, folder: str | Path) -> Checkpoint:
        """The tensors of this shard."""

    def model(self, args: ModelArgs) -> Transformer:
        """An empty model for these tensors."""

    def connect(self, model: Transformer) -> None:
        """Add what the model needs to run with the other ranks, after its tensors are in place."""


def load_model(folder: str | Path, *, dtype: mx.Dtype | None = None, part: ModelShard | None = None) -> Transformer:
    """Load the weights of a model folder: checked, packed and evaluated.

    Args:
        folder: holds `config.json` and `model*.safetensors` with Hugging Face names.
        dtype: of activations and dense weights. None means the stored dtype on the GPU, and float32 on the CPU, whose
            16-bit arithmetic is slow. The CPU also dequantizes quantized weights to `dtype` if memory allows: a dense
            product is ten times as fast there.
        part: load only this shard of the model; None for the whole model.

    Raises:
        UserError: the folder is no model folder; a tensor has a wrong name, shape or dtype, or holds NaN; or memory
            does not suffice.
    """
    checkpoint = Checkpoint(folder) if part is None else part.checkpoint(folder)
    on_cpu = mx.default_device() == mx.cpu
    dtype = dtype or (mx.float32 if on_cpu else checkpoint.dtype)
    expand = on_cpu and _fits_expanded(checkpoint, dtype)
    if not expand:
        check_memory(
            checkpoint.nbytes_as(dtype), str(folder), "choose a smaller model, or one with fewer bits a weight"
        )
    checkpoint.check_finite()
    model = _Assembly(checkpoint, dtype, part).model()
    if part is not None:
        part.connect(model)
    if expand:
        cpu.use_tiled_layers(model, dtype)
        use_cpu_blocks(model)
    mx.eval(model.parameters())
    return model


def _fits_expanded(checkpoint: Checkpoint, dtype: mx.Dtype) -> bool:
    dense = dtype.size * checkpoint.n_weights
    if dense <= 0.9 * available_memory():
        return True
    if checkpoint.nbytes_as(dtype) < dense:
        log.warning(
            "%s: %.1f GB do not fit unpacked; weights stay packed, slow on a CPU", checkpoint.folder, dense / 1e9
        )
    return False


class _Assembly:
    """Puts the tensors of a checkpoint into the modules of a `Transformer`, under Meta's names."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype, part: ModelShard | None) -> None:
        self._checkpoint, self._dtype, self._part = checkpoint, dtype, part

    def model(self) -> Transformer:
        args, part = self._checkpoint.args, self._part
        model = Transformer(args) if part is None else part.model(args)
        if part is None or part.has_ends:
            model.tok_embeddings = self._matrix("tok_embeddings", embedding=True)
            model.norm.weight = self._vector("norm")
            if not args.tie_word_embeddings:
                model.output = self._matrix("output")
        for i, block in enumerate(model.layers, 0 if part is None else part.first_layer):
            attention, feed_forward = f"layers.{i}.attention", f"layers.{i}.feed_forward"
            block.attention_norm.weight = self._vector(f"layers.{i}.attention_norm")
            block.attention.wqkv = PackedLinear([self._matrix(f"{attention}.{w}") for w in ("wq", "wk", "wv")])
            block.attention.wo = self._matrix(f"{attention}.wo")
            block.ffn_norm.weight = self._vector(f"layers.{i}.ffn_norm")
            block.feed_forward.w13 = PackedLinear([self._matrix(f"{feed_forward}.{w}") for w in ("w1", "w3")])
            block.feed_forward.w2 = self._matrix(f"{feed_forward}.w2")
            mx.eval(block.parameters())  # frees the tensors that this layer was packed from
        return model

    def _tensor(self, key: str) -> mx.array:
        """A tensor in the activation dtype: scales of another dtype would silently make products float32, and slow."""
        tensor = self._checkpoint.pop(key)  # removed there, so that a packed matrix is not in memory twice
        return tensor.astype(self._dtype) if mx.issubdtype(tensor.dtype, mx.floating) else tensor

    def _vector(self, official: str) -> mx.array:
        return self._tensor(official_to_hf(f"{official}.weight"))

    def _matrix(self, official: str, *, embedding: bool = False) -> nn.Module:
        """The module of one matrix, dense or quantized, by Meta's name."""
        name = official_to_hf(f"{official}.weight")
        hf = name.removesuffix(".weight")
        quantization = self._checkpoint.quantization(hf)
        weight = self._tensor(name)
        if quantization is None:
            return _dense(weight, embedding)
        scales = self._tensor(f"{hf}.scales")
        biases = self._tensor(f"{hf}.biases") if quantization.mode == "affine" else None
        return _quantized(weight, scales, biases, quantization, self._dtype if embedding else None)


# MLX's layers allocate random weights of the requested size. The size requested here is 1 or one group, which is cheap;
# then the real tensors replace them.


def _dense(weight: mx.array, embedding: bool) -> nn.Module:
    module = nn.Embedding(1, 1) if embedding else nn.Linear(1, 1, bias=False)
    module.weight = weight
    return module


def _quantized(
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    quantization: Quantization,
    embedding_dtype: mx.Dtype | None,
) -> nn.Module:
    settings = {"group_size": quantization.group_size, "bits": quantization.bits, "mode": quantization.mode}
    width = max(quantization.group_size, 32)  # nvfp4 has groups of 16, but packs at least 32 columns
    if embedding_dtype is None:
        module = nn.QuantizedLinear(width, 1, bias=False, **settings)
    else:
        module = _QuantizedEmbedding(1, width, **settings)
        module.dtype = embedding_dtype
    module.weight, module.scales, module.biases = weight, scales, biases
    return module


class _QuantizedEmbedding(nn.QuantizedEmbedding):
    """An embedding with rows in `dtype`, that of the activations.

    MLX's own has the dtype of the scales. These are bytes in mxfp4, mxfp8 and nvfp4, and it gives bfloat16 there: with
    float16 norms, the residual stream would become float32.
    """

    dtype: mx.Dtype

    def __call__(self, tokens: mx.array) -> mx.array:
        return super().__call__(tokens).astype(self.dtype)
