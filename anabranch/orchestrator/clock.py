"""The core's clock: monotonic, injected, and standing still while the process cannot hear.

A synchronizer that was stopped (SIGSTOP, a suspended machine) or cut off from Redis has missed heartbeats because
of itself, not because of its members. So its clock advances by at most `LONGEST_STEP_S` between two ticks, and
not at all while the streams cannot be read: what arrived meanwhile is read before any timer fires or any member
expires.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LONGEST_STEP_S = 0.5  # a tick comes at least every 0.25 s, so more than this was a stall


class SteadyClock:
    """Seconds since creation, less every stall."""

    def __init__(self, source: Callable[[], float] = time.monotonic) -> None:
        self.hearing = True  # False: the streams cannot be read
        self._source = source
        self._heard = source()
        self._last = source()
        self._now = 0.0

    @property
    def now(self) -> float:
        """The last tick's reading."""
        return self._now

    def hear(self, hearing: bool) -> None:
        """The streams were read, or could not be."""
        self.hearing = hearing
        if hearing:
            self._heard = self._source()

    @property
    def silent_s(self) -> float:
        """Seconds since the streams were last read."""
        return self._source() - self._heard

    def tick(self) -> float:
        """Advance and return the new reading."""
        reading = self._source()
        if self.hearing:
            self._now += min(max(0.0, reading - self._last), LONGEST_STEP_S)
        self._last = reading
        return self._now
