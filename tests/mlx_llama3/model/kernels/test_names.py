"""Each source of a kernel has a name of its own: before MLX 0.32.1 the name alone keyed what was compiled (issue 3832).

The builders take MLX's function as their first argument, so a function that keeps the name and the source stands in.
"""

import inspect
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import product

import pytest

from mlx_llama3.model import kernels
from mlx_llama3.model.kernels.kv_packing import PackedLayout
from mlx_llama3.model.kernels.metal import unique_name
from mlx_llama3.model.kernels.norm_rope_qkv import SIZES

import mlx.core as mx

# Values of a builder's argument, by its name or else its type: several, so that each makes a difference.
BY_NAME = {
    "layout": [PackedLayout(head_dim, bits) for head_dim in (64, 128) for bits in (4, 8)],
    "offset_ndim": [0, 1],
    "sizes": [tuple(8 if size == larger else 4 for size in SIZES) for larger in (None, *SIZES)],
}
BY_TYPE = {
    mx.Dtype: [mx.float16, mx.bfloat16, mx.float32],
    int: [4, 8],
    float: [1e-5, 1.00000001e-5],
    bool: [False, True],
}


def builders() -> Iterator[Callable]:
    """The functions that make kernels: they have a cache, and `make` is their first argument."""
    for module in pkgutil.iter_modules(kernels.__path__):
        for value in vars(import_module(f"{kernels.__name__}.{module.name}")).values():
            if hasattr(value, "cache_clear") and next(iter(inspect.signature(value).parameters), "") == "make":
                yield value


def all_made(builder: Callable) -> list[tuple[str, tuple]]:
    """Name and source of the kernel for each combination of arguments."""

    def make(name: str, **kernel: object) -> tuple[str, tuple]:
        return name, tuple(map(repr, kernel.values()))

    _, *parameters = inspect.signature(builder).parameters.values()
    values = [BY_NAME.get(parameter.name) or BY_TYPE[parameter.annotation] for parameter in parameters]
    return [builder.__wrapped__(make, *arguments) for arguments in product(*values)]


def shared_names(made: Sequence[tuple[str, tuple]]) -> list[str]:
    """Names that stand for more than one source."""
    sources = defaultdict(set)
    for name, source in made:
        sources[name].add(source)
    return [name for name, several in sources.items() if len(several) > 1]


BUILDERS = list({f"{each.__module__.rpartition('.')[2]}.{each.__name__}": each for each in builders()}.items())


@pytest.fixture(params=[builder for _, builder in BUILDERS], ids=[name for name, _ in BUILDERS])
def builder(request) -> Callable:
    return request.param


def test_all_kernels_are_here():
    names = [name for builder in dict(BUILDERS).values() for name, _ in all_made(builder)[:1]]
    begins = (
        "norm_rope_qkv",
        "norm_swiglu_qmv",
        "add_rms_norm",
        "rope_qkv",
        "swiglu_qmv",
        "sdpa_quantized_float16",
        "sdpa_quantized_reduce",
    )
    assert all(any(name.startswith(f"llama3_{begin}") for name in names) for begin in begins)


def test_each_source_has_a_name_of_its_own(builder):
    assert shared_names(all_made(builder)) == []


def test_two_kernels_have_two_names():
    """Also where one kernel's name begins with another's."""
    made = {name: {each for each, _ in all_made(builder)} for name, builder in BUILDERS}
    assert sum(map(len, made.values())) == len(set().union(*made.values()))


def test_each_constant_of_a_name_is_needed(builder, monkeypatch):
    """Without one of them that varies, two sources share a name, and this is noticed."""
    seen: list[tuple] = []

    def kept(kernel: str, *constants: object) -> str:
        seen.append(constants)
        return unique_name(kernel, *constants)

    monkeypatch.setitem(builder.__wrapped__.__globals__, "unique_name", kept)
    all_made(builder)
    for dropped, values in enumerate(zip(*seen, strict=True)):

        def without(kernel: str, *constants: object, dropped: int = dropped) -> str:
            return "_".join(map(str, (kernel, *constants[:dropped], *constants[dropped + 1 :])))

        monkeypatch.setitem(builder.__wrapped__.__globals__, "unique_name", without)
        assert bool(shared_names(all_made(builder))) == (len(set(values)) > 1), f"constant {dropped}"
