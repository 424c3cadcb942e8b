"""Whether drafting pays, by the clock of the run itself."""

from collections import deque
from collections.abc import Callable
from statistics import mean, median
from time import perf_counter


class DraftSwitch:
    """On while drafts give more tokens a second than the same run gives without them.

    The rule. Two things are timed, from one result to the next: passes over one position, and passes over a draft. A
    run begins with `FIRST` plain tokens. Then drafting pays if

        mean(tokens of a drafted pass) / median(its seconds) > 1 / median(seconds of a plain pass)

    over the last `WINDOW` of each; medians, because a person who stops the output is no slow pass. Where it does not
    pay, `PAUSE` tokens come without drafts, and after them it is tried again; each failure in a row doubles the pause,
    up to `LONGEST`. The first drafted pass after a pause is not timed: the draft model catches up in it.

    It decides when to draft, never what comes out: the tokens are the same, see `Speculation.decode`.
    """

    FIRST = 4
    WINDOW = 8
    PAUSE = 32
    LONGEST = 512

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._plain: deque[float] = deque(maxlen=self.WINDOW)
        self._drafted: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)
        self._last: float | None = None
        self._wait, self._pause, self._warm = 0, self.PAUSE, False

    @property
    def on(self) -> bool:
        """Whether the next tokens may be drafted."""
        return len(self._plain) >= self.FIRST and self._wait == 0

    def begin(self) -> None:
        """A new answer begins: the time since the last one is nobody's."""
        self._last = None

    def measure(self, tokens: int, *, drafted: bool) -> None:
        """A pass was read that gave so many tokens."""
        now, last = self._clock(), self._last
        self._last = now
        if not drafted:
            self._count_plain(tokens, None if last is None else now - last)
        elif last is not None and self._warm:
            self._drafted.append((tokens, now - last))
            self._decide()
        self._warm = self._warm or drafted

    def _count_plain(self, tokens: int, seconds: float | None) -> None:
        if seconds is not None:
            self._plain.append(seconds)
        self._wait = max(0, self._wait - tokens)

    def _decide(self) -> None:
        if len(self._drafted) < self.WINDOW:
            return
        counts, seconds = zip(*self._drafted, strict=True)
        if mean(counts) * median(self._plain) > median(seconds):
            self._pause = self.PAUSE
            return
        self._wait, self._pause = self._pause, min(2 * self._pause, self.LONGEST)
        self._drafted.clear()
        self._warm = False
