"""When drafting is on, measured with a clock that the test sets."""

import pytest

from mlx_llama3.generation.speculative.draft_switch import DraftSwitch


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Run:
    """A generation whose passes take known times."""

    def __init__(self, plain: float = 1.0) -> None:
        self.clock = Clock()
        self.switch = DraftSwitch(self.clock)
        self.seconds = plain
        self.begin()

    def begin(self) -> None:
        self.switch.begin()
        self.switch.measure(1, drafted=False)  # the prompt's pass, whose start is unknown

    def plain(self, count: int = 1) -> None:
        for _ in range(count):
            self.clock.now += self.seconds
            self.switch.measure(1, drafted=False)

    def drafted(self, tokens: int, seconds: float, count: int = 1) -> None:
        for _ in range(count):
            self.clock.now += seconds
            self.switch.measure(tokens, drafted=True)

    def pause(self) -> int:
        """Count undrafted tokens until drafting is on."""
        count = 0
        while not self.switch.on:
            self.plain()
            count += 1
        return count


def ready() -> Run:
    run = Run()
    run.plain(DraftSwitch.FIRST)
    run.drafted(1, 50.0)  # the draft model's prefill is not counted
    return run


def test_a_run_begins_with_undrafted_tokens_to_time_them():
    run = Run()
    assert run.pause() == DraftSwitch.FIRST


@pytest.mark.parametrize(
    ("tokens", "seconds", "pays"), [(3, 2.9, True), (3, 3.1, False), (1, 0.9, True), (1, 1.0, False)]
)
def test_it_is_on_while_drafted_passes_give_more_tokens_a_second(tokens, seconds, pays):
    run = ready()
    run.drafted(tokens, seconds, DraftSwitch.WINDOW - 1)
    assert run.switch.on  # too few passes to decide
    run.drafted(tokens, seconds)
    assert run.switch.on is pays


def test_the_rule_uses_the_mean_of_tokens_and_the_median_of_times():
    run = ready()
    for tokens in (5, 1) * (DraftSwitch.WINDOW // 2):
        run.drafted(tokens, 2.5)
    assert run.switch.on
    run.drafted(3, 1000.0)  # the person stopped the output
    run.drafted(3, 2.5, 3)
    assert run.switch.on


def test_the_pause_doubles_while_it_does_not_pay_and_starts_anew_once_it_did():
    run, pauses = ready(), []
    for _ in range(6):
        while run.switch.on:
            run.drafted(1, 2.0)
        pauses.append(run.pause())
    assert pauses == [32, 64, 128, 256, 512, 512]
    run.drafted(1, 2.0)  # after a pause the first one is not timed
    run.drafted(4, 2.0, DraftSwitch.WINDOW)
    while run.switch.on:
        run.drafted(1, 2.0)
    assert run.pause() == 32


def test_it_notices_worse_drafts_and_slower_undrafted_passes():
    run = ready()
    run.drafted(4, 2.0, 100)
    run.drafted(1, 2.0, DraftSwitch.WINDOW - 2)
    assert not run.switch.on
    run.seconds = 10.0
    run.pause()
    run.drafted(1, 2.0, 2 * DraftSwitch.WINDOW)
    assert run.switch.on


def test_the_time_between_two_answers_is_not_measured_and_earlier_times_stay():
    run = ready()
    run.drafted(3, 2.9, DraftSwitch.WINDOW)
    run.clock.now += 1e6
    run.begin()
    assert run.switch.on
    run.drafted(3, 2.9, 3)
    assert run.switch.on
    run.drafted(3, 3.1, DraftSwitch.WINDOW)
    run.begin()
    assert not run.switch.on
