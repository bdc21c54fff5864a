"""Timers as every driver of the core keeps them: one that is set again takes the place of the one before."""

from __future__ import annotations

from anabranch.orchestrator.core.events import TimerFired
from anabranch.orchestrator.core.instructions import SetTimer


class Timers:
    """Deadlines on a clock the caller reads."""

    def __init__(self) -> None:
        self._due: dict[tuple[str, int], tuple[float, TimerFired]] = {}

    def set(self, order: SetTimer, now: float) -> None:
        self._due[order.name, order.round] = (now + order.after_s, TimerFired(order.name, order.round))

    @property
    def next_at(self) -> float | None:
        """When the next one is due; None if none is set."""
        return min((at for at, _ in self._due.values()), default=None)

    def pop_due(self, now: float) -> list[TimerFired]:
        """Those that are due, in their order."""
        due = sorted((at, key) for key, (at, _) in self._due.items() if at <= now)
        return [self._due.pop(key)[1] for _, key in due]
