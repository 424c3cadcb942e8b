"""Several matrices with the same input, packed into one product."""

from mlx_llama3.model.layers.tiled_linear import TiledLinear

import mlx.core as mx
import mlx.nn as nn


class PackedLinear(nn.Module):
    """Matrices with the same input, stacked by rows: one product and one read of x instead of several.

    Used for `wq|wk|wv` and `w1|w3`. Quantized rows can be stacked without change, because groups run along a row.
    Neighbours that differ in bits, group size, mode or dtype stay separate, in order.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        groups: list[list[nn.Module]] = []
        for part in parts:
            if groups and _storage(groups[-1][0]) == _storage(part):
                groups[-1].append(part)
            else:
                groups.append([part])
        # Where to split each product into the outputs of its matrices; computed before `_stack` changes the shapes.
        self._split_points = [_split_points([part.weight.shape[0] for part in group]) for group in groups]
        self.parts = [_stack(group) for group in groups]

    def __call__(self, x: mx.array) -> list[mx.array]:
        """`(..., in)` -> one product for each matrix, `(..., out_i)`."""
        outputs: list[mx.array] = []
        for part, points in zip(self.parts, self._split_points, strict=True):
            y = part(x)
            outputs += mx.split(y, points, axis=-1) if points else [y]
        return outputs

    def packed(self, x: mx.array) -> mx.array:
        """`(..., in)` -> the products with all matrices in one array, `(..., sum of out_i)`."""
        return self.parts[0](x) if len(self.parts) == 1 else mx.concatenate([part(x) for part in self.parts], axis=-1)


def row(matrix: nn.Module, index: int) -> mx.array:
    """One row `(in,)` of a matrix, dense or quantized, a `Linear` or an `Embedding`."""
    if isinstance(matrix, TiledLinear):
        return matrix.row(index)
    if not isinstance(matrix, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return matrix.weight[index]
    parts = [
        part if part is None else part[index : index + 1] for part in (matrix.weight, matrix.scales, matrix.biases)
    ]
    return mx.dequantize(*parts, group_size=matrix.group_size, bits=matrix.bits, mode=matrix.mode)[0]


def _storage(linear: nn.Module) -> tuple:
    """The properties that two matrices must share to be stacked."""
    if isinstance(linear, nn.QuantizedLinear):
        return (linear.bits, linear.group_size, linear.mode, linear.scales.dtype)
    return (linear.weight.dtype,)


def _stack(group: list[nn.Module]) -> nn.Module:
    """The group's first module, with the rows of all the group's matrices."""
    first = group[0]
    if len(group) > 1:
        for key in ("weight", "scales", "biases"):
            if first.get(key) is not None:
                first[key] = mx.concatenate([linear[key] for linear in group])
    return first


def _split_points(rows: list[int]) -> list[int]:
    return [sum(rows[:i]) for i in range(1, len(rows))]
