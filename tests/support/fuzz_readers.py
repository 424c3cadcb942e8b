"""Fuzzing of the three readers of foreign files: torch's zips, safetensors, GGUF.

    python tests/support/fuzz_readers.py [--inputs 100000] [--seed 0]

Every input is a valid file with random damage or inserted pieces of attacks. It must be read, or refused with a
one-line `UserError`: no other exception, at most one second, at most 256 MB. An input that breaks this stays in its
file and ends the run.
"""

import argparse
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import tiny_gguf
from gguf_builder import gguf_bytes
from torch_zip import bf16_bits, contiguous, table, tensor, write_pth, write_zip

from convert.sources.gguf import open_gguf
from convert.storage.safetensors_reader import read_safetensors
from convert.storage.torch_pickle import StatePickle
from convert.storage.torch_zip import read_pth
from mlx_llama3.errors import UserError

SECONDS = 1.0
EXTRA_BYTES = 256 << 20
NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    31,
    32,
    255,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
# Pieces of attacks and of the formats' own grammar.
PICKLE = [bytes([code]) for code in b"()RQt\x85\x86}]usebio.\x81\x93"] + [
    b"cos\nsystem\n",
    b"cbuiltins\neval\n",
    b"ctorch._utils\n_rebuild_tensor_v2\n",
    b"ctorch\nFloatStorage\n",
    b"ccollections\nOrderedDict\n",
    b"q\x00",
    b"h\x00",
    b"r\xff\xff\xff\xff",
    b"X\xff\xff\xff\x7f",
    b"\x8a\xff",
    b"\x8d" + b"\xff" * 8,
    b"\x95" + b"\xff" * 8,
    b"J\xff\xff\xff\xff",
]
JSON = b"""" { } [ ] : , - 1e999 NaN 99999999999999999999 null true "F32" "BF16" "shape" "data_offsets" "__metadata__"
\\ud800 [0,0] [[[[[[[ "w":""".split()
ANY = [
    b"\0",
    b"\xff",
    b"\n",
    b"../",
    b"GGUF",
    *(b"PK" + end for end in (b"\x01\x02", b"\x03\x04", b"\x05\x06", b"\x06\x06")),
]


class TooLong(Exception):
    """An input took longer than `SECONDS`."""


def damaged(data: bytes, chance: random.Random, pieces: list[bytes]) -> bytes:
    """`data` with one to four random changes: bits, numbers, spans removed, repeated or moved, pieces, truncation."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 4))):
        at = chance.randrange(len(changed) + 1)
        span = chance.choice((1, 1, 2, 4, 8, 30, 100))
        match chance.randrange(7):
            case 0 if at < len(changed):
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                width = chance.choice((1, 2, 4, 8))
                number = chance.choice(NUMBERS) % (1 << 8 * width)
                changed[at : at + width] = number.to_bytes(width, chance.choice(("little", "little", "big")))
            case 2:
                del changed[at : at + span]
            case 3:
                changed[at:at] = changed[at : at + span]
            case 4:
                source = chance.randrange(len(changed) + 1)
                changed[at : at + span] = changed[source : source + span]
            case 5:
                changed[at : at + chance.choice((0, span))] = chance.choice(pieces)
            case 6:
                del changed[at:]
    return bytes(changed)


class Pth:
    """Torch's zips: a damaged zip, or a valid zip with a damaged pickle."""

    name = "pth"

    def __init__(self, folder: Path) -> None:
        rows = np.arange(35, dtype=np.float32).reshape(5, 7)
        self.path = folder / "seed.pth"
        write_pth(
            self.path, {"w": ("F32", rows), "b": ("BF16", bf16_bits(rows)), "n": ("F16", rows[0].astype(np.float16))}
        )
        self.whole = self.path.read_bytes()
        self.pickle = table(
            {"w": tensor("F32", "0", 35, (5, 7), contiguous((5, 7))), "n": tensor("F16", "1", 7, (3,), (2,), offset=1)}
        )
        self.storages = {"0": rows.tobytes(), "1": rows[0].astype(np.float16).tobytes()}

    def make(self, path: Path, chance: random.Random) -> None:
        if chance.random() < 0.5:
            path.write_bytes(damaged(self.whole, chance, ANY + PICKLE))
        else:
            write_zip(path, damaged(self.pickle, chance, PICKLE), self.storages)

    def read(self, path: Path) -> None:
        for stored in read_pth(path).values():
            if stored.shape:
                assert stored.rows(0, stored.shape[0]).shape == stored.shape
            stored.checksum.verify()


