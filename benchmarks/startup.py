"""Start-up times: `--help`, and process start to first token, compared with mlx-lm on the same demo model.

Run by `make bench`, or `.venv/bin/python benchmarks/startup.py [ROUNDS]`. The programs alternate. A round
of mlx-lm takes minutes on Linux, where it computes in float16, for which MLX has no fast CPU kernels.
"""

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from convert.demo import demo_model

BIN = Path(sys.executable).parent
PROMPT = "What is the capital of France?"


def seconds_to_end(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def seconds_to_first_token(command: list[str], header: bytes = b"") -> float:
    """Start `command` and time the first byte of its standard output that follows `header`."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"HF_HUB_OFFLINE": "1"}) as process:
        output = b""
        while not (output.startswith(header) and len(output) > len(header)):
            byte = process.stdout.read(1)
            if not byte:
                raise SystemExit(f"{command[0]} ended without a token: {output!r}")
            output += byte
        elapsed = time.perf_counter() - start
        process.stdout.read()
    return elapsed


def main(rounds: int) -> None:
    """Measure and print the times."""
    help_times = [seconds_to_end([str(BIN / "mlx-llama3"), "--help"]) for _ in range(11)][1:]
    print(f"mlx-llama3 --help: {1000 * statistics.median(help_times):.0f} ms (median of {len(help_times)})")

    options = ["--model", str(demo_model()), "--prompt", PROMPT, "--max-tokens", "1"]
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(seconds_to_first_token([str(BIN / "mlx-llama3"), "generate", *options]))
        theirs.append(seconds_to_first_token([str(BIN / "mlx_lm.generate"), *options], header=b"==========\n"))
        print(f"  {ours[-1]:.2f} s  {theirs[-1]:.2f} s", flush=True)
    our_median, their_median = statistics.median(ours), statistics.median(theirs)
    print(f"process start to first token, medians of {rounds}:")
    print(f"  mlx-llama3 generate: {our_median:.2f} s")
    print(f"  mlx_lm.generate:     {their_median:.2f} s")
    print(f"  ratio:               {our_median / their_median:.2f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 3)
