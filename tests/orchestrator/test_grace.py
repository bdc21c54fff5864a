"""Moving averages, the grace window and the deadline: DESIGN section 4 as arithmetic."""

from __future__ import annotations

import pytest

from anabranch.orchestrator.core.grace import Averages, average
from anabranch.spec import RoundsSpec


def test_the_first_value_of_an_average_counts_whole() -> None:
    assert average(None, 4.0) == 4.0


def test_later_values_count_a_quarter() -> None:
    assert average(4.0, 8.0) == 5.0
    assert average(5.0, 1.0) == 4.0


def test_slack() -> None:
    averages = Averages(step_s=0.5, quorum_s=1.0, sync_s=0.25)
    assert averages.slack_s(RoundsSpec(inner_steps=24, fragments=8, in_flight=2)) == 2 * 3.0 * 0.5 - (1.0 + 0.25)


def test_with_h_equal_p_the_window_is_the_published_rule() -> None:
    averages = Averages(step_s=1.0, quorum_s=0.5, sync_s=0.5)
    for tau in (1, 2, 3):
        window = averages.grace_s(RoundsSpec(inner_steps=8, fragments=8, in_flight=tau))
        assert window == pytest.approx(min(0.8 * (tau * 1.0 - 1.0), 1.0)), "γ·slack, up to one step"


@pytest.mark.parametrize(
    ("quorum_s", "cap_s", "expected"),
    [
        (0.0, None, 1.5),  # γ·slack = 2.4, the cap is one interval: 3 · 0.5
        (2.0, None, 0.8),  # γ·(3 − 2)
        (4.0, None, 0.0),  # no slack left
        (2.0, 0.5, 0.5),  # a cap of one's own
        (0.0, 10.0, 2.4),
        (0.0, 0.0, 0.0),
    ],
)
def test_the_window_is_clamped(quorum_s: float, cap_s: float | None, expected: float) -> None:
    averages = Averages(step_s=0.5, quorum_s=quorum_s)
    window = averages.grace_s(RoundsSpec(inner_steps=24, fragments=8, grace_factor=0.8, grace_cap_s=cap_s))
    assert window == pytest.approx(expected)


def test_before_anything_was_measured_there_is_no_window() -> None:
    assert Averages().grace_s(RoundsSpec(inner_steps=24, fragments=8)) == 0.0


def test_the_deadline_is_some_intervals_and_at_least_a_minimum() -> None:
    averages = Averages(step_s=2.0)
    assert averages.deadline_s(RoundsSpec(inner_steps=24, fragments=8)) == 24.0
    assert averages.deadline_s(RoundsSpec(inner_steps=8, fragments=8)) == 10.0
    assert Averages().deadline_s(RoundsSpec(inner_steps=24, fragments=8)) == 10.0
