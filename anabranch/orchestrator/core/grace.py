"""How long a round waits after its quorum: moving averages and the grace window (DESIGN section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.spec import RoundsSpec

FACTOR = 0.25  # of the exponential moving averages


def average(old: float | None, value: float) -> float:
    """Exponential moving average with `FACTOR`; the first value counts whole."""
    return value if old is None else old + FACTOR * (value - old)


@dataclass
class Averages:
    """Seconds: the pacing worker's step, opening to quorum, closing to broadcast. None: not seen yet."""

    step_s: float | None = None
    quorum_s: float | None = None
    sync_s: float | None = None

    def interval_s(self, rounds: RoundsSpec) -> float:
        """(H/P)·ξ_step: between two openings."""
        return rounds.interval_steps * (self.step_s or 0.0)

    def slack_s(self, rounds: RoundsSpec) -> float:
        """τ·(H/P)·ξ_step − (ξ_quorum + ξ_sync): time left until the fragment's next version is missed."""
        return rounds.in_flight * self.interval_s(rounds) - (self.quorum_s or 0.0) - (self.sync_s or 0.0)

    def grace_s(self, rounds: RoundsSpec) -> float:
        """clamp(γ·slack, 0, cap), cap = (H/P)·ξ_step unless given. With H = P this is the published rule."""
        cap = self.interval_s(rounds) if rounds.grace_cap_s is None else rounds.grace_cap_s
        return max(0.0, min(rounds.grace_factor * self.slack_s(rounds), cap))

    def deadline_s(self, rounds: RoundsSpec) -> float:
        """How long a round may stay below its quorum."""
        return max(rounds.deadline_min_s, rounds.deadline_intervals * self.interval_s(rounds))
