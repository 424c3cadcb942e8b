"""Leaves out these tests where the harness cannot run, except that of `host.py`, which says so there."""

import platform
import sys

from tests.metal_harness.host import unsupported

collect_ignore_glob = ["test_[!h]*.py"] if unsupported(sys.platform, platform.machine()) else []
