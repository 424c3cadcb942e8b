"""The plan of a conversion: dtype and quantization of every tensor, decided before any weight is read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from convert.conversion.fp4 import quantize
from convert.conversion.recipe import Recipe
from convert.sources.source import Source, SourceTensor
from convert.storage.safetensors_writer import Entry
from mlx_llama3.checkpoint.config_json import to_hf
from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.errors import UserError

import mlx.core as mx

DTYPES = {"float16": mx.float16, "bfloat16": mx.bfloat16, "float32": mx.float32}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Elements per block: 32 MB in 16 bits. Quantizing on the CPU takes several times a block's float32 size meanwhile.
_BLOCK_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class PlanStep:
    """One tensor to write: its source, the dtype of its values (if quantized, of its scales), and its quantization.

    With `as_is` the source already holds it quantized like that, and its packed rows are copied.
    """

    tensor: SourceTensor
    dtype: mx.Dtype
    quantization: Quantization | None = None
    as_is: bool = False

    @property
    def entries(self) -> list[Entry]:
        """The tensors that are written: weight, and scales and biases if there are any, in this order."""
        shape, quantization = self.tensor.shape, self.quantization
        if quantization is None:
            return [Entry(self.tensor.name, self.dtype, shape)]
        rows, columns = shape
        module = self.tensor.name.removesuffix(".weight")
        grouped = (rows, columns // quantization.group_size)
        packed = Entry(self.tensor.name, mx.uint32, (rows, columns * quantization.bits // 32))
        if quantization.mode != "affine":
            return [packed, Entry(f"{module}.scales", mx.uint8, grouped)]
        return [packed, Entry(f"{module}.scales", self.dtype, grouped), Entry(f"{module}.biases", self.dtype, grouped)]

    @property
    def packing(self) -> str:
        """Dtype or quantization in words: 'bfloat16', '4-bit in groups of 64', 'mxfp4'."""
        quantization = self.quantization
        if quantization is None:
            return str(self.dtype).removeprefix("mlx.core.")
        if quantization.mode != "affine":
            return quantization.mode
        return f"{quantization.bits}-bit in groups of {quantization.group_size}"

    @property
    def block_rows(self) -> int:
        """Rows to read at a time; above 256 a multiple of 256, so that no attention head is read twice."""
        rows = max(1, _BLOCK_ELEMENTS * self.tensor.shape[0] // max(1, self.tensor.nbytes // self.tensor.dtype.size))
        return rows - rows % 256 if rows > 256 else rows

    def stored_base(self, start: int, stop: int) -> mx.array:
        """Rows of `tensor.base` as a reader would get them, had no adapter been fused: copied if packed so already."""
        rows, packed = self.tensor.base.rows(start, stop), self.quantization is not None
        return rows if packed and self.quantization == self.tensor.base.quantization else self.stored(rows)

    def stored(self, rows: mx.array) -> mx.array:
        """The values that a reader of the folder gets for `rows` of this tensor: the same shape, float32."""
        dense, quantization = rows.astype(self.dtype), self.quantization
        if quantization is None:
            return dense.astype(mx.float32)
        settings = _settings(quantization)
        weight, scales, *biases = quantize(dense, **settings)
        if biases:
            # In float32, because 16-bit arithmetic would round twice.
            scales, biases = scales.astype(mx.float32), [biases[0].astype(mx.float32)]
        return mx.dequantize(weight, scales, *biases, **settings, dtype=mx.float32)


@dataclass(frozen=True)
class Plan:
    """All steps, in the order of the forward pass, and the config.json of the result.

    `settings` is config.json without the quantization. `default` is the quantization that config.json states for all
    matrices but those that it names; None takes the most common one.
    """

    steps: Sequence[PlanStep]
    settings: Mapping[str, Any]
    default: Quantization | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The content of config.json."""
        packed = {step.tensor.name.removesuffix(".weight"): step.quantization for step in self.steps}
        packed = {module: quantization for module, quantization in packed.items() if quantization}
        if not packed:
            return dict(self.settings)
        default = self.default or Counter(packed.values()).most_common(1)[0][0]
        overrides = {
            module: _settings(quantization) for module, quantization in packed.items() if quantization != default
        }
        quantization = {**_settings(default), **overrides}
        # mlx-lm reads the first key, the hub and transformers the second.
        return {**self.settings, "quantization": quantization, "quantization_config": quantization}

    @property
    def entries(self) -> list[Entry]:
        """All tensors that are written."""
        return [entry for step in self.steps for entry in step.entries]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are written."""
        return sum(entry.nbytes for entry in self.entries)

    @property
    def bits_per_weight(self) -> float:
        """Bits written per weight, scales and biases included."""
        return 8 * self.nbytes / sum(step.tensor.nbytes // step.tensor.dtype.size for step in self.steps)


def make_plan(
    source: Source, *, dtype: str | None = None, recipe: Recipe | None = None, dequantize: bool = False
) -> Plan:
    """Decide dtype and quantization of every tensor.

    Args:
        source: the open checkpoint.
        dtype: a key of `DTYPES`; None takes the dtype that most of the source's values have.
        recipe: the quantization to write. Matrices that the source already holds quantized like that are copied.
            None keeps the source's quantization.
        dequantize: write all matrices dense; not together with `recipe`.

    Raises:
        UserError: an unknown dtype, or both `recipe` and `dequantize`.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"--dtype: {dtype!r} is not one of {', '.join(DTYPES)}")
    if recipe and dequantize:
        raise UserError("--dequantize and --quantize contradict each other; give one of them")
    own_dtypes = {tensor.name: _own_dtype(tensor) for tensor in source.tensors.values()}
    main = DTYPES[dtype] if dtype else _most_common_dtype(source, own_dtypes)
    steps = []
    for tensor in source.tensors.values():
        if recipe:
            quantization = recipe.quantization(tensor.name, tensor.shape, source.args.n_layers)
        else:
            quantization = None if dequantize else tensor.quantization
        as_is = quantization is not None and quantization == tensor.quantization
        # Copied scales keep their own dtype: another one would change the values.
        steps.append(
            PlanStep(
                tensor,
                own_dtypes[tensor.name] if as_is and dtype is None else main,
                quantization,
                # With an adapter fused there is nothing to copy.
                as_is and tensor.base is None,
            )
        )
    ids = {key: value for key, value in source.generation_config.items() if key.endswith("_token_id")}
    settings = {**to_hf(source.args), **ids, "torch_dtype": _DTYPE_NAMES[main]}
    return Plan(steps, settings, recipe.default if recipe else None)


def _own_dtype(tensor: SourceTensor) -> mx.Dtype:
    """The dtype of a tensor's values; of its scales, if it is quantized and they are floats."""
    if tensor.quantized_rows is None or tensor.quantization.mode != "affine":
        return tensor.dtype
    return tensor.quantized_rows(0, 1).scales.dtype


def _most_common_dtype(source: Source, own_dtypes: Mapping[str, mx.Dtype]) -> mx.Dtype:
    """The dtype of most values."""
    values: Counter[mx.Dtype] = Counter()
    for tensor in source.tensors.values():
        values[own_dtypes[tensor.name]] += tensor.nbytes // tensor.dtype.size
    return values.most_common(1)[0][0]


def _settings(quantization: Quantization) -> dict[str, Any]:
    return {"group_size": quantization.group_size, "bits": quantization.bits, "mode": quantization.mode}
