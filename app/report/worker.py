"""One section of a report, measured in a process of its own, because a kernel that faults on the GPU ends its process.

    python -m mlx_llama3_main app.report.worker SECTION FOLDER

prints the section as JSON. A `UserError` is printed on standard error, with exit code 2.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlx_llama3.errors import UserError


def main(section: str, folder: Path) -> int:
    """Measure and print one section."""
    try:
        print(json.dumps(SECTIONS[section](folder)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _kernels(folder: Path) -> Any:
    from app.report.kernels import kernel_section
    from mlx_llama3.checkpoint.loading import load_model

    return kernel_section(load_model(folder))


def _step(folder: Path) -> Any:
    from app.report.kernels import step_section
    from mlx_llama3.checkpoint.loading import load_model

    return step_section(load_model(folder))


def _decoding(folder: Path) -> Any:
    from app.report.decoding import decoding_section
    from mlx_llama3.api import load_folder

    model, tokenizer = load_folder(folder)  # tries the kernels, and uses those that it chooses
    return decoding_section(model, tokenizer, model.kernels)


SECTIONS: dict[str, Callable[[Path], Any]] = {"kernels": _kernels, "step": _step, "decoding": _decoding}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
