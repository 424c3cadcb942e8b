"""Peak memory and speed of the converter on synthetic checkpoints of real widths, compared with mlx-lm.

    python benchmarks/convert_memory.py [--folder DISK] [--layers 4] [--skip-405b]

1. Meta, 2 shards of 8B's widths (4096/14336, vocabulary 128256, `--layers` layers) -> bfloat16, -> 4 bits.
2. Meta, 8 shards of 405B's widths (16384/53248), one layer -> 4 bits.
3. The Hugging Face folder of (1) -> 4 bits and -> bfloat16, by this converter and by mlx_lm.convert.

Memory is the process's peak resident set minus its resident set after the imports. Times are the shortest of several
rounds in which the two programs alternate. They include flushing to the disk, which mlx-lm itself does not do.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from meta_checkpoint import write_tokenizer_model  # noqa: E402
from torch_zip import contiguous, table, tensor  # noqa: E402

LIMIT_MB = 1024
WIDTHS_8B = {"dim": 4096, "n_heads": 32, "n_kv_heads": 8, "ffn_dim_multiplier": 1.3, "multiple_of": 1024}
WIDTHS_405B = {"dim": 16384, "n_heads": 128, "n_kv_heads": 8, "ffn_dim_multiplier": 1.2, "multiple_of": 4096}
HIDDEN = {2048: 8192, 4096: 14336, 16384: 53248}
COMMON = {"vocab_size": 128256, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True}
# One block of small random bfloat16 numbers, written repeatedly: the values do not affect time or memory.
BLOCK = (np.random.default_rng(0).normal(0, 0.02, 1 << 24).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def shapes(params: dict, count: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in each of `count` shards."""
    dim, kv = params["dim"], params["dim"] // params["n_heads"] * params["n_kv_heads"]
    hidden, vocabulary = HIDDEN[dim] // count, params["vocab_size"] // count
    tensors: dict[str, tuple[int, ...]] = {"tok_embeddings.weight": (vocabulary, dim)}
    for n in range(params["n_layers"]):
        tensors |= {
            f"layers.{n}.attention.wq.weight": (dim // count, dim),
            f"layers.{n}.attention.wk.weight": (kv // count, dim),
            f"layers.{n}.attention.wv.weight": (kv // count, dim),
            f"layers.{n}.attention.wo.weight": (dim, dim // count),
            f"layers.{n}.feed_forward.w1.weight": (hidden, dim),
            f"layers.{n}.feed_forward.w2.weight": (dim, hidden),
            f"layers.{n}.feed_forward.w3.weight": (hidden, dim),
            f"layers.{n}.attention_norm.weight": (dim,),
            f"layers.{n}.ffn_norm.weight": (dim,),
        }
    return tensors | {"norm.weight": (dim,), "output.weight": (vocabulary, dim)}


def write_checkpoint(folder: Path, params: dict, count: int, *, tied: bool = False) -> int:
    """Write a checkpoint in Meta's format, if `tied` with the embedding as its head; returns its size in bytes."""
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps(params))
    write_tokenizer_model(folder / "tokenizer.model", 300)
    tensors = shapes(params, count)
    entries = {
        name: tensor("BF16", str(key), int(np.prod(shape)), shape, contiguous(shape))
        for key, (name, shape) in enumerate(tensors.items())
    }
    for rank in range(count):
        with zipfile.ZipFile(folder / f"consolidated.{rank:02d}.pth", "w") as archive:
            archive.writestr("consolidated/data.pkl", table(entries))
            for key, (name, shape) in enumerate(tensors.items()):
                with archive.open(f"consolidated/data/{key}", "w", force_zip64=True) as file:
                    remaining = int(np.prod(shape))
                    # Norms must be equal in all shards. Matrices may be, but an untied head differs from the embedding.
                    start = 0 if len(shape) == 1 or (tied and name == "output.weight") else key
                    while remaining:
                        block = BLOCK[start : start + remaining]
                        file.write(block)
                        remaining -= block.size
                        start = 0
    return sum(path.stat().st_size for path in folder.glob("*.pth"))


class Run(NamedTuple):
    """Seconds, peak memory in MB above that after the imports, CPU seconds of all threads."""

    seconds: float
    memory: float
    processor: float


def measure(code: str) -> Run:
    """Run a program that defines `work()` in a subprocess, and measure that function."""
    program = f"""
import os, pathlib, resource, sys, time
unit = 1 if sys.platform == "darwin" else 1024
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
{code}
# The memory in use after the imports is less than their peak; macOS reports only the peak.
now = pathlib.Path("/proc/self/statm")
before = int(now.read_text().split()[1]) * resource.getpagesize() / 1e6 if now.exists() else peak()
started, processor = time.perf_counter(), time.process_time()
work()
print("measured", time.perf_counter() - started, peak() - before, time.process_time() - processor)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return Run(*map(float, done.stdout.strip().splitlines()[-1].split()[1:]))


def ours(source: Path, target: Path, options: str) -> Run:
    """Convert with this project."""
    return measure(
        f"from convert.conversion.to_mlx import convert\nfrom convert.conversion.recipe import make_recipe\n"
        f"def work(): convert({str(source)!r}, {str(target)!r}, progress=False, {options})"
    )


def theirs(source: Path, target: Path, options: str) -> Run:
    """Convert with mlx-lm."""
    return measure(
        f"import mlx_lm\nfrom mlx_lm.models import llama\nimport transformers.models.auto.tokenization_auto\n"
        f"def work():\n"
        f"    mlx_lm.convert({str(source)!r}, {str(target)!r}, {options})\n"
        f"    for path in pathlib.Path({str(target)!r}).iterdir(): os.fsync(os.open(path, os.O_RDONLY))"
    )


def disk_speed(folder: Path) -> tuple[float, float]:
    """MB/s of writing and flushing 2 GB, and of reading them back, without the page cache if the system can drop it."""
    path, blocks = folder / "speed", 64
    started = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(blocks):
            file.write(BLOCK)
        file.flush()
        os.fsync(file.fileno())
    written = time.perf_counter() - started
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        started = time.perf_counter()
        while file.read(BLOCK.nbytes):
            pass
    read = time.perf_counter() - started
    path.unlink()
    size = blocks * BLOCK.nbytes / 1e6
    return size / written, size / read


def forget(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that they are read from disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def size_of(folder: Path) -> float:
    """The size of a folder in MB."""
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e6


def run(name: str, convert: Callable[[Path, Path, str], Run], source: Path, target: Path, options: str) -> Run:
    """Convert once, with a cold page cache if the system can drop it, and print the figures."""
    shutil.rmtree(target, ignore_errors=True)
    forget(source)
    measured = convert(source, target, options)
    read, written = size_of(source) / measured.seconds, size_of(target) / measured.seconds
    print(
        f"{name:44} {measured.memory:6.0f} MB peak {measured.seconds:6.1f} s, "
        f"{measured.processor:6.1f} s of processor time, "
        f"read {read:5.0f} MB/s, written {written:5.0f} MB/s",
        flush=True,
    )
    return measured


def side_by_side(work: Path, form: str, rounds: int, our_options: str, peer_options: str) -> Run:
    """The same conversion by both programs, alternating; prints the ratios of the fastest runs."""
    mine, peer = [], []
    for _ in range(rounds):
        mine.append(run(f"Hugging Face -> {form}, this project", ours, work / "hf", work / "ours", our_options))
        peer.append(run(f"Hugging Face -> {form}, mlx_lm.convert", theirs, work / "hf", work / "peer", peer_options))
    for name in ("ours", "peer"):
        shutil.rmtree(work / name)
    (seconds, memory, processor), (their_seconds, their_memory, their_processor) = min(mine), min(peer)
    print(
        f"{'':44} {form}: memory {memory / their_memory:.2f}, speed {their_seconds / seconds:.2f}, "
        f"processor time {processor / their_processor:.2f} times mlx-lm's"
    )
    return max(mine, key=lambda measured: measured.memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where to work (default: the system's temporary folder)")
    parser.add_argument("--layers", type=int, default=4, help="layers of the 8B-wide checkpoint")
    parser.add_argument("--rounds", type=int, default=3, help="how often to convert beside mlx-lm")
    parser.add_argument("--skip-405b", action="store_true", help="without the 405B-wide checkpoint (15 GB)")
    args = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="convert-", dir=args.folder))
    peaks = []
    try:
        written, read = disk_speed(work)
        print(f"the disk itself: writes {written:.0f} MB/s, reads {read:.0f} MB/s")
        params = WIDTHS_8B | COMMON | {"n_layers": args.layers}
        print(f"8B widths, {args.layers} layers, 2 shards: {write_checkpoint(work / 'meta', params, 2) / 1e9:.2f} GB")
        peaks.append(run("Meta -> bfloat16", ours, work / "meta", work / "hf", ""))
        peaks.append(run("Meta -> 4 bits", ours, work / "meta", work / "hf4", "recipe=make_recipe(4)"))
        shutil.rmtree(work / "meta")
        shutil.rmtree(work / "hf4")
        for form, options in {"4 bits": ("recipe=make_recipe(4)", "quantize=True"), "bfloat16": ("", "")}.items():
            peaks.append(side_by_side(work, form, args.rounds, *options))
        shutil.rmtree(work / "hf")
        if not args.skip_405b:
            params = WIDTHS_405B | COMMON | {"n_layers": 1}
            print(f"405B widths, 1 layer, 8 shards: {write_checkpoint(work / 'meta', params, 8) / 1e9:.2f} GB")
            peaks.append(run("Meta -> 4 bits", ours, work / "meta", work / "out", "recipe=make_recipe(4)"))
    finally:
        shutil.rmtree(work)
    worst = max(measured.memory for measured in peaks)
    print(f"highest peak above the imports: {worst:.0f} MB; the limit is {LIMIT_MB} MB")
    return int(worst > LIMIT_MB)


if __name__ == "__main__":
    sys.exit(main())
