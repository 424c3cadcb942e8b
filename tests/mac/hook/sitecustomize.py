"""Python imports this module at its start where this folder is on `PYTHONPATH`: it starts the stand-in for a Mac."""

import os
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[3])

if os.environ.get("MAC_STAND_IN"):
    sys.path.insert(0, ROOT)
    from tests.mac.start import start

    sys.path.remove(ROOT)
    start(os.environ["MAC_STAND_IN"])
