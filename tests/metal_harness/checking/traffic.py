"""Bytes that a dispatch moves, buffer by buffer: what a kernel that is bound by memory is judged by."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Traffic:
    """Use of one buffer, in bytes.

    `read` and `written` count every access; `unique_*` each byte once; `group_*` each byte once for every threadgroup
    that touches it, which is what leaves the device's memory when a threadgroup finds its own bytes in cache.
    `reread` are bytes that a thread reads again right after reading them itself. `copied` are bytes that MLX copies
    before the kernel runs, because the input is not contiguous by rows; they are read and written once more.
    """

    name: str
    size: int
    read: int = 0
    unique_read: int = 0
    group_read: int = 0
    reread: int = 0
    written: int = 0
    unique_written: int = 0
    group_written: int = 0
    copied: int = 0

    def __add__(self, other: "Traffic") -> "Traffic":
        """Of the same buffer in several dispatches."""
        added = {name: getattr(self, name) + getattr(other, name) for name in (*COUNTERS, "copied")}
        return Traffic(self.name, max(self.size, other.size), **added)

    def __str__(self) -> str:
        return (
            f"{self.name:<16} {self.size:>12,} {self.unique_read:>12,} {self.group_read:>12,} {self.read:>12,} "
            f"{self.unique_written:>12,} {self.group_written:>12,} {self.copied:>12,}"
        )


# What an instrumented run counts.
COUNTERS = tuple(name for name in Traffic.__dataclass_fields__ if name not in ("name", "size", "copied"))
HEADING = (
    f"{'buffer':<16} {'size':>12} {'read unique':>12} {'by group':>12} {'in all':>12} {'written':>12} {'by group':>12} "
    f"{'copied':>12}"
)


def ledger(traffic: Iterable[Traffic]) -> str:
    """A table, one buffer a line, with the totals."""
    rows = list(traffic)
    total = {name: sum(getattr(row, name) for row in rows) for name in ("size", *COUNTERS, "copied")}
    return "\n".join([HEADING, *map(str, rows), str(Traffic("total", **total))])


def copied_unasked(copies: Mapping[str, int], names: Collection[str]) -> list[str]:
    """Sentences for the inputs whose bytes are copied (`Dispatch.copies`), except those of `names`."""
    return [
        f"{name}: {size} bytes are copied before the kernel runs, because the input is not contiguous by rows"
        for name, size in copies.items()
        if name not in names
    ]


def not_read_once(traffic: Sequence[Traffic], names: Iterable[str]) -> list[str]:
    """Sentences for those of the buffers `names` that are not read completely, each byte by one threadgroup only and
    never twice by the same thread. The traffic may be of several dispatches that share the buffers."""
    found = []
    for name in names:
        uses = [use for use in traffic if use.name == name]
        if not uses:
            found.append(f"{name}: no such buffer; there are {sorted({use.name for use in traffic})}")
            continue
        use = sum(uses[1:], uses[0])
        if use.unique_read < use.size:
            found.append(f"{name}: {use.unique_read} of {use.size} bytes are read")
        if use.group_read > use.unique_read:
            found.append(f"{name}: threadgroups read {use.group_read} bytes in all, the buffer has {use.size}")
        if use.reread:
            found.append(f"{name}: {use.reread} bytes are read twice by one thread")
    return found
