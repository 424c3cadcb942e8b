"""Recipes: the quantization of each matrix.

A recipe is a default and a list of overrides; the last override that matches a matrix decides. A recipe comes from the
command line (one setting for all), by name, or from a small JSON file:

    {"bits": 4, "group_size": 64,
     "overrides": [{"tensors": ["w2", "wv"], "layers": "outer", "bits": 6},
                   {"tensors": ["tok_embeddings", "output"], "bits": 8},
                   {"layers": [0, -1], "bits": null}]}

`tensors` are Meta's names. `layers` are numbers (negative ones count from the end) or "outer". Both may be left out.
`bits` null leaves the matrix dense. `mode` may be given instead of `bits`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_llama3.checkpoint.quantization import Quantization
from mlx_llama3.checkpoint.tensor_names import hf_to_official
from mlx_llama3.errors import UserError
from mlx_llama3.system.files import read_json

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
# MLX's microscaling formats; each has one group size.
MODES = {
    "mxfp4": Quantization(4, 32, "mxfp4"),
    "mxfp8": Quantization(8, 32, "mxfp8"),
    "nvfp4": Quantization(4, 16, "nvfp4"),
}
MATRICES = ("tok_embeddings", "wq", "wk", "wv", "wo", "w1", "w2", "w3", "output")
_DEFAULT_GROUP = 64


@dataclass(frozen=True)
class Override:
    """The quantization (None: dense) of some matrices.

    The override matches matrices named in `tensors` (None: all) in layers for which `applies(layer, n_layers)` is true
    (None: all, and the matrices outside of the layers).
    """

    quantization: Quantization | None
    tensors: frozenset[str] | None = None
    applies: Callable[[int, int], bool] | None = None


@dataclass(frozen=True)
class Recipe:
    """A default quantization and its overrides; `name` is for reports."""

    name: str
    default: Quantization
    overrides: Sequence[Override] = ()

    def quantization(self, name: str, shape: tuple[int, ...], n_layers: int) -> Quantization | None:
        """The quantization of the tensor with this Hugging Face name and shape; None leaves it dense.

        Vectors stay dense, as do matrices whose rows are not a whole number of groups.
        """
        official = hf_to_official(name)
        if len(shape) != 2 or official is None:
            return None
        parts = official.split(".")
        matrix, layer = parts[-2], int(parts[1]) if parts[0] == "layers" else None
        chosen: Quantization | None = self.default
        for override in self.overrides:
            if override.tensors is not None and matrix not in override.tensors:
                continue
            if override.applies is not None and (layer is None or not override.applies(layer, n_layers)):
                continue
            chosen = override.quantization
        return chosen if chosen and shape[1] % chosen.group_size == 0 else None


def outer(layer: int, n_layers: int) -> bool:
    """Whether a layer is in the first or last eighth, or every third between: those that lose most with few bits.

    The rule of llama.cpp's Q4_K_M (`llama-quant.cpp`, `use_more_bits`) and of mlx-lm's mixed recipes.
    """
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def named(name: str, group_size: int = _DEFAULT_GROUP) -> Recipe:
    """`mixed_LOW_HIGH`: HIGH bits for the head, and for wv and w2 of the `outer` layers; LOW for the rest."""
    low, high = _NAMED[name]
    more = Quantization(high, group_size)
    return Recipe(
        name,
        Quantization(low, group_size),
        (Override(more, frozenset({"wv", "w2"}), outer), Override(more, frozenset({"output"}))),
    )


_NAMED = {"mixed_2_6": (2, 6), "mixed_3_4": (3, 4), "mixed_3_6": (3, 6), "mixed_4_6": (4, 6), "mixed_4_8": (4, 8)}
NAMES = tuple(_NAMED)


def make_recipe(
    quantize: str | int | None = None,
    *,
    group_size: int | None = None,
    recipe: str | Path | None = None,
    quantize_embeddings: bool = True,
    quantize_head: bool = True,
) -> Recipe | None:
    """The recipe for the command-line options; None if nothing is to be quantized.

    `quantize` is a number of bits or a mode, `recipe` a name or a JSON file; only one of them may be given. Raises
    `UserError` for unknown values and for options that contradict each other.
    """
    if quantize is None and recipe is None:
        if group_size is not None:
            raise UserError("--group-size says how to quantize; give --quantize or --recipe too")
        return None
    if quantize is not None and recipe is not None:
        raise UserError("--quantize and --recipe both say how to quantize; give one of them")
    if quantize is not None:
        chosen = Recipe(str(quantize), _parse(quantize, group_size, "--quantize"))
    elif str(recipe) in _NAMED:
        chosen = named(str(recipe), group_size or _DEFAULT_GROUP)
    else:
        chosen = _read_recipe(Path(recipe), group_size)
    switches = {"tok_embeddings": quantize_embeddings, "output": quantize_head}
    exceptions = tuple(Override(None, frozenset({matrix})) for matrix, quantized in switches.items() if not quantized)
    return Recipe(chosen.name, chosen.default, (*chosen.overrides, *exceptions))


def _parse(kind: Any, group_size: Any, where: str) -> Quantization:
    """The quantization for a number of bits or a mode; `where` is the option or file for messages."""
    if kind in MODES:
        if group_size not in (None, MODES[kind].group_size):
            raise UserError(f"{where}: {kind} has groups of {MODES[kind].group_size}, not of {group_size!r}")
        return MODES[kind]
    bits = int(kind) if isinstance(kind, str) and kind.isdecimal() else kind
    if type(bits) is not int or bits not in BITS:
        raise UserError(f"{where}: {kind!r} is not one of {', '.join(map(str, BITS))}, {', '.join(MODES)}")
    if group_size is not None and (type(group_size) is not int or group_size not in GROUP_SIZES):
        raise UserError(f"{where}: a group size of {group_size!r}; MLX has {', '.join(map(str, GROUP_SIZES))}")
    return Quantization(bits, group_size or _DEFAULT_GROUP)


def _read_recipe(path: Path, group_size: int | None) -> Recipe:
    if not path.exists():
        raise UserError(f"--recipe {path}: no such file, and none of the names {', '.join(_NAMED)}")
    table = read_json(path)
    _refuse_unknown_keys(table, {"bits", "mode", "group_size", "overrides"}, str(path))
    group_size = group_size or table.get("group_size")
    default = _parse(table.get("mode", table.get("bits")), group_size, str(path))
    overrides = table.get("overrides", [])
    if not isinstance(overrides, list) or not all(isinstance(override, Mapping) for override in overrides):
        raise UserError(f"{path}: overrides must be a list of objects")
    return Recipe(
        path.stem,
        default,
        tuple(_read_override(entry, default, f"{path}: override {n}") for n, entry in enumerate(overrides, 1)),
    )


def _read_override(entry: Mapping[str, Any], default: Quantization, where: str) -> Override:
    _refuse_unknown_keys(entry, {"tensors", "layers", "bits", "mode", "group_size"}, where)
    if "bits" not in entry and "mode" not in entry:
        raise UserError(f"{where}: gives no bits (a number, or null for 16 bits) and no mode")
    kind = entry.get("mode", entry.get("bits"))
    group_size = entry.get("group_size", default.group_size if default.mode == "affine" and kind not in MODES else None)
    tensors = entry.get("tensors")
    if tensors is not None and not (isinstance(tensors, list) and tensors and set(map(str, tensors)) <= set(MATRICES)):
        raise UserError(f"{where}: tensors must be a list of names out of {', '.join(MATRICES)}")
    return Override(
        None if kind is None else _parse(kind, group_size, where),
        frozenset(tensors) if tensors else None,
        _read_layers(entry.get("layers"), where),
    )


def _read_layers(layers: Any, where: str) -> Callable[[int, int], bool] | None:
    if layers is None:
        return None
    if layers == "outer":
        return outer
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise UserError(f'{where}: layers must be a list of numbers (negative ones count from the end) or "outer"')
    return lambda layer, n_layers: layer in layers or layer - n_layers in layers


def _refuse_unknown_keys(table: Mapping[str, Any], known: set[str], where: str) -> None:
    for key in table.keys() - known:
        raise UserError(f"{where}: unknown key {key!r}; known are {', '.join(sorted(known))}")
