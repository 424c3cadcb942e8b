"""The decisions on the kernels of this machine, stored in the user's cache folder between runs.

The file is small JSON and only a cache: if it is damaged, of another format or unreadable, the trials run again, and
one line is logged.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from mlx_llama3.system.files import replacing
from mlx_llama3.system.locks import exclusive

log = logging.getLogger(__name__)

FORMAT = 1
MAX_DECISIONS = 512  # in the file; the oldest are dropped first

# "absent": there is nothing to try, for the reason given. The others are the results of a trial.
State = Literal["used", "slower", "failed", "absent"]
_TRIAL_STATES = ("used", "slower", "failed")


@dataclass(frozen=True)
class Decision:
    """Whether a kernel is used, and why. `ratio`: its time divided by its reference's, if both were timed."""

    state: State
    reason: str
    ratio: float | None = None


class DecisionFile:
    """Decisions by key. Processes may use the file concurrently: a write merges with what others have written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logged: set[str] = set()

    def read(self) -> dict[str, Decision]:
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

    def add(self, decisions: Mapping[str, Decision]) -> None:
        """Add these decisions to the file. A failure is only logged."""
        self._change(set(decisions), decisions)  # removed first, so that the newest are at the end

    def remove(self, key: str) -> None:
        """Remove a decision from the file. A failure is only logged."""
        self._change({key}, {})

    @contextmanager
    def trying(self) -> Iterator[None]:
        """A lock for a trial: it waits while another process tries kernels.

        Concurrent trials would disturb each other's timings, and a decision in the file is final only after its trial.
        """
        with ExitStack() as stack:
            with suppress(OSError):  # without a lock if the folder is not writable
                self.path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(exclusive(self.path.with_suffix(".trying")))
            yield

    def _change(self, without: set[str], decisions: Mapping[str, Decision]) -> None:
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

    def _replace(self, decisions: Mapping[str, Decision]) -> None:
        """Replace the file atomically: a reader sees the old file or the new one."""
        value = {"format": FORMAT, "decisions": {key: asdict(decision) for key, decision in decisions.items()}}
        with replacing(self.path) as partial:
            partial.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _parse(text: bytes) -> dict[str, Decision]:
    value = json.loads(text)
    if not isinstance(value, dict) or not isinstance(value.get("decisions"), dict):
        raise ValueError("it holds no decisions")
    if value.get("format") != FORMAT:
        raise ValueError(f"its format is {value.get('format')!r:.20}, this version's is {FORMAT}")
    return {key: _decision(fields) for key, fields in value["decisions"].items()}


def _decision(value: Any) -> Decision:
    if not isinstance(value, dict) or value.keys() != {"state", "reason", "ratio"}:
        raise ValueError("a decision has other fields")
    state, reason, ratio = value["state"], value["reason"], value["ratio"]
    if state not in _TRIAL_STATES or not isinstance(reason, str) or not isinstance(ratio, int | float | None):
        raise ValueError("a decision's fields have other types")
    return Decision(state, reason, ratio)
