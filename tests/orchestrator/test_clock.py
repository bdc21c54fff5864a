"""The core's clock stands still while the process cannot hear; timers fire in their order."""

from __future__ import annotations

from anabranch.orchestrator.clock import LONGEST_STEP_S, SteadyClock, Timers


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
    for _ in range(10):
        source.reading += 0.25
        assert clock.tick(hearing=False) == 0.0
    source.reading += 0.25
    assert clock.tick() == 0.25, "the outage is not made up for"


def test_a_source_that_jumps_back_does_not_turn_it_back() -> None:
    source = Source()
    clock = SteadyClock(source)
    source.reading -= 5.0
    assert clock.tick() == 0.0
    source.reading += 0.125
    assert clock.tick() == 0.125


def test_timers_fire_in_the_order_of_their_deadlines() -> None:
    timers = Timers()
    timers.set("sweep", 1, 3.0)
    timers.set("grace", 2, 1.0)
    timers.set("round deadline", 3, 2.0)
    assert timers.pop_due(2.0) == [("grace", 2), ("round deadline", 3)]
    assert timers.pop_due(2.0) == [], "each fires once"
    assert timers.pop_due(3.0) == [("sweep", 1)]


def test_setting_a_timer_again_moves_it() -> None:
    timers = Timers()
    timers.set("grace", 1, 1.0)
    timers.set("grace", 1, 5.0)
    timers.set("grace", 2, 2.0)
    assert timers.pop_due(4.0) == [("grace", 2)]
    assert timers.pop_due(5.0) == [("grace", 1)]


def test_how_long_until_the_next_timer() -> None:
    timers = Timers()
    assert timers.next_in(0.0, 0.2) == 0.2
    timers.set("sweep", 0, 1.0)
    assert timers.next_in(0.5, 5.0) == 0.5
    assert timers.next_in(2.0, 5.0) == 0.0, "overdue"


def test_the_wait_for_a_timer_is_bounded() -> None:
    timers = Timers()
    timers.set("round deadline", 1, 60.0)
    assert timers.next_in(0.0, 0.2) == 0.2
