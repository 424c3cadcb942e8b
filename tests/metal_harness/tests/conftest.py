"""The harness compiles for Linux on x86-64 or arm64; elsewhere its tests are left out."""

import platform
import sys

HERE_IT_RUNS = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")
collect_ignore_glob = [] if HERE_IT_RUNS else ["test_*.py"]
