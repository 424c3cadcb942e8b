"""Matrix products: several matrices that read the same input, packed into one."""

from mlx_llama3.model.layers.tiled_linear import TiledLinear

import mlx.core as mx
import mlx.nn as nn


class PackedLinear(nn.Module):
    """Matrices that multiply the same input, stacked by rows where their storage agrees: one product, one read of x.

    `wq|wk|wv` and `w1|w3` are kept so. Quantized rows stack exactly, because groups run along a row. A recipe that
    gives one of them other bits leaves that one apart.
    """

    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        groups: list[list[nn.Module]] = []
        for part in parts:
            if groups and _form(groups[-1][0]) == _form(part):
                groups[-1].append(part)
            else:
                groups.append([part])
        # Where to cut each product into the outputs of its matrices. Before stacking, which changes the first one.
        self._cuts = [_cuts([part.weight.shape[0] for part in group]) for group in groups]
        self.parts = [_stack(group) for group in groups]

    def __call__(self, x: mx.array) -> list[mx.array]:
        """`(..., in)` -> the product with each matrix, `(..., out_i)`."""
        outputs: list[mx.array] = []
        for part, cuts in zip(self.parts, self._cuts, strict=True):
            y = part(x)
            outputs += mx.split(y, cuts, axis=-1) if cuts else [y]
        return outputs

    def packed(self, x: mx.array) -> mx.array:
        """The products with all matrices in one array, `(..., sum of out_i)`."""
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


def _form(linear: nn.Module) -> tuple:
    """What must agree for rows to be stacked."""
    if isinstance(linear, nn.QuantizedLinear):
        return (linear.bits, linear.group_size, linear.mode, linear.scales.dtype)
    return (linear.weight.dtype,)


def _stack(group: list[nn.Module]) -> nn.Module:
    """Rows of all the group's matrices in the first one's module; the others are dropped by the caller."""
    first = group[0]
    if len(group) > 1:
        for key in ("weight", "scales", "biases"):
            if first.get(key) is not None:
                first[key] = mx.concatenate([linear[key] for linear in group])
    return first


def _cuts(rows: list[int]) -> list[int]:
    return [sum(rows[:i]) for i in range(1, len(rows))]
