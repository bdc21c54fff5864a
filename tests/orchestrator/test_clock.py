"""The core's clock stands still while the process cannot hear; timers fire in their order."""

from __future__ import annotations

from anabranch.orchestrator.clock import LONGEST_STEP_S, SteadyClock
from anabranch.orchestrator.core.events import TimerFired, TimerName
from anabranch.orchestrator.core.instructions import SetTimer
from anabranch.orchestrator.core.timers import Timers


class Source:
    """A monotonic clock set by hand."""

    def __init__(self) -> None:
        self.reading = 1000.0

    def __call__(self) -> float:
        return self.reading


def test_it_starts_at_zero_and_follows_its_source() -> None:
    source = Source()
    clock = SteadyClock(source)
    assert clock.now == 0.0
    source.reading += 0.25
    assert clock.now == 0.0, "only a tick moves it"
    assert clock.tick() == 0.25
    assert clock.now == 0.25


def test_a_stall_counts_as_one_longest_step() -> None:
    source = Source()
    clock = SteadyClock(source)
    source.reading += 3600.0  # SIGSTOP, a suspended machine
    assert clock.tick() == LONGEST_STEP_S
    source.reading += 0.25
    assert clock.tick() == LONGEST_STEP_S + 0.25, "and then it goes on as before"


def test_it_stands_still_while_the_streams_cannot_be_read() -> None:
    source = Source()
    clock = SteadyClock(source)
    clock.hearing = False
    for _ in range(10):
        source.reading += 0.25
        assert clock.tick() == 0.0
    clock.hearing = True
    source.reading += 0.25
    assert clock.tick() == 0.25, "the outage is not made up for"


def test_a_source_that_jumps_back_does_not_turn_it_back() -> None:
    source = Source()
    clock = SteadyClock(source)
    source.reading -= 5.0
    assert clock.tick() == 0.0
    source.reading += 0.125
    assert clock.tick() == 0.125


def set_timer(timers: Timers, name: TimerName, round_: int, after_s: float, now: float = 0.0) -> None:
    timers.set(SetTimer("", name, after_s, round_), now)


def test_timers_fire_in_the_order_of_their_deadlines() -> None:
    timers = Timers()
    set_timer(timers, "sweep", 1, 3.0)
    set_timer(timers, "grace", 2, 1.0)
    set_timer(timers, "round deadline", 3, 2.0)
    assert timers.pop_due(2.0) == [TimerFired("grace", 2), TimerFired("round deadline", 3)]
    assert timers.pop_due(2.0) == [], "each fires once"
    assert timers.pop_due(3.0) == [TimerFired("sweep", 1)]


def test_setting_a_timer_again_moves_it() -> None:
    timers = Timers()
    set_timer(timers, "grace", 1, 1.0)
    set_timer(timers, "grace", 1, 4.0, now=1.0)
    set_timer(timers, "grace", 2, 2.0)
    assert timers.pop_due(4.0) == [TimerFired("grace", 2)]
    assert timers.pop_due(5.0) == [TimerFired("grace", 1)]


def test_when_the_next_timer_is_due() -> None:
    assert Timers().next_at is None, "none is set"
    timers = Timers()
    set_timer(timers, "sweep", 0, 0.5, now=0.5)
    set_timer(timers, "round deadline", 1, 60.0)
    assert timers.next_at == 1.0
    timers.pop_due(1.0)
    assert timers.next_at == 60.0
