"""A restricted unpickler that can build a state dictionary of tensors and nothing else.

A torch checkpoint contains a pickle, and a pickle is a program: Python's unpickler would call any function that it
names. This one executes only the opcodes that `torch.save` of a state dictionary writes (protocols 2 to 5; CPython
`Lib/pickletools.py`). It imports nothing and calls nothing. Time and memory are linear in the length of the pickle,
which is limited. Everything else in a pickle is refused by name.
"""

import pickletools
import struct
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn

from mlx_llama3.errors import UserError

# 126 layers of 9 tensors take a quarter of a megabyte.
MAX_PICKLE_BYTES = 4 << 20
_MAX_PROTOCOL = 5
# torch's storage class -> safetensors' name of the dtype (`stored_tensor.DTYPES`).
STORAGE_DTYPES = {
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "DoubleStorage": "F64",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "ShortStorage": "I16",
    "IntStorage": "I32",
    "LongStorage": "I64",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
}


class Global(NamedTuple):
    """A global name in the pickle. It is never imported."""

    module: str
    name: str


class Storage(NamedTuple):
    """`numel` elements of `dtype`, in the zip entry `key` beside the pickle."""

    dtype: str
    key: str
    numel: int


class TensorView(NamedTuple):
    """A view of a storage; offset and strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


ORDERED_DICT = Global("collections", "OrderedDict")
REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
REBUILD_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_KNOWN = {ORDERED_DICT, REBUILD_TENSOR, REBUILD_PARAMETER} | {Global("torch", name) for name in STORAGE_DTYPES}


def _printable(text: str | int) -> str:
    """Text of the file, shortened and escaped for a one-line message."""
    return repr(text[:100] if isinstance(text, str) else text)


class StatePickle:
    """The unpickler for `data`; `source` names the file in messages."""

    def __init__(self, data: bytes, source: str) -> None:
        if len(data) > MAX_PICKLE_BYTES:
            raise UserError(f"{source}: its pickle has {len(data)} bytes; a table of tensors needs far fewer, refused")
        self._data = data
        self._source = source
        self._position = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> dict[Any, Any]:
        """Unpickle and return the state dictionary, whose tensors are `TensorView`s.

        Raises `UserError` for anything unexpected.
        """
        while True:
            code = self._take(1)
            if code == b".":
                break
            instruction = self._INSTRUCTIONS.get(code)
            if instruction is None:
                self._refuse_instruction(code)
            instruction(self)
        table = self._pop()
        if not isinstance(table, dict):
            self._fail(f"holds a {type(table).__name__} where a table of tensors was expected")
        return table

    def _fail(self, what: str) -> NoReturn:
        raise UserError(f"{self._source}: its pickle {what}; nothing was run")

    def _refuse_instruction(self, code: bytes) -> NoReturn:
        known = pickletools.code2op.get(code.decode("latin-1"))
        name = known.name if known else f"0x{code.hex()}"
        if name == "INST":
            name += f" of {_printable(f'{self._line()}.{self._line()}')}"
        self._fail(f"contains the instruction {name}, which no checkpoint needs")

    def _take(self, count: int) -> bytes:
        data = self._data[self._position : self._position + count]
        if len(data) != count:
            self._fail("breaks off in the middle; the file is truncated or damaged")
        self._position += count
        return data

    def _line(self) -> str:
        end = self._data.find(b"\n", self._position)
        if end < 0:
            self._fail("breaks off in the middle; the file is truncated or damaged")
        line = self._take(end + 1 - self._position)[:-1]
        return line.decode("utf-8", "replace")

    def _unsigned(self, size: int) -> int:
        return int.from_bytes(self._take(size), "little")

    def _text(self, length: int) -> None:
        try:
            self._push(self._take(length).decode("utf-8"))
        except UnicodeDecodeError:
            self._fail("contains text that is not UTF-8; the file is damaged")

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> Any:
        # Values below the innermost mark are not part of the current group and may not be popped.
        if len(self._stack) <= (self._marks[-1] if self._marks else 0):
            self._fail("pops a value that it never pushed; the file is damaged")
        return self._stack.pop()

    def _pop_group(self) -> list[Any]:
        if not self._marks:
            self._fail("closes a group that it never opened; the file is damaged")
        start = self._marks.pop()
        group = self._stack[start:]
        del self._stack[start:]
        return group

    def _tuple(self, length: int) -> None:
        self._push(tuple(reversed([self._pop() for _ in range(length)])))

    def _get(self, index: int) -> None:
        if index not in self._memo:
            self._fail(f"reads memo {index}, which it never wrote; the file is damaged")
        self._push(self._memo[index])

    def _put(self, index: int) -> None:
        value = self._pop()
        self._push(value)
        self._memo[index] = value

    def _protocol(self) -> None:
        protocol = self._unsigned(1)
        if protocol > _MAX_PROTOCOL:
            self._fail(f"is of protocol {protocol}; up to {_MAX_PROTOCOL} is known")

    def _extend(self, values: list[Any]) -> None:
        target = self._pop()
        if not isinstance(target, list):
            self._fail(f"appends to a {type(target).__name__}; the file is damaged")
        target.extend(values)
        self._push(target)

    def _set_items(self, flat: list[Any]) -> None:
        target = self._pop()
        if not isinstance(target, dict) or len(flat) % 2:
            self._fail("sets items of what is no table; the file is damaged")
        for key, value in zip(flat[::2], flat[1::2], strict=True):
            # Hashing other keys can take forever, for example nested tuples.
            if not isinstance(key, str | int):
                self._fail(f"uses a {type(key).__name__} as the name of a table's entry")
            if key in target:
                self._fail(f"holds {_printable(key)} twice")
            target[key] = value
        self._push(target)

    def _resolve(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            self._fail("names a global by something that is not text")
        target = Global(module, name)
        if target not in _KNOWN:
            self._fail(f"asks for {_printable(f'{module}.{name}')}, which no checkpoint needs: refused")
        self._push(target)

    def _global(self) -> None:
        self._resolve(self._line(), self._line())

    def _stack_global(self) -> None:
        name, module = self._pop(), self._pop()
        self._resolve(module, name)

    def _build(self) -> None:
        # torch sets the attribute `_metadata` of a state dictionary; it is dropped, as a plain dict has no attributes.
        state, target = self._pop(), self._pop()
        if not isinstance(target, dict) or not isinstance(state, dict):
            self._fail(f"sets the state of a {type(target).__name__}, which no checkpoint needs")
        self._push(target)

    def _persistent(self) -> None:
        match self._pop():
            case ("storage", Global("torch", storage), str(key), str(), int(numel)) if storage in STORAGE_DTYPES:
                self._push(Storage(STORAGE_DTYPES[storage], key, numel))
            case _:
                self._fail("refers to data beside it in a way that no checkpoint needs")

    def _reduce(self) -> None:
        arguments, function = self._pop(), self._pop()
        match function, arguments:
            case Global("collections", "OrderedDict"), ():
                self._push({})
            case Global("torch._utils", "_rebuild_tensor_v2"), (Storage() as storage, offset, shape, strides, *_):
                self._push(self._view(storage, offset, shape, strides))
            case Global("torch._utils", "_rebuild_parameter"), (TensorView() as view, *_):
                self._push(view)
            case Global(module, name), _:
                self._fail(f"calls {module}.{name} with arguments that do not fit; the file is damaged")
            case _:
                self._fail(f"calls a {type(function).__name__}, which no checkpoint needs")

    def _view(self, storage: Storage, offset: Any, shape: Any, strides: Any) -> TensorView:
        numbers = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (None,)
        if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers) or len(shape) != len(strides):
            self._fail(
                f"describes a tensor over storage {_printable(storage.key)} "
                "whose offset, shape or strides make no sense"
            )
        return TensorView(storage, offset, shape, strides)

    _INSTRUCTIONS: ClassVar[dict[bytes, Callable[["StatePickle"], None]]] = {
        b"\x80": _protocol,
        b"\x95": lambda self: self._take(8),  # FRAME: size hint for buffering
        b"(": lambda self: self._marks.append(len(self._stack)),
        b"N": lambda self: self._push(None),
        b"\x88": lambda self: self._push(True),
        b"\x89": lambda self: self._push(False),
        b"K": lambda self: self._push(self._unsigned(1)),
        b"M": lambda self: self._push(self._unsigned(2)),
        b"J": lambda self: self._push(int.from_bytes(self._take(4), "little", signed=True)),
        b"\x8a": lambda self: self._push(int.from_bytes(self._take(self._unsigned(1)), "little", signed=True)),
        b"G": lambda self: self._push(struct.unpack(">d", self._take(8))[0]),
        b"X": lambda self: self._text(self._unsigned(4)),
        b"\x8c": lambda self: self._text(self._unsigned(1)),
        b")": lambda self: self._push(()),
        b"\x85": lambda self: self._tuple(1),
        b"\x86": lambda self: self._tuple(2),
        b"\x87": lambda self: self._tuple(3),
        b"t": lambda self: self._push(tuple(self._pop_group())),
        b"]": lambda self: self._push([]),
        b"a": lambda self: self._extend([self._pop()]),
        b"e": lambda self: self._extend(self._pop_group()),
        b"}": lambda self: self._push({}),
        b"s": lambda self: self._set_items([self._pop(), self._pop()][::-1]),
        b"u": lambda self: self._set_items(self._pop_group()),
        b"q": lambda self: self._put(self._unsigned(1)),
        b"r": lambda self: self._put(self._unsigned(4)),
        b"\x94": lambda self: self._put(len(self._memo)),
        b"h": lambda self: self._get(self._unsigned(1)),
        b"j": lambda self: self._get(self._unsigned(4)),
        b"c": _global,
        b"\x93": _stack_global,
        b"Q": _persistent,
        b"R": _reduce,
        b"b": _build,
    }
