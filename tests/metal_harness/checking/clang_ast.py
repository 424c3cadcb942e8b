"""Reads what `clang -Xclang -ast-dump` prints: one node a line, each with its place in the source."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

# `| | `-VarDecl 0x7f26 <line:9:5, col:14> col:10 used x 'float'`
_NODE = re.compile(r"^([| ]*[|`]-)?([A-Za-z]+) 0x[0-9a-f]+ ?(.*)$")
# A place is printed relative to the one printed before: `file:line:col`, `line:line:col` or `col:col`.
_PLACE = re.compile(r"(?P<file>[^\s<>,]+):(?P<line>\d+):\d+|col:\d+")


@dataclass(frozen=True)
class Node:
    """`kind` as clang names it; `text` what follows the places: names, types in quotes, kinds of casts."""

    kind: str
    depth: int
    file: str
    line: int
    text: str

    @property
    def types(self) -> list[str]:
        """The quoted types, as written and, after a colon, what they stand for."""
        return re.findall(r"'([^']*)'", self.text)


def nodes(dump: str) -> Iterator[Node]:
    """The nodes of a dump in order; those that the compiler added for itself (implicit declarations) are left out."""
    file, line = "", 0
    hidden: int | None = None  # depth of the implicit declaration that we are in
    for printed in dump.splitlines():
        match = _NODE.match(re.sub(r"<(scratch space|built-in|command line)>", "macro", printed))
        if not match:
            continue
        depth, kind, rest = len(match[1] or ""), match[2], match[3]
        places, text = _split(rest)
        for place in _PLACE.finditer(places):
            if place["file"] is None:
                continue
            line = int(place["line"])
            file = file if place["file"] == "line" else place["file"]
        if hidden is not None and depth > hidden:
            continue
        hidden = depth if kind.endswith("Decl") and re.match(r"(used |referenced )*implicit\b", text) else None
        if hidden is None:
            yield Node(kind, depth, file, line, text)


def _split(rest: str) -> tuple[str, str]:
    """Places (the range, and for a declaration where its name stands) and the rest."""
    places = ""
    while True:
        match = re.match(r"(<<invalid sloc>>|<[^<>]*>|(parent|prev) 0x[0-9a-f]+|\S+:\d+(:\d+)?)(\s+|$)", rest)
        if not match:
            return places, rest
        places += " " + match[1]
        rest = rest[match.end() :]
