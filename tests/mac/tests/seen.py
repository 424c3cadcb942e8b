"""A module of the tests, run as one of the project's and as another one: what it sees of the system."""

MODULE = """
import os, platform, socket, sys
from pathlib import Path

def seen():
    import sys as inner
    return {
        "platforms": [sys.platform, inner.platform, platform.system(), platform.machine(), os.uname().machine],
        "affinity": hasattr(os, "sched_getaffinity"),
        "paths": [path.exists() for path in (Path("/proc/meminfo"), Path("/dev/full"), Path("/dev/null"))],
        "text": text(Path("/proc/self/stat").read_text),
        "open": text(lambda: open("/proc/self/stat").read()),
        "keepalive": [hasattr(socket, name) for name in ("TCP_KEEPALIVE", "TCP_KEEPIDLE")],
    }

def text(read):
    try:
        return read()
    except FileNotFoundError:
        return "missing"
"""


def run(namespace: dict) -> dict:
    exec(compile(MODULE, "module", "exec"), namespace)
    return namespace["seen"]()
