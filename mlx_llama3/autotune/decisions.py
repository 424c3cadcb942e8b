"""The decisions on the kernels of this machine, stored in the user's cache folder between runs.

The file is small JSON and only a cache: if it is damaged, of another format or unreadable, the trials run again, and
one line is logged.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_llama3.model.kernels.kernel_set import Rows
from mlx_llama3.system.files import replacing
from mlx_llama3.system.locks import exclusive

log = logging.getLogger(__name__)

FORMAT = 2  # 1 had one decision a kernel, for all numbers of rows
MAX_DECISIONS = 512  # in the file; the oldest are dropped first

# "absent": there is nothing to try, for the reason given. The others are the results of a trial.
State = Literal["used", "slower", "failed", "absent"]
_TRIAL_STATES = ("used", "slower", "failed")
# The longest wait for another process's trials, which take some seconds at most, compilation included.
WAIT_SECONDS = 60.0
_ROWS = {rows.name: rows for rows in (Rows.ALL, *Rows)}


@dataclass(frozen=True)
class Decision:
    """Whether a kernel is used, and why. `ratio`: its time divided by its reference's, if both were timed."""

    state: State
    reason: str
    ratio: float | None = None


# The decision at each number of rows that was tried. One that holds for all of them is under `Rows.ALL`.
ByRows = Mapping[Rows, Decision]


class TrialsBusy(Exception):
    """Another process has been trying kernels for `WAIT_SECONDS`; its trial may hang."""


class DecisionFile:
    """Decisions by key. Processes may use the file concurrently: a write merges with what others have written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logged: set[str] = set()
        self._is_busy = False

    def read(self) -> dict[str, ByRows]:
        """All decisions; none if the file does not exist, or if it cannot be used (which is logged)."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn(f"cannot be read ({error.strerror}); the kernels are tried again")
            return {}
        try:
            return _parse(text)
        except (ValueError, RecursionError) as error:  # not JSON, not Unicode, nested too deeply, or another format
            self._warn(f"not a file of kernel decisions ({error}); the kernels are tried again")
            return {}

    def add(self, decisions: Mapping[str, ByRows]) -> None:
        """Add these decisions to the file. A failure is only logged."""
        self._change(set(decisions), decisions)  # removed first, so that the newest are at the end

    def remove(self, key: str) -> None:
        """Remove a decision from the file. A failure is only logged."""
        self._change({key}, {})

    @contextmanager
    def trying(self) -> Iterator[None]:
        """A lock for a trial: it waits while another process tries kernels.

        Concurrent trials would disturb each other's timings, and a decision in the file is final only after its trial.
        Raises `TrialsBusy` if that takes `WAIT_SECONDS`, and at once when it did so before; one line is logged.
        """
        with ExitStack() as stack:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                seconds = 0.0 if self._is_busy else WAIT_SECONDS
                stack.enter_context(exclusive(self.path.with_suffix(".trying"), seconds=seconds))
            except TimeoutError:
                self._is_busy = True
                problem = f"another program has been trying kernels for {WAIT_SECONDS:.0f} seconds; if it hangs, end it"
                self._warn(f"{problem}. Until then kernels that were not tried are not used")
                raise TrialsBusy(problem) from None
            except OSError:  # without a lock if the folder is not writable
                pass
            yield

    def _change(self, without: set[str], decisions: Mapping[str, ByRows]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with exclusive(self.path.with_suffix(".lock")):
                others = {key: decision for key, decision in self.read().items() if key not in without}
                self._replace(dict(list((others | decisions).items())[-MAX_DECISIONS:]))
        except OSError as error:
            self._warn(f"cannot be written ({error.strerror}); kernels are tried at each start")

    def _warn(self, problem: str) -> None:
        """Log a problem, once."""
        if problem not in self._logged:
            self._logged.add(problem)
            log.warning("%s: %s", self.path, problem)

    def _replace(self, decisions: Mapping[str, ByRows]) -> None:
        """Replace the file atomically: a reader sees the old file or the new one."""
        plain = {key: {rows.name: asdict(each) for rows, each in by_rows.items()} for key, by_rows in decisions.items()}
        value = {"format": FORMAT, "decisions": plain}
        with replacing(self.path) as partial:
            partial.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _parse(text: bytes) -> dict[str, ByRows]:
    value = json.loads(text)
    if not isinstance(value, dict) or not isinstance(value.get("decisions"), dict):
        raise ValueError("it holds no decisions")
    if value.get("format") != FORMAT:
        raise ValueError(f"its format is {value.get('format')!r:.20}, this version's is {FORMAT}")
    return {key: _by_rows(entries) for key, entries in value["decisions"].items()}


def _by_rows(value: Any) -> ByRows:
    if not isinstance(value, dict) or not value or not value.keys() <= _ROWS.keys():
        raise ValueError("a kernel has no decision by rows")
    return {_ROWS[name]: _decision(fields) for name, fields in value.items()}


def _decision(value: Any) -> Decision:
    if not isinstance(value, dict) or value.keys() != {"state", "reason", "ratio"}:
        raise ValueError("a decision has other fields")
    state, reason, ratio = value["state"], value["reason"], value["ratio"]
    if state not in _TRIAL_STATES or not isinstance(reason, str) or not isinstance(ratio, int | float | None):
        raise ValueError("a decision's fields have other types")
    return Decision(state, reason, ratio)
