"""Leaves out these tests where the harness cannot run."""

import platform
import sys

from tests.metal_harness.host import unsupported

collect_ignore_glob = ["test_*.py"] if unsupported(sys.platform, platform.machine()) else []
