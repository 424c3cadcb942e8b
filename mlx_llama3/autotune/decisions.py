"""What was found about each kernel on this machine, kept in the user's cache folder from one run to the next.

A small JSON file, never needed: one that is damaged, foreign or closed to us costs the trials again, and a line of log.
"""

import fcntl
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

log = logging.getLogger(__name__)

FORMAT = 1
MOST = 512  # decisions in the file; the oldest go first

# "absent": there is nothing to try, for the reason given. The others are what a trial found.
State = Literal["used", "slower", "failed", "absent"]
_KEPT = ("used", "slower", "failed")


@dataclass(frozen=True)
class Decision:
    """Whether a kernel serves, and why. `ratio` is its time over its reference's where both were timed."""

    state: State
    reason: str
    ratio: float | None = None


class DecisionFile:
    """Decisions by key. Two processes may use it at once: each writes the other's decisions again with its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told: set[str] = set()

    def read(self) -> dict[str, Decision]:
        """All decisions; none if there is no such file, or, with a line of log, if it cannot be used."""
        try:
            text = self.path.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            self._warn(f"cannot be read ({error.strerror}); the kernels are tried again")
            return {}
        try:
            return _parse(text)
        except (ValueError, RecursionError) as error:  # no JSON, no Unicode, nested without an end, not ours
            self._warn(f"not a file of kernel decisions ({error}); the kernels are tried again")
            return {}

    def add(self, decisions: Mapping[str, Decision]) -> None:
        """Write these too; where that fails, one line of log and nothing else."""
        self._change(set(decisions), decisions)  # taken out first: the newest stand at the end

    def remove(self, key: str) -> None:
        """Write all but this one; as `add`."""
        self._change({key}, {})

    @contextmanager
    def trying(self) -> Iterator[None]:
        """Around a trial: while another process tries kernels, this one waits. Both would disturb each other's times,
        and what the file says of a trial is true only once it has ended."""
        with ExitStack() as stack:
            with suppress(OSError):  # a folder that is closed to us: without waiting
                self.path.parent.mkdir(parents=True, exist_ok=True)
                lock = stack.enter_context(open(self.path.with_suffix(".trying"), "w", encoding="utf-8"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _change(self, without: set[str], decisions: Mapping[str, Decision]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._alone():
                kept = {key: each for key, each in self.read().items() if key not in without}
                self._replace(dict(list((kept | decisions).items())[-MOST:]))
        except OSError as error:
            self._warn(f"cannot be written ({error.strerror}); kernels are tried at each start")

    def _warn(self, what: str) -> None:
        """One line, once."""
        if what not in self._told:
            self._told.add(what)
            log.warning("%s: %s", self.path, what)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """While another process reads, adds and writes, this one waits."""
        with open(self.path.with_suffix(".lock"), "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go of when the file is closed
            yield

    def _replace(self, decisions: Mapping[str, Decision]) -> None:
        """Whoever reads sees the old file or the new one, whole."""
        value = {"format": FORMAT, "decisions": {key: asdict(each) for key, each in decisions.items()}}
        handle, name = tempfile.mkstemp(prefix=self.path.name, dir=self.path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump(value, file, indent=1)
            os.replace(name, self.path)
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise


def _parse(text: bytes) -> dict[str, Decision]:
    value = json.loads(text)
    if not isinstance(value, dict) or not isinstance(value.get("decisions"), dict):
        raise ValueError("it holds no decisions")
    if value.get("format") != FORMAT:
        raise ValueError(f"its format is {value.get('format')!r:.20}, this version's is {FORMAT}")
    return {key: _decision(each) for key, each in value["decisions"].items()}


def _decision(value: Any) -> Decision:
    if not isinstance(value, dict) or value.keys() != {"state", "reason", "ratio"}:
        raise ValueError("a decision has other fields")
    state, reason, ratio = value["state"], value["reason"], value["ratio"]
    if state not in _KEPT or not isinstance(reason, str) or not isinstance(ratio, int | float | None):
        raise ValueError("a decision's fields have other types")
    return Decision(state, reason, ratio)
