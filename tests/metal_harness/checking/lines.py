"""From an address in a compiled kernel to the line of its source: reads the DWARF 4 line table of an ELF library.

The format: dwarfstd.org, DWARF 4, section 6.2. Only what clang writes for `-gline-tables-only -gdwarf-4` is read.
"""

import bisect
import struct
from functools import cache
from pathlib import Path

# Standard opcodes (6.2.5.2).
COPY, ADVANCE_PC, ADVANCE_LINE, SET_FILE, CONST_ADD_PC, FIXED_ADVANCE_PC = 1, 2, 3, 4, 8, 9
# Extended ones (6.2.5.3).
END_SEQUENCE, SET_ADDRESS = 1, 2


@cache
def line_table(library: Path) -> list[tuple[int, str, int]]:
    """(address from the library's base, file, line), ascending; line 0 where code belongs to no line."""
    elf = library.read_bytes()
    offset, size = _sections(elf).get(".debug_line", (0, 0))
    table = elf[offset : offset + size]
    rows: list[tuple[int, str, int]] = []
    at = 0
    while at < len(table):
        (length,) = struct.unpack_from("<I", table, at)
        rows += _unit(table[at + 4 : at + 4 + length])
        at += 4 + length
    return sorted(rows, key=lambda row: row[0])


def find_line(library: Path, address: int) -> tuple[str, int]:
    """(file, line) of the instruction that contains `address`; ("", 0) if the table does not say.

    For a return address, ask for the byte before it: that lies in the call.
    """
    table = line_table(library)
    index = bisect.bisect_right(table, address, key=lambda row: row[0]) - 1
    # Line 0 is code that the compiler moved; what stands before it is the nearest answer.
    while index >= 0 and table[index][2] == 0:
        index -= 1
    return table[index][1:] if index >= 0 else ("", 0)


def section_sizes(library: Path) -> dict[str, int]:
    """Name -> size in bytes of each section of an ELF file."""
    return {name: size for name, (_, size) in _sections(library.read_bytes()).items()}


def _sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Name -> (offset, size) of a 64-bit little-endian ELF file's sections."""
    (headers,) = struct.unpack_from("<Q", elf, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", elf, 58)
    entries = [struct.unpack_from("<I20xQQ", elf, headers + i * entry_size) for i in range(count)]  # name, offset, size
    names = elf[entries[names_index][1] :]
    return {names[name : names.index(b"\0", name)].decode(): (offset, size) for name, offset, size in entries}


class _Reader:
    """A cursor over bytes."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data, self.at = data, at

    def take(self, layout: str) -> int:
        (value,) = struct.unpack_from("<" + layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def uleb(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self.take("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def sleb(self) -> int:
        start = self.at
        value = self.uleb()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) else value

    def text(self) -> str:
        end = self.data.index(b"\0", self.at)
        value = self.data[self.at : end].decode()
        self.at = end + 1
        return value


def _unit(data: bytes) -> list[tuple[int, str, int]]:
    """Rows of one unit, whose length field is cut off already (6.2.4)."""
    reader = _Reader(data)
    version = reader.take("H")
    if version != 4:
        raise ValueError(f"line table of DWARF version {version}, expected 4")
    header_length = reader.take("I")
    program = reader.at + header_length
    step = reader.take("B")
    reader.at += 2  # operations an instruction, default of is_stmt
    line_base, line_range, opcode_base = reader.take("b"), reader.take("B"), reader.take("B")
    operands = [0] + [reader.take("B") for _ in range(opcode_base - 1)]
    while reader.text():
        pass  # folders
    files = [""]
    while name := reader.text():
        files.append(name)
        for _ in range(3):
            reader.uleb()  # folder, time, size
    return _run(_Reader(data, program), files, step, line_base, line_range, operands)


def _run(
    reader: _Reader, files: list[str], step: int, line_base: int, line_range: int, operands: list[int]
) -> list[tuple[int, str, int]]:
    """The line number program (6.2.5): one row each time it says so."""
    rows, address, file, line = [], 0, 1, 1
    opcode_base = len(operands)
    while reader.at < len(reader.data):
        opcode = reader.take("B")
        if opcode >= opcode_base:
            address += (opcode - opcode_base) // line_range * step
            line += line_base + (opcode - opcode_base) % line_range
            rows.append((address, files[file], line))
        elif opcode == COPY:
            rows.append((address, files[file], line))
        elif opcode == ADVANCE_PC:
            address += reader.uleb() * step
        elif opcode == ADVANCE_LINE:
            line += reader.sleb()
        elif opcode == SET_FILE:
            file = reader.uleb()
        elif opcode == CONST_ADD_PC:
            address += (255 - opcode_base) // line_range * step
        elif opcode == FIXED_ADVANCE_PC:
            address += reader.take("H")
        elif opcode == 0:
            end = reader.uleb() + reader.at
            kind = reader.take("B")
            if kind == SET_ADDRESS:
                address = reader.take("Q")
            elif kind == END_SEQUENCE:
                rows.append((address, "", 0))
                address, file, line = 0, 1, 1
            reader.at = end
        else:
            for _ in range(operands[opcode]):
                reader.uleb()
    return rows
