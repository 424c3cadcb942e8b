"""The tensors of the model, each with the expression that computes it, read from the model's own source.

`ast` extracts the text and its line numbers from `mlx_llama3/model/transformer.py` and from the references of its
kernels. A copy of the text could become outdated.
"""

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from mlx_llama3.model.config import ModelArgs

MODEL, ROPE_QKV, SWIGLU = "model/transformer.py", "model/kernels/rope_qkv.py", "model/kernels/swiglu_qmv.py"


@dataclass(frozen=True)
class SourceLine:
    """One statement or expression, as written in `file` from line `number` on."""

    number: int
    text: str
    file: str


@dataclass(frozen=True)
class Card:
    """A tensor of the diagram.

    name: its key. symbol: its label. group: "before", "attention", "mlp" or "after". find: its source lines. shape: its
    axes for the model's arguments; B and T stay letters. weight: the matrix or gain that it is computed with, by Meta's
    name within its layer or model; "" if there is none.
    """

    name: str
    symbol: str
    group: str
    description: str
    find: Callable[["SourceFile"], list[SourceLine]]
    shape: Callable[[ModelArgs], tuple[str | int, ...]]
    weight: str = ""


class SourceFile:
    """A parsed file of `mlx_llama3`. A module-level function has the owner ""."""

    def __init__(self, text: str, file: str = MODEL) -> None:
        self._text, self._file = text, f"mlx_llama3/{file}"
        module = ast.parse(text)
        owners = [("", module), *((node.name, node) for node in module.body if isinstance(node, ast.ClassDef))]
        self._functions = {
            (name, function.name): function
            for name, owner in owners
            for function in owner.body
            if isinstance(function, ast.FunctionDef)
        }

    def assigned(self, owner: str, method: str, name: str) -> list[SourceLine]:
        """Every statement of a method that assigns `name`."""
        nodes = [
            node
            for node in self._nodes(owner, method)
            if isinstance(node, ast.Assign) and name in {target.id for target in _names(node.targets)}
        ]
        return self._lines(nodes, f"{owner}.{method} assigns {name}")

    def call(self, owner: str, method: str, attribute: str) -> list[SourceLine]:
        """The call of `self.<attribute>` in a method."""
        nodes = [
            node
            for node in self._nodes(owner, method)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{attribute}"
        ]
        return self._lines(nodes[:1], f"{owner}.{method} calls self.{attribute}")

    def argument(self, owner: str, method: str, attribute: str) -> list[SourceLine]:
        """The first argument of the last call of `self.<attribute>` in a method."""
        nodes = [
            node.args[0]
            for node in self._nodes(owner, method)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{attribute}"
        ]
        return self._lines(nodes[-1:], f"{owner}.{method} passes an argument to self.{attribute}")

    def returned(self, owner: str, method: str) -> list[SourceLine]:
        """The return statements of a method."""
        nodes = [node for node in self._nodes(owner, method) if isinstance(node, ast.Return)]
        return self._lines(nodes, f"{owner}.{method} returns")

    def _nodes(self, owner: str, method: str) -> list[ast.AST]:
        function = self._functions[owner, method]
        return sorted(
            (node for node in ast.walk(function) if hasattr(node, "lineno")),
            key=lambda node: (node.lineno, node.col_offset),
        )

    def _lines(self, nodes: list, rule: str) -> list[SourceLine]:
        if not nodes:
            raise LookupError(f"{self._file}: nothing found where {rule}")
        return [SourceLine(node.lineno, ast.get_source_segment(self._text, node) or "", self._file) for node in nodes]


def _names(targets: list[ast.expr]) -> Iterator[ast.Name]:
    for target in targets:
        yield from (node for node in ast.walk(target) if isinstance(node, ast.Name))


@cache
def source(file: str = MODEL) -> SourceFile:
    """The parsed installed file."""
    return SourceFile(files("mlx_llama3").joinpath(file).read_text(encoding="utf-8"), file)


def _stream(args: ModelArgs) -> tuple[str | int, ...]:
    return ("B", "T", args.dim)


def _hidden(args: ModelArgs) -> tuple[str | int, ...]:
    return ("B", "T", args.hidden_dim)


def _queries(args: ModelArgs) -> tuple[str | int, ...]:
    return ("B", args.n_heads, "T", args.head_dim)


def _keys(args: ModelArgs) -> tuple[str | int, ...]:
    return ("B", args.n_kv_heads, "T", args.head_dim)


