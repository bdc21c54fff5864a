"""The core's clock: monotonic, injected, and standing still while the process cannot hear.

A synchronizer that was stopped (SIGSTOP, a suspended machine) or cut off from Redis has missed heartbeats because
of itself, not because of its members. So its clock advances by at most `LONGEST_STEP_S` between two ticks, and
not at all while the streams cannot be read: what arrived meanwhile is read before any timer fires or any member
expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from anabranch.orchestrator.events import TimerName

LONGEST_STEP_S = 0.5  # a tick comes at least every 0.25 s, so more than this was a stall


class SteadyClock:
    """Seconds since creation, less every stall."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._last = source()
        self._now = 0.0

    @property
    def now(self) -> float:
        """The last tick's reading."""
        return self._now

    def tick(self, *, hearing: bool = True) -> float:
        """Advance and return the new reading; `hearing` False: the streams could not be read since the last."""
        reading = self._source()
        if hearing:
            self._now += min(max(0.0, reading - self._last), LONGEST_STEP_S)
        self._last = reading
        return self._now


class Timers:
    """Named deadlines on a clock the caller reads."""

    def __init__(self) -> None:
        self._due: dict[tuple[TimerName, int], float] = {}

    def set(self, name: TimerName, number: int, at: float) -> None:
        self._due[name, number] = at

    def next_in(self, now: float, most_s: float) -> float:
        """Seconds until the next deadline, at most `most_s`."""
        return max(0.0, min([most_s, *(at - now for at in self._due.values())]))

    def pop_due(self, now: float) -> list[tuple[TimerName, int]]:
        """Deadlines that have passed, in their order."""
        due = sorted((at, key) for key, at in self._due.items() if at <= now)
        for _, key in due:
            del self._due[key]
        return [key for _, key in due]
