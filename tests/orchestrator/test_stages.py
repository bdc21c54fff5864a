"""The stages of a round: the table is what happens, all of it happens, and ARCHITECTURE.md shows the same table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.stages import TRANSITIONS, Stage
from anabranch.orchestrator.core.state import Round
from anabranch.queue import messages as msg
from tests.orchestrator.bench import Bench, make_spec, one, only, told, told_one
from tests.orchestrator.test_core_properties import START, random_plan
from tests.orchestrator.world import World

ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"
HEADING = "### Stages of a round"
Move = tuple[Stage, Stage]

IN_TABLE: set[Move] = {(old, new) for old, following in TRANSITIONS.items() for new in following}


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[Move]:
    """What every round does from now on."""
    seen: list[Move] = []
    move = Round.move

    def watched(round_: Round, stage: Stage) -> None:
        seen.append((round_.stage, stage))
        move(round_, stage)

    monkeypatch.setattr(Round, "move", watched)
    return seen


# --- what random worlds do not do -------------------------------------------------------------------------


def past_its_deadline() -> Bench:
    """Round 1 has its quorum, `b` is missing, and the grace window is much longer than the deadline, which passed."""
    bench = Bench(make_spec(grace_cap_s=60.0, deadline_intervals=0.1, deadline_min_s=2.0))
    bench.worker("a", step_s=8.0)
    bench.worker("b", step_s=8.0)
    bench.steps(a=2, b=2)
    bench.contribute("a")
    bench.elapse(3.0)
    assert bench.state.rounds[1].stage == "overtime"
    return bench


def the_missing_one_comes_after_the_deadline() -> None:
    order = one(do.Merge, past_its_deadline().contribute("b"))
    assert order.reason.startswith("all arrived after 3.")


def the_window_ends_after_the_deadline() -> None:
    order = one(do.Merge, past_its_deadline().elapse(60.0))
    assert order.reason.startswith("grace expired")


def no_time_is_left_to_wait() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.elapse(1.0)  # more than the slack
    assert one(do.Merge, bench.contribute("a")).reason.startswith("grace expired after 1.00 s")


def the_quorum_is_lost_after_the_deadline() -> None:
    bench = past_its_deadline()
    bench.send_offer(bench.offer("a"))  # the replacement is never fetched
    assert told_one(msg.Abandoned, bench.elapse(60.0)).reason == "quorum 0/1"


def below_its_quorum_when_the_window_ends() -> tuple[Bench, list[do.Instruction]]:
    """Round 1 after its window: `a` sends a newer one in the place of the only one that was in hand."""
    bench = Bench()
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("a")
    result = bench.send_offer(bench.offer("a"))
    assert not only(do.Merge, bench.elapse(1.0))
    assert bench.state.rounds[1].stage == "short"
    return bench, result


def the_quorum_is_back_after_the_window() -> None:
    bench, result = below_its_quorum_when_the_window_ends()
    order = one(do.Merge, bench.fetched(one(do.Fetch, result).offer))
    assert order.reason.startswith("grace expired")


def the_quorum_never_comes_back() -> None:
    bench, _ = below_its_quorum_when_the_window_ends()
    assert told_one(msg.Abandoned, bench.elapse(10.0)).reason == "quorum 0/1"


def the_deadline_finds_a_window_open_and_no_quorum() -> None:
    bench = Bench(make_spec(grace_cap_s=60.0, deadline_intervals=0.1, deadline_min_s=2.0))
    bench.worker("a", step_s=8.0)
    bench.worker("b", step_s=8.0)
    bench.steps(a=2, b=2)
    bench.contribute("a")
    bench.send_offer(bench.offer("a"))
    assert bench.state.rounds[1].stage == "grace"
    assert told_one(msg.Abandoned, bench.elapse(3.0)).reason == "quorum 0/1"


SCENARIOS: list[tuple[Callable[[], None], list[Stage]]] = [
    (no_time_is_left_to_wait, ["grace", "merging"]),
    (the_missing_one_comes_after_the_deadline, ["grace", "overtime", "merging"]),
    (the_window_ends_after_the_deadline, ["grace", "overtime", "merging"]),
    (the_quorum_is_lost_after_the_deadline, ["grace", "overtime", "abandoned"]),
    (the_quorum_is_back_after_the_window, ["grace", "short", "merging"]),
    (the_quorum_never_comes_back, ["grace", "short", "abandoned"]),
    (the_deadline_finds_a_window_open_and_no_quorum, ["grace", "abandoned"]),
]


@pytest.mark.parametrize(("scenario", "path"), SCENARIOS, ids=lambda value: getattr(value, "__name__", ""))
def test_where_a_rare_path_leads(scenario: Callable[[], None], path: list[Stage], moves: list[Move]) -> None:
    scenario()
    first: list[Stage] = ["collecting", *path]
    assert moves[: len(path)] == list(zip(first, path, strict=False))


# --- the table --------------------------------------------------------------------------------------------


def test_whatever_rounds_do_is_in_the_table_and_all_of_it_happens(moves: list[Move]) -> None:
    """`Round.move` asserts the first half."""
    for seed in range(6):
        World(seed, quorum=1 + seed % 3, in_flight=1 + seed % 2).run(START + random_plan(seed, 200))
    assert moves, "worlds whose rounds do nothing"
    for scenario, _ in SCENARIOS:
        scenario()
    assert set(moves) == IN_TABLE


def test_a_move_that_is_not_in_the_table_fails() -> None:
    round_ = Round(1, 0, 0, 0.0, 10.0, set())
    for stage in get_args(Stage):
        if ("collecting", stage) not in IN_TABLE:
            with pytest.raises(AssertionError, match="round 1: collecting →"):
                round_.move(stage)
    assert round_.stage == "collecting"


def test_every_stage_has_its_row_and_a_way_in_and_out() -> None:
    assert set(TRANSITIONS) == set(get_args(Stage))
    assert {new for _, new in IN_TABLE} == set(get_args(Stage)) - {"collecting"}
    assert [stage for stage, following in TRANSITIONS.items() if not following] == ["merged", "abandoned"]


def test_a_round_that_came_to_its_end_is_open_no_more(moves: list[Move]) -> None:
    bench = Bench()
    bench.worker("a")
    bench.steps(a=2)
    assert told(msg.Merged, bench.merge(one(do.Merge, bench.contribute("a"))))
    assert moves[-1] == ("merging", "merged")
    assert not bench.state.rounds


def test_architecture_shows_the_same_table() -> None:
    text = ARCHITECTURE.read_text(encoding="utf-8")
    assert HEADING in text, f"no heading {HEADING!r}"
    section = text.split(HEADING, 1)[1].split("\n#", 1)[0]
    rows = [
        [cell.strip() for cell in line.strip("| ").split("|")] for line in section.splitlines() if line[:1] == "|"
    ]
    assert rows[0] == ["from", "to", "when"]
    assert all(set(cell) <= set("-: ") for cell in rows[1])
    assert rows[2:] == [[old, new, when] for old, following in TRANSITIONS.items() for new, when in following.items()]
