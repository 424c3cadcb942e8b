"""Mutation testing of the fused kernels: small faults are planted in their sources, one at a time.

    python tests/support/kernel_mutants.py [WORD...]

The tests of a kernel must fail with each of its faults, which `kernel_mutants.txt` lists. No file is changed: the fault
is planted when Python imports the module. Prints the mutants that live, and those that no longer apply. WORD: only
mutants whose file or text contains it.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIST = Path(__file__).with_suffix(".txt")
COPIES = 2  # mutants at a time
SECONDS = 600  # a mutant that runs on is one that was noticed

KERNELS = "../mlx_llama3/model/kernels"
TAKES = f"{KERNELS}/test_takes.py"
SDPA = ["test_extreme_scores.py", "test_sdpa_quantized.py", f"{KERNELS}/test_sdpa_quantized.py"]
# The tests that should notice, in `tests/metal`; those that notice most come first.
TESTS = {
    "mlx_llama3/model/kernels/add_rms_norm.py": ["test_add_rms_norm.py", TAKES],
    "mlx_llama3/model/kernels/rope_qkv.py": ["test_rope_qkv.py", TAKES],
    "mlx_llama3/model/kernels/metal.py": ["test_add_rms_norm.py"],
    "mlx_llama3/model/kernels/qmv.py": ["test_swiglu_qmv.py", TAKES],
    "mlx_llama3/model/kernels/swiglu_qmv.py": ["test_swiglu_qmv.py"],
    "mlx_llama3/model/kernels/norm_qmv.py": ["test_norm_swiglu_qmv.py", TAKES],
    "mlx_llama3/model/kernels/norm_swiglu_qmv.py": ["test_norm_swiglu_qmv.py"],
    "mlx_llama3/model/kernels/norm_rope_qkv.py": ["test_norm_rope_qkv.py", TAKES],
    "mlx_llama3/model/kernels/sdpa_quantized.py": SDPA,
    "mlx_llama3/model/kernels/sdpa_quantized_metal.py": SDPA,
    "mlx_llama3/model/compiled.py": ["test_compiled_blocks.py"],
}


@dataclass(frozen=True)
class Mutant:
    """`old` in the file at `path` becomes `new`. equivalent: why no test can notice, "" if one must."""

    path: str
    old: str
    new: str
    equivalent: str

    def __str__(self) -> str:
        return f"{self.path}: {self.old}  ->  {self.new}"

    def planted(self) -> str | None:
        """The file's text with the fault; None if `old` does not occur exactly once."""
        pattern = r"\s+".join(map(re.escape, self.old.split()))
        new = self.new.replace("\\n", "\n")
        text, count = re.subn(pattern, lambda _: new, (ROOT / self.path).read_text("utf-8"))
        return text if count == 1 else None


def listed() -> list[Mutant]:
    """The mutants of the list."""
    mutants, path = [], ""
    for line in LIST.read_text("utf-8").splitlines():
        if line.startswith("# "):
            path = line.removeprefix("# ")
        elif line:
            fault, _, equivalent = line.partition("  ## ")
            old, _, new = fault.partition("  ->  ")
            mutants.append(Mutant(path, old, new, equivalent))
    return mutants


def plant(path: Path, text: str) -> None:
    """Make imports of the file `path` compile `text`, and those of all others what they hold."""
    get_code = SourceFileLoader.get_code

    def planted(loader: SourceFileLoader, name: str) -> object:
        return compile(text, loader.path, "exec") if Path(loader.path) == path else get_code(loader, name)

    SourceFileLoader.get_code = planted


def result_of(index: int, mutant: Mutant, cache: Path) -> str:
    """Run the tests in a process of their own, and print what is not as expected.

    Returns "killed", "lives", "equivalent", "does not apply", or "does not run" if the tests cannot be imported.
    """
    result = "does not apply" if mutant.planted() is None else verdict(index, cache)
    if result == "lives" and mutant.equivalent:
        return "equivalent"
    if result != "killed" or mutant.equivalent:
        print(f"{result}: {mutant}", flush=True)
    return result


def verdict(index: int, cache: Path) -> str:
    """What the tests say about a mutant: "killed", "lives" or "does not run"."""
    command = [sys.executable, __file__, "--planted", str(index)]
    environment = {**os.environ, "METAL_ON_CPU_CACHE": str(cache), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return "killed"
    if done.returncode > 1:  # less than 0: the process has crashed
        print(done.stdout[-2000:], flush=True)
        return "does not run"
    return "killed" if done.returncode else "lives"


def run_tests(index: int) -> int:
    """The process that runs the tests of a mutant; -1: of none, all tests."""
    tests = {f"tests/metal/{test}": None for each in TESTS.values() for test in each}
    if index >= 0:
        mutant = listed()[index]
        plant(ROOT / mutant.path, mutant.planted())
        tests = {f"tests/metal/{test}": None for test in TESTS[mutant.path]}
    return pytest.main(["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests])


def main() -> int:
    words = sys.argv[1:]
    chosen = [each for each in enumerate(listed()) if not words or any(word in str(each[1]) for word in words)]
    if run_tests(-1):
        print("the tests fail without a mutant")
        return 1
    from tests.metal_harness.build import cache_folder  # pytest has put the root on the path

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(COPIES) as pool:
        cache = Path(folder, "cache")  # keeps the kernels of the mutants out of the user's own
        shutil.copytree(cache_folder(), cache)
        results = list(pool.map(lambda each: result_of(*each, cache), chosen))
    print(f"{len(results)} mutants: " + ", ".join(f"{results.count(each)} {each}" for each in sorted(set(results))))
    return int(not {"killed", "equivalent"}.issuperset(results))


if __name__ == "__main__":
    sys.exit(run_tests(int(sys.argv[2])) if sys.argv[1:2] == ["--planted"] else main())
