"""A Jinja sandbox that ends: bounds of the steps, the time and the memory of a template, when compiled and rendered.

Jinja's own sandbox bounds `range` only. It folds constants while compiling, in branches that never run too.
"""

import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_SECONDS = 5.0
_MAX_LENGTH = 50_000_000  # characters of a text, or elements of a list, that an operation may give
_MAX_BITS = 4096  # of an integer
# Widths in formats, which are padded to: numbers of six digits, and those that an argument gives.
_WIDE_PERCENT = re.compile(r"%[^%A-Za-z]*(?:\d{6}|\*)")
_WIDE_BRACES = re.compile(r"\{[^}]*(?:\d{6}|\{)")
_TICK, _CONCAT = "__tick__", "__concat__"
_PADDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "wordwrap", "truncate"}


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose templates raise `TemplateError` beyond a bound. Call `begin` before each rendering."""

    # Jinja hands these to `call_binop`, and folds none of them.
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.globals |= {_TICK: self._tick, _CONCAT: self._concat}
        self.filters |= {name: _checked(name, self.filters[name]) for name in _PADDING & self.filters.keys()}
        self.filters |= {name: _checked(name, self.filters[name]) for name in ("format", "replace", "join")}
        self.begin()

    def begin(self) -> None:
        """Start the time of a rendering."""
        self._deadline = time.monotonic() + _SECONDS

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Ticks().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """As in Jinja; refuses a result beyond the bounds."""
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * max(right, 0) <= _MAX_BITS)
        elif operator == "*":
            _check_product(left, right)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check(len(left) + len(right) <= _MAX_LENGTH)
        elif operator == "%" and isinstance(left, str):
            _check(not _WIDE_PERCENT.search(left))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **keywords: Any) -> Any:  # noqa: N805 as in Jinja
        """As in Jinja; refuses a text's methods with results beyond the bounds."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_call(__obj.__name__, (owner, *args), keywords)
        return super().call(__context, __obj, *args, **keywords)

    def wrap_str_format(self, value: Any) -> Any:
        """As in Jinja, for a text's methods `format` and `format_map`."""
        wrapped = super().wrap_str_format(value)
        _check(wrapped is None or not _WIDE_BRACES.search(value.__self__))
        return wrapped

    def _tick(self) -> str:
        if time.monotonic() > self._deadline:
            raise TemplateError(f"it takes more than {_SECONDS:g} seconds")
        return ""

    def _concat(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        _check(sum(map(len, texts)) <= _MAX_LENGTH)
        return "".join(texts)


class _Ticks(NodeTransformer):
    """Looks at the clock in every loop and macro, and joins texts by a function that counts their characters."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        return self._ticking(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._ticking(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._ticking(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call(_CONCAT, node.nodes, node.lineno)

    def _ticking(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.Output([_call(_TICK, [], node.lineno)], lineno=node.lineno))
        return node


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load", lineno=line), arguments, [], None, None, lineno=line)


def _checked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with a check of its arguments. It keeps the marks by which Jinja hands it the environment."""

    def checked(*args: Any, **keywords: Any) -> Any:
        plain = [value for value in args if not isinstance(value, Environment) and not hasattr(value, "eval_ctx")]
        _check_call(name, tuple(value for value in plain if type(value).__name__ != "EvalContext"), keywords)
        return function(*args, **keywords)

    checked.__dict__.update(function.__dict__)
    return checked


def _check_call(name: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
    """Refuse a filter or a method of a text, its first argument, whose result could be beyond the bounds."""
    numbers = [value for value in (*args, *keywords.values()) if isinstance(value, int)]
    if name in _PADDING:
        _check(all(abs(number) < 100_000 for number in numbers))
    elif name == "format":
        _check(not _WIDE_PERCENT.search(str(args[0])))
    elif name == "replace" and len(args) > 2:
        _check_product(args[0], str(args[2]))
    elif name == "join" and len(args) > 1 and isinstance(args[0], str):
        _check_product(args[0], args[1])
    elif name == "join" and len(args) > 1 and hasattr(args[0], "__len__"):
        _check(len(args[0]) * len(str(args[1])) <= _MAX_LENGTH)


def _check_product(left: Any, right: Any) -> None:
    sizes = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
    if all(isinstance(size, int) for size in sizes):
        both_numbers = isinstance(left, int) and isinstance(right, int)
        small = sum(size.bit_length() for size in sizes) <= _MAX_BITS
        _check(small if both_numbers else sizes[0] * sizes[1] <= _MAX_LENGTH)


def _check(fits: bool) -> None:
    if not fits:
        raise TemplateError("it computes too large a text or number")
