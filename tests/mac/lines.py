"""Which lines only a Mac runs, and whether they ran on the stand-in: `python -m tests.mac.lines FOLDER`.

FOLDER is where processes with `MAC_STAND_IN_LINES=FOLDER` wrote the lines of the project that they ran.
"""

import ast
import atexit
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
VARIABLE = "MAC_STAND_IN_LINES"
_FLOORS = ("app", "convert", "mlx_llama3")

# What holds on a Mac, and what does not.
_TRUE = (
    "mx.metal.is_available()",
    "has_metal()",
    "mx.default_device() == mx.gpu",
    "mx.default_device() != mx.cpu",
    "sys.platform == 'darwin'",
    "self.compiles",
    "freqs.table is None",
)
_FALSE = ("mx.default_device() == mx.cpu", "on_cpu", "freqs.table is not None", "hasattr(os, 'sched_getaffinity')")


class Branch(NamedTuple):
    """A branch that only a Mac takes: its file, the line of the condition, its first own line, and the condition."""

    file: str
    condition_line: int
    line: int
    condition: str


def record(folder: Path) -> None:
    """Write the lines of the project that this process runs from now on to a file of `folder`, when it ends."""
    ran: dict[str, set[int]] = {}
    prefixes = tuple(f"{ROOT / floor}{os.sep}" for floor in _FLOORS)

    def trace_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            ran[frame.f_code.co_filename].add(frame.f_lineno)
        return trace_line

    def trace_call(frame: FrameType, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if not name.startswith(prefixes):
            return None
        ran.setdefault(name, set())
        return trace_line

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        lines = {str(Path(name).relative_to(ROOT)): sorted(numbers) for name, numbers in ran.items()}
        (folder / f"{os.getpid()}.json").write_text(json.dumps(lines))

    atexit.register(write)
    threading.settrace(trace_call)
    sys.settrace(trace_call)


def recorded(folder: Path) -> dict[str, set[int]]:
    """The lines that ran in any process, by file."""
    ran: dict[str, set[int]] = {}
    for path in folder.glob("*.json"):
        for name, lines in json.loads(path.read_text()).items():
            ran.setdefault(name, set()).update(lines)
    return ran


def branches() -> list[Branch]:
    """All branches of the project that only a Mac takes."""
    files = sorted(path for floor in _FLOORS for path in (ROOT / floor).rglob("*.py"))
    return [branch for path in files for branch in of_text(path.read_text(), path.relative_to(ROOT).as_posix())]


def of_text(text: str, file: str) -> Iterator[Branch]:
    """The branches of one file: what an `if` leads to on a Mac, also by not returning before."""
    for node in ast.walk(ast.parse(text)):
        for body in (getattr(node, name, None) for name in ("body", "orelse", "finalbody")):
            for statement, following in (
                zip(body, [*body[1:], None], strict=True) if isinstance(body, list) and body else ()
            ):
                if not isinstance(statement, ast.If) or (holds := _on_mac(statement.test)) is None:
                    continue
                side = statement.body[0] if holds else statement.orelse[0] if statement.orelse else following
                if side is not None:
                    yield Branch(file, statement.lineno, side.lineno, ast.unparse(statement.test))


def _on_mac(test: ast.expr) -> bool | None:
    """Whether the condition holds on a Mac; None if that depends on something else too."""
    text = ast.unparse(test)
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = _on_mac(test.operand)
        return None if inner is None else not inner
    if isinstance(test, ast.BoolOp):
        parts = {_on_mac(value) for value in test.values}
        decides = isinstance(test.op, ast.Or)
        return decides if decides in parts else None if None in parts else not decides
    return None


def main(folder: Path) -> int:
    """Print each branch and whether it ran; 1 if one did not."""
    ran = recorded(folder)
    missed = 0
    for branch in branches():
        was_run = branch.line in ran.get(branch.file, set())
        missed += not was_run
        print(f"{'ran    ' if was_run else 'NOT RUN'} {branch.file}:{branch.line}  if {branch.condition:.80}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
