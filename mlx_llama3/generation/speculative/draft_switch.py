"""Switch drafting off while it costs more than it saves, measured during generation."""

from collections import deque
from collections.abc import Callable
from statistics import mean, median
from time import perf_counter


class DraftSwitch:
    """On while drafting gives more tokens a second than decoding without drafts.

    The time from one result to the next is measured for undrafted passes (over one position) and for drafted passes
    (over a draft). A run begins with `FIRST` undrafted tokens. Then drafting pays if

        mean(tokens of a drafted pass) / median(its seconds) > 1 / median(seconds of an undrafted pass)

    over the last `WINDOW` passes of each kind. Medians ignore the pause of a person who stops the output. If drafting
    does not pay, `PAUSE` tokens are decoded without drafts before the next try; each failure in a row doubles the
    pause, up to `LONGEST`. The first drafted pass after a pause is not timed, because the draft model catches up in it.

    The switch decides when to draft and never changes the tokens, see `Speculation.decode`.
    """

    FIRST = 4
    WINDOW = 8
    PAUSE = 32
    LONGEST = 512

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._undrafted_seconds: deque[float] = deque(maxlen=self.WINDOW)
        self._drafted: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)  # (tokens, seconds)
        self._last: float | None = None
        # _paused_for: tokens until the next try. _pause: length of the next pause. _warm: the draft model caught up.
        self._paused_for, self._pause, self._warm = 0, self.PAUSE, False

    @property
    def on(self) -> bool:
        """Whether the next tokens may be drafted."""
        return len(self._undrafted_seconds) >= self.FIRST and self._paused_for == 0

    def begin(self) -> None:
        """Start a new answer; the time since the last one is not measured."""
        self._last = None

    def measure(self, tokens: int, *, drafted: bool) -> None:
        """Call after each pass, with the number of tokens that it gave."""
        now, last = self._clock(), self._last
        self._last = now
        if not drafted:
            self._count_undrafted(tokens, None if last is None else now - last)
        elif last is not None and self._warm:
            self._drafted.append((tokens, now - last))
            self._decide()
        self._warm = self._warm or drafted

    def _count_undrafted(self, tokens: int, seconds: float | None) -> None:
        if seconds is not None:
            self._undrafted_seconds.append(seconds)
        self._paused_for = max(0, self._paused_for - tokens)

    def _decide(self) -> None:
        if len(self._drafted) < self.WINDOW:
            return
        counts, seconds = zip(*self._drafted, strict=True)
        if mean(counts) * median(self._undrafted_seconds) > median(seconds):
            self._pause = self.PAUSE
            return
        self._paused_for, self._pause = self._pause, min(2 * self._pause, self.LONGEST)
        self._drafted.clear()
        self._warm = False
