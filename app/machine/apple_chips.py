"""The memory bandwidth of Apple's chips, from the technical specifications of the Macs."""

import json
import re
import subprocess

# Chip name -> 10**9 bytes per second. A name with two memory systems maps the least number of GPU cores to it.
BANDWIDTH: dict[str, float | dict[int, float]] = {
    "M1": 68.25,
    "M1 Pro": 200,
    "M1 Max": 400,
    "M1 Ultra": 800,
    "M2": 100,
    "M2 Pro": 200,
    "M2 Max": 400,
    "M2 Ultra": 800,
    "M3": 100,
    "M3 Pro": 150,
    "M3 Max": {30: 300, 40: 400},
    "M3 Ultra": 819,
    "M4": 120,
    "M4 Pro": 273,
    "M4 Max": {32: 410, 40: 546},
    "M5": 153,
    "M5 Pro": 307,
    "M5 Max": {32: 460, 40: 614},
}


def bandwidth(chip: str, cores: int | None = None) -> float | None:
    """The memory bandwidth of a chip such as "Apple M2 Pro" in 10**9 bytes per second; None if it is not in the table.

    cores: the number of its GPU cores, which distinguishes two chips of one name; None asks the system if needed.
    """
    name = re.sub(r"^Apple ", "", chip).strip()
    entry = BANDWIDTH.get(name)
    if not isinstance(entry, dict):
        return entry
    cores = gpu_cores() if cores is None else cores
    return None if cores is None else entry.get(max((least for least in entry if least <= cores), default=0))


def gpu_cores() -> int | None:
    """The number of GPU cores that macOS reports; None if it reports none."""
    command = ["/usr/sbin/system_profiler", "SPDisplaysDataType", "-json"]
    try:
        output = subprocess.run(command, capture_output=True, timeout=20, check=True).stdout
        return next(
            int(display["sppci_cores"])
            for display in json.loads(output)["SPDisplaysDataType"]
            if "sppci_cores" in display
        )
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError, StopIteration):
        return None