class Pickle(Pth):
    """The pickle reader alone, without a zip, which is much faster."""

    name = "pickle"

    def make(self, path: Path, chance: random.Random) -> None:
        self.data = damaged(self.pickle, chance, PICKLE)

    def read(self, path: Path) -> None:
        assert isinstance(StatePickle(self.data, str(path)).load(), dict)


class Safetensors:
    """Damaged headers, with right or wrong header lengths."""

    name = "safetensors"

    def __init__(self, folder: Path) -> None:
        entries = {"v": ("F32", [2, 3], 24), "w": ("BF16", [4], 8), "u": ("U8", [0, 3], 0)}
        header, at = {"__metadata__": {"format": "pt"}}, 0
        for name, (dtype, shape, size) in entries.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            at += size
        self.header, self.data = json.dumps(header).encode(), bytes(range(at))

    def make(self, path: Path, chance: random.Random) -> None:
        header, data = damaged(self.header, chance, JSON), self.data
        length = len(header) if chance.random() < 0.8 else chance.choice(NUMBERS)
        if chance.random() < 0.2:
            data = data[: chance.randrange(len(data))]
        path.write_bytes(struct.pack("<Q", length) + header + data)

    def read(self, path: Path) -> None:
        for stored in read_safetensors(path)[0].values():
            if stored.shape:
                assert stored.rows(0, stored.shape[0]).shape == stored.shape


class Gguf:
    """Small complete models; most damage is in the header."""

    name = "gguf"

    def __init__(self, folder: Path) -> None:
        args = replace(tiny_gguf.ARGS, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, hidden_dim=32)
        weights = tiny_gguf.random_weights(args)
        self.seeds = [
            gguf_bytes(tiny_gguf.metadata(args), tiny_gguf.entries(weights, args, kind)) for kind in ("Q8_0", "F16")
        ]

    def make(self, path: Path, chance: random.Random) -> None:
        seed = chance.choice(self.seeds)
        end = seed.rindex(b"output_norm") + 60 if chance.random() < 0.9 else len(seed)
        path.write_bytes(damaged(seed[:end], chance, ANY) + seed[end:])

    def read(self, path: Path) -> None:
        source = open_gguf(path)
        for stored in source.tensors.values():
            stored.rows(0, stored.shape[0])


READERS: dict[str, Callable[[Path], Pth | Safetensors | Gguf]] = {
    reader.name: reader for reader in (Pth, Pickle, Safetensors, Gguf)
}


@contextmanager
def limits() -> Iterator[None]:
    """Limit the address space to EXTRA_BYTES more than now, and raise `TooLong` when the alarm timer expires."""

    def ring(*_: object) -> None:
        raise TooLong

    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, ring)
    statm = Path("/proc/self/statm")
    if statm.exists():
        now = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + EXTRA_BYTES, before[1]))
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(name: str, inputs: int, seed: int, folder: Path) -> Counter[str]:
    """Run one reader on `inputs` inputs; returns the numbers read and refused. Raises at the first violation."""
    reader, counts = READERS[name](folder), Counter[str]()
    path = folder / f"input.{name}"
    with limits():
        for number in range(inputs):
            reader.make(path, random.Random(f"{name} {seed} {number}"))
            signal.setitimer(signal.ITIMER_REAL, SECONDS)
            try:
                reader.read(path)
                counts["read"] += 1
            except UserError as error:
                if "\n" in str(error) or len(str(error)) > 2000:
                    raise AssertionError(f"{name}, seed {seed}, input {number}: {error}") from error
                counts["refused"] += 1
            except BaseException as error:
                error.add_note(f"{name}, seed {seed}, input {number}, kept as {path}")
                raise
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    return counts


def main() -> int:
    """Fuzz all readers, and print the numbers of inputs read and refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, help="for each reader (default: 100000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").exists() else None))
    for name in READERS:
        started = time.monotonic()
        counts = fuzz(name, args.inputs, args.seed, folder)
        seconds = time.monotonic() - started
        outcome = f"{counts['read']} read, {counts['refused']} refused"
        print(f"{name:12} {args.inputs} inputs: {outcome}, {seconds:.0f} s", flush=True)
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
