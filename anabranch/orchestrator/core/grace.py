"""How long a round waits after its quorum: moving averages and the grace window (DESIGN section 4)."""

from __future__ import annotations

from dataclasses import dataclass

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


def slack_s(averages: Averages, in_flight: int, interval_steps: float) -> float:
    """τ·(H/P)·ξ_step − (ξ_quorum + ξ_sync): time left until the fragment's next version is missed."""
    return (
        in_flight * interval_steps * (averages.step_s or 0.0) - (averages.quorum_s or 0.0) - (averages.sync_s or 0.0)
    )


def grace_s(
    averages: Averages, *, in_flight: int, interval_steps: float, factor: float, cap_s: float | None
) -> float:
    """clamp(γ·slack, 0, cap), cap = (H/P)·ξ_step unless given. With H = P this is the published rule."""
    cap = interval_steps * (averages.step_s or 0.0) if cap_s is None else cap_s
    return max(0.0, min(factor * slack_s(averages, in_flight, interval_steps), cap))


def deadline_s(averages: Averages, *, interval_steps: float, intervals: float, minimum_s: float) -> float:
    """How long a round may stay below its quorum."""
    return max(minimum_s, intervals * interval_steps * (averages.step_s or 0.0))
