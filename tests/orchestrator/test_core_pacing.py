"""When a round opens, of which fragment, and who is called (DESIGN section 4)."""

from __future__ import annotations

import pytest

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.queue import messages as msg
from tests.orchestrator.bench import TIMELINE, TOKENS, Bench, make_spec, one, told, told_one, why

# --- pacing: when a round opens ---------------------------------------------------------------------------


def test_a_round_opens_when_the_fastest_worker_made_its_share_of_steps() -> None:
    bench = Bench()  # H/P = 2, K = 1
    bench.worker("fast")
    bench.worker("slow")
    assert not told(msg.Call, bench.steps(fast=1, slow=1))
    result = bench.steps(fast=1)
    opened = told_one(msg.Call, result)
    assert why(msg.Call, result) == "fast made 2 steps (H/P = 2)"
    assert (opened.fragment, opened.base, opened.timeline) == (0, 0, TIMELINE)


def test_with_a_quorum_of_two_the_second_fastest_paces() -> None:
    bench = Bench(make_spec(quorum=2))
    for name in ("a", "b", "c"):
        bench.worker(name)
    assert not told(msg.Call, bench.steps(a=5, b=1))
    assert why(msg.Call, bench.steps(b=1)) == "b made 2 steps (H/P = 2)"


def test_with_quorum_all_the_slowest_paces() -> None:
    bench = Bench(make_spec(quorum="all"))
    for name in ("a", "b", "c"):
        bench.worker(name)
    assert not told(msg.Call, bench.steps(a=5, b=5, c=1))
    assert why(msg.Call, bench.steps(c=1)) == "c made 2 steps (H/P = 2)"


def test_a_round_that_cannot_reach_its_quorum_is_not_opened_and_opens_as_soon_as_it_can() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    assert not told(msg.Call, bench.steps(a=20))
    bench.worker("b")  # with its first step
    assert told_one(msg.Call, bench.log).called == [1, 2], "not an interval later: it has been due for long"
    assert not told(msg.Call, bench.steps(a=1, b=1)), "and then as usual"


def test_a_worker_that_goes_on_lets_a_due_round_open() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=1, b=1)
    bench.elapse(3.5)  # both are stuck
    assert not told(msg.Call, bench.steps(a=2))
    assert told_one(msg.Call, bench.steps(b=1)).called == [1, 2]


def test_who_can_answer_later_is_called_for_the_round_that_is_open() -> None:
    bench = Bench(make_spec(quorum=1, in_flight=1))
    bench.worker("a")
    assert told_one(msg.Call, bench.steps(a=2)).called == [1]
    bench.worker("b")  # with its first step
    _, late = told(msg.Call, bench.log)
    assert (late.round, late.called) == (1, [2]), "those that were called before are not asked again"
    assert bench.state.rounds[1].called == {1, 2}
    assert not told(msg.Call, bench.steps(b=1)), "once"


@pytest.mark.parametrize("answer", ["declined", "refused", "in hand"])
def test_who_has_answered_is_not_called_again_for_the_same_round(answer: str) -> None:
    bench = Bench(make_spec(quorum=2, in_flight=1))
    bench.worker("a")
    b = bench.worker("b")
    assert told_one(msg.Call, bench.steps(a=2, b=2)).called == [1, 2]
    if answer == "declined":
        decline = msg.Decline(incarnation=b.incarnation, fragment=0, round=1, reason="no")
        bench.send(ev.Heard("b", bench.entry(), decline))
    elif answer == "refused":
        bench.send_offer(bench.offer("b", base_digest=b"?" * 32))
    else:
        bench.contribute("b")
    before = len(bench.log)
    bench.elapse(1.0)  # with sweeps
    bench.steps(a=1, b=1)
    assert not told(msg.Call, bench.log[before:])


def test_with_quorum_all_a_round_waits_for_everybodys_adoption() -> None:
    bench = Bench(make_spec(quorum="all", inner_steps=1, fragments=1), sizes=(10,))
    bench.worker("a")
    b = bench.worker("b")
    b.adopted[0] = -1
    assert not told(msg.Call, bench.steps(a=1, b=1)), "1 of 1 would be merged"
    b.adopted[0] = 0
    assert told_one(msg.Call, bench.steps(b=1)).called == [1, 2]


def test_with_quorum_all_who_never_adopts_is_waited_for_no_longer_than_a_deadline() -> None:
    bench = Bench(make_spec(quorum="all", inner_steps=1, fragments=1, deadline_min_s=2.0), sizes=(10,))
    bench.worker("a")
    bench.worker("b").adopted[0] = -1
    assert not told(msg.Call, bench.steps(a=1, b=1))
    for _ in range(3):
        bench.elapse(0.375)
        assert not told(msg.Call, bench.steps(a=1, b=1))
    bench.elapse(1.0)
    assert told_one(msg.Call, bench.log).called == [1]


