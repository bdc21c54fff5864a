"""Whatever happens in whatever order, the core keeps its promises (`world.py` checks them after every event).

Never merged below K; never two open rounds of one fragment, at most τ; every round merged or abandoned in time;
versions contiguous; each contribution applied at most once and booked at most once; books that balance for honest
members; and a new leader that goes on from the stored state and the inboxes breaks none of it.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.orchestrator.core.record import image
from tests.orchestrator.bench import Adoption
from tests.orchestrator.world import NAMES, Plan, World

WHAT = (
    *("together",) * 10,
    *("join",) * 2,
    *("decline",) * 2,
    *("uncalled",) * 3,
    *("again",) * 4,
    *("junk",) * 3,
    *("wait", "die", "wake", "leave", "quorum", "pause", "failover", "return"),
)
ADOPTIONS: tuple[Adoption, ...] = ("overwrite", "rebase")
START: Plan = [("join", who, 0) for who in range(len(NAMES))]

plans = st.lists(
    st.tuples(st.sampled_from(WHAT), st.integers(0, len(NAMES) - 1), st.integers(0, 7)), min_size=5, max_size=40
)
bounded = settings(
    max_examples=60, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@bounded
@given(
    seed=st.integers(0, 2**16),
    quorum=st.integers(1, 3),
    in_flight=st.integers(1, 3),
    adoption=st.sampled_from(ADOPTIONS),
    plan=plans,
)
def test_promises_hold_in_any_order_of_events(
    seed: int, quorum: int, in_flight: int, adoption: Adoption, plan: Plan
) -> None:
    World(seed, quorum, in_flight, adoption).run(START + plan)


@bounded
@given(seed=st.integers(0, 2**16), plan=plans)
def test_the_same_events_at_the_same_times_give_the_same_instructions_and_reasons(seed: int, plan: Plan) -> None:
    first, second = World(seed).run(START + plan), World(seed).run(START + plan)
    assert first.log == second.log
    assert image(first.state) == image(second.state)


@bounded
@given(seed=st.integers(0, 2**16), plan=plans, every=st.integers(1, 4), adoption=st.sampled_from(ADOPTIONS))
def test_leaders_that_die_all_the_time_apply_nothing_twice(
    seed: int, plan: Plan, every: int, adoption: Adoption
) -> None:
    broken: Plan = []
    for number, step in enumerate(plan):
        broken += [step, ("failover", 0, 0)] if number % every == 0 else [step]
    World(seed, adoption=adoption).run(START + broken)


def random_plan(seed: int, length: int) -> Plan:
    dice = random.Random(seed)
    return [(dice.choice(WHAT), dice.randrange(len(NAMES)), dice.randrange(8)) for _ in range(length)]


@pytest.mark.parametrize("adoption", ADOPTIONS)
def test_long_plans_keep_the_promises_and_meet_everything_that_can_happen(adoption: Adoption) -> None:
    seen: Counter[str] = Counter()
    for seed in range(10):
        seen += World(seed, 1 + seed % 3, 1 + seed % 2, adoption).run(START + random_plan(seed, 250)).seen
    expected = {
        "Commit", "merged", "all arrived", "grace expired", "late", "stale", "unknown base", "not finite",
        "told again", "quorum 1/2", "nobody left who was called", "nothing to merge", "declined", "refused", "back",
        "failover", "resend", "turned away", "CloseBooks", "told closed", "Drop", "NewTimeline",
        "its base has other bits than the run's (digest)",
    }  # fmt: skip
    assert not {what for what in expected if not seen[what]}, f"never happened; seen: {dict(seen)}"