def _vocabulary(args: ModelArgs) -> tuple[str | int, ...]:
    return ("B", "T", args.vocab_size)


_BLOCK, _ATTENTION, _MLP, _MODEL = "TransformerBlock", "Attention", "FeedForward", "Transformer"
_CALL, _PROJECT, _REFERENCE = "__call__", "project", "reference"


def _rotation(name: str) -> list[SourceLine]:
    """The lines that split the stacked projection into queries, keys or values, and rotate them."""
    return source(ROPE_QKV).assigned("", _REFERENCE, name)


CARDS = (
    Card(
        "embedding",
        "tok_embeddings(tokens)",
        "before",
        "one row for each token: the stream begins",
        lambda s: s.call(_MODEL, "residual", "tok_embeddings"),
        _stream,
        "tok_embeddings",
    ),
    Card(
        "x",
        "x",
        "before",
        "the stream as the block gets it",
        lambda s: s.assigned(_MODEL, "residual", "x")[-1:],
        _stream,
    ),
    Card(
        "attention_norm",
        "attention_norm(x)",
        "attention",
        "scaled to unit root mean square, times a gain",
        lambda s: s.call(_BLOCK, _CALL, "attention_norm"),
        _stream,
        "attention_norm",
    ),
    Card(
        "q",
        "q",
        "attention",
        "queries, rotated to their position",
        lambda s: s.assigned(_ATTENTION, _CALL, "q") + s.returned(_ATTENTION, _PROJECT) + _rotation("q"),
        _queries,
        "wq",
    ),
    Card(
        "k",
        "k",
        "attention",
        "keys, rotated; the cache keeps them",
        lambda s: s.assigned(_ATTENTION, _CALL, "kv") + _rotation("k"),
        _keys,
        "wk",
    ),
    Card(
        "v",
        "v",
        "attention",
        "values; the cache keeps them",
        lambda s: s.assigned(_ATTENTION, _CALL, "kv") + _rotation("v"),
        _keys,
        "wv",
    ),
    Card(
        "z",
        "softmax(q·kᵀ)·v",
        "attention",
        "what each head gathered",
        lambda s: s.assigned(_ATTENTION, _CALL, "out"),
        _queries,
    ),
    Card(
        "attn_out",
        "Δattn",
        "attention",
        "the update that attention adds",
        lambda s: s.returned(_ATTENTION, _CALL) + s.returned(_ATTENTION, "join"),
        _stream,
        "wo",
    ),
    Card(
        "h",
        "h = x + Δattn",
        "attention",
        "the stream between the two branches",
        lambda s: s.assigned(_BLOCK, _CALL, "h"),
        _stream,
    ),
    Card(
        "ffn_norm",
        "ffn_norm(h)",
        "mlp",
        "scaled to unit root mean square, times a gain",
        lambda s: s.call(_BLOCK, _CALL, "ffn_norm"),
        _stream,
        "ffn_norm",
    ),
    Card(
        "gate",
        "w1(ffn_norm(h))",
        "mlp",
        "how far each neuron opens",
        lambda s: source(SWIGLU).assigned("", _REFERENCE, "gate"),
        _hidden,
        "w1",
    ),
    Card(
        "up",
        "w3(ffn_norm(h))",
        "mlp",
        "what each neuron would say",
        lambda s: source(SWIGLU).assigned("", _REFERENCE, "up"),
        _hidden,
        "w3",
    ),
    Card(
        "swiglu",
        "SiLU(w1)·w3",
        "mlp",
        "the neurons",
        lambda s: s.argument(_MLP, _CALL, "w2") + source(SWIGLU).returned("", _REFERENCE),
        _hidden,
    ),
    Card("mlp_out", "Δmlp", "mlp", "the update that the MLP adds", lambda s: s.returned(_MLP, _CALL), _stream, "w2"),
    Card(
        "y", "y = h + Δmlp", "mlp", "the stream as the next block gets it", lambda s: s.returned(_BLOCK, _CALL), _stream
    ),
    Card(
        "norm",
        "norm(y)",
        "after",
        "the final norm, after the last block",
        lambda s: s.call(_MODEL, "head", "norm"),
        _stream,
        "norm",
    ),
    Card(
        "logits",
        "logits",
        "after",
        "one number for each token that could come next",
        lambda s: s.returned(_MODEL, "unembed"),
        _vocabulary,
        "output",
    ),
)