def test_steps_made_before_an_opening_do_not_pace_the_next_round_whenever_they_are_reported() -> None:
    bench = Bench(make_spec(in_flight=8))
    bench.worker("a")
    bench.worker("b")
    assert len(told(msg.Call, bench.steps(a=2, b=2))) == 1, "not one for each report"
    bench.elapse(0.125)
    assert not told(msg.Call, bench.steps(b=1))


def test_the_pacer_carries_its_overshoot_into_the_next_interval() -> None:
    bench = Bench(make_spec(inner_steps=8))  # an interval of 4 steps
    bench.worker("a")
    assert told(msg.Call, bench.steps(a=5))
    assert not told(msg.Call, bench.steps(a=2))
    assert told(msg.Call, bench.steps(a=1)), "1 carried over + 3 = 4"


def test_missed_openings_coalesce() -> None:
    bench = Bench()
    bench.worker("a")
    assert len(told(msg.Call, bench.steps(a=20))) == 1, "ten intervals at once are one opening"
    assert not told(msg.Call, bench.steps(a=1)), "and nothing of them is left"


def test_claimed_steps_are_capped_by_the_time_that_passed() -> None:
    bench = Bench()
    liar = bench.worker("liar")
    liar.train(1_000_000)
    bench.send(liar.heartbeat())  # no time has passed: one step at most
    assert bench.state.members[liar.incarnation].steps == 2
    assert not told(msg.Call, bench.log)


# --- in flight: how many, and of which fragments ----------------------------------------------------------


def test_at_most_tau_rounds_are_in_flight() -> None:
    bench = Bench(make_spec(fragments=4, inner_steps=8, in_flight=2), sizes=(1, 1, 1, 1))
    bench.worker("a")
    for _ in range(5):
        bench.steps(a=2)
    assert [r.fragment for r in bench.state.rounds.values()] == [0, 1]


def test_a_fragment_in_flight_is_skipped() -> None:
    bench = Bench(make_spec(in_flight=8))
    bench.worker("a")
    for _ in range(4):
        bench.steps(a=2)
    assert [o.fragment for o in told(msg.Call, bench.log)] == [0, 1], "P = 2: never a fragment twice"


def test_fragments_take_turns() -> None:
    bench = Bench(make_spec(fragments=3, inner_steps=6), sizes=(1, 1, 1))
    bench.worker("a")
    for _ in range(6):
        fragment = told_one(msg.Call, bench.steps(a=2)).fragment
        bench.merge(one(do.Merge, bench.contribute("a", fragment)))
    assert [o.fragment for o in told(msg.Call, bench.log)] == [0, 1, 2, 0, 1, 2]
    assert [f.version for f in bench.state.fragments] == [2, 2, 2]


# --- who is called ----------------------------------------------------------------------------------------


def test_only_workers_that_hold_the_base_and_tokens_are_called() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("other-base").adopted[0] = -1
    bench.worker("no-tokens")
    bench.steps(**{"other-base": 1, "no-tokens": 1})
    bench.puppets["no-tokens"].held[0] = 0
    bench.elapse(0.5)
    assert told_one(msg.Call, bench.steps(a=2)).called == [1]


def test_who_has_not_made_a_step_is_not_called() -> None:
    bench = Bench()
    bench.worker("a")
    bench.join("idle")
    bench.puppets["idle"].held = [TOKENS, TOKENS]
    bench.elapse(0.5)
    assert told_one(msg.Call, bench.steps(a=2)).called == [1]


def test_with_nobody_to_call_nothing_opens() -> None:
    bench = Bench()
    bench.worker("a").adopted = [-1, -1]
    assert not told(msg.Call, bench.steps(a=6))
    bench.puppets["a"].adopted = [0, 0]
    assert told(msg.Call, bench.steps(a=1)), "it stayed due"


def test_a_stuck_worker_neither_paces_nor_is_called() -> None:
    bench = Bench(make_spec(quorum=2))
    for name in ("a", "b", "stuck"):
        bench.worker(name)
    bench.steps(a=1, b=1, stuck=1)
    bench.elapse(3.5)  # more than 10 steps of 0.125 s, and than 3 heartbeats
    assert bench.state.members[3].live
    bench.steps(a=1, b=1)  # they advance again
    assert told_one(msg.Call, bench.log).called == [1, 2]


def test_a_slow_worker_is_not_stuck_before_ten_of_its_usual_steps() -> None:
    bench = Bench(make_spec(quorum="all"))
    bench.worker("a")
    bench.worker("slow", step_s=1.0)
    bench.steps(a=1, slow=1)
    bench.elapse(9.5)
    bench.steps(a=1)
    assert not told(msg.Call, bench.log), "slow still paces"
    bench.elapse(1.0)
    assert told_one(msg.Call, bench.log).called == [1]
