"""From the call to the commit (DESIGN section 4): quorum, grace, deadline, late and refused work."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.state import OUTCOMES_KEPT
from anabranch.queue import messages as msg
from anabranch.spec import WorkersSpec
from tests.orchestrator.bench import (
    TIMELINE,
    TOKENS,
    Adoption,
    Bench,
    claim,
    digest,
    make_spec,
    note,
    notes,
    one,
    only,
    told,
    told_one,
    why,
)

# --- quorum, grace ----------------------------------------------------------------------------------------


def opened(bench: Bench, *names: str) -> None:
    """Workers of these names, and one open round of fragment 0."""
    for name in names:
        bench.worker(name)
    bench.steps(**dict.fromkeys(names, 2))
    assert set(bench.state.rounds) == {1}


def test_when_all_called_have_arrived_the_round_closes_at_once() -> None:
    bench = Bench(make_spec(quorum=2))
    opened(bench, "a", "b")
    assert not only(do.Merge, bench.contribute("a"))
    order = one(do.Merge, bench.contribute("b"))
    assert order.reason == "all arrived after 0.00 s: 2 of 2"
    commit = told_one(msg.Merged, bench.merge(order))
    assert (commit.version, commit.closed, commit.tokens) == (1, "all arrived", 3 * TOKENS)


def test_only_fetched_and_verified_contributions_count() -> None:
    bench = Bench()
    opened(bench, "a")
    offer = bench.offer("a")
    assert one(do.Fetch, bench.send_offer(offer)).offer == offer
    assert not only(do.Merge, bench.log)
    assert only(do.Merge, bench.fetched(offer))


def test_the_grace_window_is_sized_from_the_slack() -> None:
    bench = Bench(make_spec(grace_cap_s=10.0, fragments=2, inner_steps=16))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=8, b=8)
    bench.elapse(0.25)
    result = bench.contribute("a")
    slack = 2 * 8 * 0.125 - 0.25  # τ·(H/P)·ξ_step − ξ_quorum; nothing was broadcast yet, so no ξ_sync
    assert one(do.SetTimer, result).after_s == pytest.approx(0.8 * slack)


def test_the_grace_window_is_capped_at_one_interval() -> None:
    bench = Bench()
    opened(bench, "a", "b")
    timer = one(do.SetTimer, bench.contribute("a"))
    assert (timer.name, timer.after_s) == ("grace", 2 * 0.125)


def test_grace_follows_the_moving_averages() -> None:
    bench = Bench(make_spec(grace_cap_s=10.0, fragments=2, inner_steps=16))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=8, b=8)
    bench.elapse(0.5)  # ξ_quorum = 0.5
    bench.contribute("a")
    order = one(do.Merge, bench.contribute("b"))
    bench.elapse(0.25)
    bench.merge(order)  # ξ_sync = 0.25
    for puppet in bench.puppets.values():
        puppet.step_s = 0.25
    bench.steps(a=8, b=8)  # ξ_step = 0.125 + 0.25 · (0.25 − 0.125)
    timer = one(do.SetTimer, bench.contribute("a", 1))  # ξ_quorum = 0.5 + 0.25 · (0 − 0.5)
    assert timer.after_s == pytest.approx(0.8 * (2 * 8 * 0.15625 - 0.375 - 0.25))


def test_after_the_grace_window_the_round_closes_without_the_missing_and_names_them() -> None:
    bench = Bench()
    opened(bench, "a", "b", "c")
    bench.contribute("a")
    bench.elapse(0.2)
    assert not only(do.Merge, bench.log)
    order = one(do.Merge, bench.elapse(0.1))
    assert order.reason == "grace expired after 0.25 s: 1 of 3, without b, c"
    assert [offer.sender for offer, _ in order.parts] == ["a"]


def test_within_the_grace_window_the_last_arrival_closes_the_round() -> None:
    bench = Bench()
    opened(bench, "a", "b")
    bench.contribute("a")
    bench.elapse(0.125)
    assert one(do.Merge, bench.contribute("b")).reason.startswith("all arrived")
    assert not only(do.Merge, bench.elapse(1.0)), "the grace timer finds nothing to do"


def test_without_slack_the_round_closes_at_its_quorum() -> None:
    bench = Bench()
    opened(bench, "a", "b")
    bench.elapse(1.0)  # ξ_quorum is more than τ·(H/P)·ξ_step
    assert one(do.Merge, bench.contribute("a")).reason == "grace expired after 1.00 s: 1 of 2, without b"


def test_quorum_all_waits_for_everyone_called() -> None:
    bench = Bench(make_spec(quorum="all"))
    opened(bench, "a", "b")
    bench.contribute("a")
    assert not only(do.Merge, bench.elapse(5.0))
    assert len(one(do.Merge, bench.contribute("b")).parts) == 2


def test_quorum_all_is_not_reached_by_somebody_who_was_not_called() -> None:
    bench = Bench(make_spec(quorum="all"))
    opened(bench, "a", "b")
    bench.join("late-joiner")
    bench.contribute("late-joiner")
    bench.contribute("a")
    assert not only(do.Merge, bench.elapse(5.0))
    assert len(one(do.Merge, bench.contribute("b")).parts) == 3


def test_a_quorum_lost_to_a_replacement_closes_when_it_is_back() -> None:
    bench = Bench()
    opened(bench, "a", "b")
    bench.contribute("a")
    newer = bench.offer("a")
    bench.send_offer(newer)  # takes the older one's place, so the quorum is gone
    assert not only(do.Merge, bench.elapse(1.0)), "the window ends below the quorum"
    assert one(do.Merge, bench.fetched(newer)).reason.startswith("grace expired")


# --- deadline ---------------------------------------------------------------------------------------------


def test_below_its_quorum_at_the_deadline_a_round_is_abandoned() -> None:
    bench = Bench(make_spec(quorum=2))
    opened(bench, "a", "b")
    bench.contribute("a")
    assert not told(msg.Abandoned, bench.elapse(9.5))
    result = bench.elapse(0.5)
    abandoned = told_one(msg.Abandoned, result)
    assert why(msg.Abandoned, result) == "quorum 1/2"
    assert (abandoned.reason, abandoned.round, abandoned.base) == ("quorum 1/2", 1, 0)
    assert not only(do.Merge, bench.log), "never merge below K"


def test_the_deadline_is_four_intervals_of_the_pacers_step_time() -> None:
    bench = Bench(make_spec(deadline_min_s=0.5))
    bench.worker("a", step_s=0.5)
    opened_round = bench.steps(a=2)
    timer = next(t for t in only(do.SetTimer, opened_round) if t.name == "round deadline")
    assert timer.after_s == 4 * 2 * 0.5


def test_after_an_abandoned_round_contributions_stay_in_hand_for_the_next() -> None:
    bench = Bench(make_spec(quorum=2, in_flight=1, fragments=1), sizes=(10,))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=4, b=4)
    bench.contribute("a")
    bench.elapse(10.0)
    assert bench.state.counts == {"abandoned": 1}
    reopened = told_one(msg.Call, bench.steps(a=4, b=4))
    assert (reopened.round, reopened.base) == (2, 0)
    assert [o.sender for o, _ in one(do.Merge, bench.contribute("b")).parts] == ["a", "b"]


def test_a_quorum_lost_after_the_deadline_abandons_the_round() -> None:
    bench = Bench(make_spec(grace_cap_s=60.0, deadline_intervals=0.1, deadline_min_s=2.0))
    bench.worker("a", step_s=8.0)
    bench.worker("b", step_s=8.0)
    bench.steps(a=2, b=2)
    bench.contribute("a")  # the grace window is much longer than the deadline
    bench.elapse(3.0)
    assert set(bench.state.rounds) == {1}, "at the deadline it had its quorum"
    bench.send_offer(bench.offer("a"))  # the replacement is never fetched
    assert told_one(msg.Abandoned, bench.elapse(60.0)).reason == "quorum 0/1"


def test_a_merge_that_gives_nothing_abandons_with_its_reason() -> None:
    bench = Bench()
    opened(bench, "a")
    order = one(do.Merge, bench.contribute("a"))
    result = bench.send(ev.Merged(order.round, None, "nothing to merge: all weights are zero"))
    assert told_one(msg.Abandoned, result).reason == "nothing to merge: all weights are zero"
    assert bench.state.fragments[0].version == 0
    assert not only(do.Commit, result)
    assert not told(msg.Merged, result)
    assert not only(do.Book, result)


# --- a newer one, duplicates ------------------------------------------------------------------------------


def dropped(instructions: list[do.Instruction]) -> tuple[str, bytes]:
    """Where the only contribution lies whose payload is forgotten."""
    drop = one(do.Drop, instructions)
    return drop.sender, drop.entry


def test_a_newer_contribution_replaces_an_older_one_under_its_key() -> None:
    bench = Bench(make_spec(quorum=2))
    opened(bench, "a", "b")
    old, new = bench.offer("a", tokens=100), bench.offer("a", tokens=300)
    bench.send_offer(old)
    bench.fetched(old)
    result = bench.send_offer(new)
    assert dropped(result) == ("a", old.entry)
    assert one(do.Consume, result).entries == (old.entry,)
    bench.fetched(new)
    order = one(do.Merge, bench.contribute("b"))
    assert [o.message.tokens for o, _ in order.parts if o.sender == "a"] == [300]


def test_a_replaced_contribution_that_arrives_after_all_is_dropped() -> None:
    bench = Bench()
    opened(bench, "a")
    old, new = bench.offer("a"), bench.offer("a")
    bench.send_offer(old)
    bench.send_offer(new)
    assert dropped(bench.fetched(old)) == ("a", old.entry)
    assert [o for o, _ in one(do.Merge, bench.fetched(new)).parts] == [new]


def test_a_newer_one_during_the_merge_does_not_change_what_is_merged() -> None:
    bench = Bench()
    opened(bench, "a")
    order = one(do.Merge, bench.contribute("a"))
    result = bench.contribute("a", tokens=999)
    assert one(do.Consume, result).reason == "this round merges an earlier one"
    assert not only(do.Fetch, result)
    assert one(do.Book, bench.merge(order)).tokens == order.parts[0][0].message.tokens


def test_a_repeat_after_the_commit_gets_the_same_answer_and_is_booked_once() -> None:
    bench = Bench()
    opened(bench, "a")
    first = bench.offer("a")
    bench.send_offer(first)
    bench.merge(one(do.Merge, bench.fetched(first)))
    again = dataclasses.replace(first, entry=bench.entry())
    result = bench.send_offer(again)
    (verdict,) = told_one(msg.Verdicts, result).verdicts
    assert (verdict.applied, verdict.tokens, verdict.base) == (True, first.message.tokens, 0)
    assert one(do.Consume, result).entries == (again.entry,)
    assert len(only(do.Book, bench.log)) == 1


@pytest.mark.parametrize(("adoption", "dropped"), [("overwrite", 200), ("rebase", 0)])
def test_a_resend_whose_outcome_is_long_forgotten_is_told_it_was_refused_and_not_booked(
    adoption: Literal["overwrite", "rebase"], dropped: int
) -> None:
    spec = make_spec(fragments=1, inner_steps=1)
    bench = Bench(spec.model_copy(update={"workers": WorkersSpec(adoption=adoption)}), sizes=(10,))
    bench.worker("a")
    for _ in range(OUTCOMES_KEPT + 1):
        bench.steps(a=1)
        bench.merge(one(do.Merge, bench.contribute("a")))
    result = bench.contribute("a", base=0, tokens=200)
    (verdict,) = told_one(msg.Verdicts, result).verdicts
    assert (verdict.applied, verdict.tokens, verdict.base) == (False, dropped, 0)
    assert not only(do.Book, result)


# --- not applied: late, stale, unknown, refused -----------------------------------------------------------


def committed(bench: Bench) -> None:
    """Round 1 of fragment 0 is merged from `a` alone; `b` was called and is late."""
    opened(bench, "a", "b")
    bench.contribute("a")
    bench.merge(one(do.Merge, bench.elapse(0.25)))
    assert bench.state.fragments[0].version == 1


LATE: list[tuple[Adoption, int]] = [("overwrite", 200), ("rebase", 0)]  # tokens lost: none, if they are carried over


@pytest.mark.parametrize(("adoption", "lost"), LATE)
def test_who_answers_a_round_after_its_commit_is_late(adoption: Adoption, lost: int) -> None:
    bench = Bench(make_spec(adoption))
    committed(bench)
    result = bench.contribute("b", base=0, round=1, tokens=200)
    reason = "late: based on version 0, the run is at 1"
    assert note("rejected", result).reason == reason
    booked = one(do.Book, result)
    assert (booked.column, booked.tokens, booked.incarnation) == ("rejected", lost, 2)
    (verdict,) = told_one(msg.Verdicts, result).verdicts
    assert (verdict.applied, verdict.reason) == (False, reason)
    assert bench.state.counts["contributions late"] == 1


def test_a_base_that_no_known_round_was_called_on_is_stale() -> None:
    bench = Bench()
    committed(bench)
    result = bench.contribute("b", base=0, round=0, tokens=200)
    assert note("rejected", result).reason == "stale: based on version 0, the run is at 1"
    assert bench.state.counts["contributions stale"] == 1


def test_what_is_fetched_only_after_the_commit_is_late() -> None:
    bench = Bench()
    opened(bench, "a", "b")
    slow = bench.offer("b")
    bench.send_offer(slow)
    bench.contribute("a")
    bench.merge(one(do.Merge, bench.elapse(0.25)))
    result = bench.fetched(slow)
    assert dropped(result) == ("b", slow.entry)
    assert note("rejected", result).reason.startswith("late")


@pytest.mark.parametrize(("adoption", "lost"), LATE)
def test_what_arrives_while_a_round_merges_is_rejected_by_its_commit(adoption: Adoption, lost: int) -> None:
    bench = Bench(make_spec(adoption))
    opened(bench, "a", "b")
    bench.contribute("a")
    order = one(do.Merge, bench.elapse(0.25))
    late = bench.offer("b", tokens=200)
    bench.send_offer(late)
    assert not only(do.Book, bench.fetched(late))
    commit = told_one(msg.Merged, bench.merge(order))
    assert [(v.incarnation, v.applied, v.reason) for v in commit.verdicts] == [
        (1, True, ""),
        (2, False, "late: the round had closed"),
    ]
    assert bench.state.members[2].account.rejected[0] == lost


def test_an_unknown_base_is_refused() -> None:
    bench = Bench()
    opened(bench, "a")
    result = bench.contribute("a", base=7)
    assert note("rejected", result).reason == "unknown base: version 7 of fragment 0, the run is at 0"
    assert not only(do.Fetch, result)


def test_another_timeline_with_the_same_bits_is_the_same_base() -> None:
    bench = Bench()
    opened(bench, "a")
    assert only(do.Fetch, bench.contribute("a", timeline="1-other"))
    bench = Bench()
    opened(bench, "a")
    result = bench.contribute("a", timeline="1-other", base_digest=digest(1, 99))
    assert "other bits" in note("rejected", result).reason
    assert not only(do.Fetch, result)


def test_a_base_that_is_newer_on_another_timeline_says_so() -> None:
    bench = Bench()
    opened(bench, "a")
    result = bench.contribute("a", timeline="1-other", base=7)
    assert note("rejected", result).reason == f"unknown base: timeline 1-other, the run is on {TIMELINE}"


def test_a_base_with_other_bits_is_refused() -> None:
    bench = Bench(make_spec(quorum=2))
    opened(bench, "a", "b")
    result = bench.contribute("a", base_digest=digest(1, 99))
    assert "other bits" in note("rejected", result).reason
    assert not only(do.Fetch, result)


def refuse(bench: Bench, name: str, reason: str = "not finite") -> list[do.Instruction]:
    """A contribution whose payload turns out to be unusable."""
    offer = bench.offer(name)
    bench.send_offer(offer)
    return bench.fetch_failed(offer, reason)


@pytest.mark.parametrize("adoption", ["overwrite", "rebase"])
def test_a_refusal_is_booked_only_by_the_commit_that_supersedes_its_base(adoption: Adoption) -> None:
    bench = Bench(make_spec(adoption))
    opened(bench, "a", "nan")
    tokens = bench.offer("nan").message.tokens
    result = refuse(bench, "nan")
    assert note("rejected", result).reason == "not finite"
    assert not only(do.Book, result)
    order = one(do.Merge, bench.contribute("a"))  # nobody else is waited for
    commit = bench.merge(order)
    assert [(b.incarnation, b.column) for b in only(do.Book, commit)] == [(1, "applied"), (2, "rejected")]
    verdict = told_one(msg.Merged, commit).verdicts[1]
    assert (verdict.reason, verdict.tokens) == ("not finite", tokens), "lost, also where late work is carried over"


def test_a_better_one_under_the_same_key_undoes_a_refusal() -> None:
    bench = Bench()
    opened(bench, "a", "nan")
    refuse(bench, "nan")
    bench.contribute("nan")
    commit = bench.merge(one(do.Merge, bench.contribute("a")))
    assert [b.column for b in only(do.Book, commit)] == ["applied", "applied"]


def test_a_better_one_that_comes_too_late_is_booked_once() -> None:
    bench = Bench()
    opened(bench, "a", "nan")
    refuse(bench, "nan")
    order = one(do.Merge, bench.contribute("a"))
    bench.contribute("nan")
    commit = bench.merge(order)
    assert [(b.incarnation, b.column) for b in only(do.Book, commit)] == [(1, "applied"), (2, "rejected")]
    assert [v.reason for v in told_one(msg.Merged, commit).verdicts][1:] == ["late: the round had closed"]


def test_when_every_answer_was_refused_the_round_is_abandoned() -> None:
    bench = Bench()
    opened(bench, "nan")
    assert told_one(msg.Abandoned, refuse(bench, "nan")).reason == "nobody left who was called"


def test_a_refusal_in_an_earlier_round_does_not_answer_the_next_one() -> None:
    bench = Bench(make_spec(fragments=1, inner_steps=2), sizes=(10,))
    bench.worker("nan")
    bench.steps(nan=2)
    refuse(bench, "nan")
    result = bench.steps(nan=2)
    assert told_one(msg.Call, result).called == [1]
    assert not told(msg.Abandoned, result), "it was asked again and may answer"
    assert only(do.Merge, bench.contribute("nan"))


def test_a_payload_that_is_gone_is_asked_for_again_and_not_counted() -> None:
    bench = Bench()
    opened(bench, "a")
    offer = bench.offer("a")
    bench.send_offer(offer)
    result = bench.fetch_failed(offer, "chunk 0 expired", gone=True)
    again = told_one(msg.Resend, result)
    assert (again.incarnation, again.fragment, again.base) == (1, 0, 0)
    assert one(do.Consume, result).entries == (offer.entry,)
    assert not notes("rejected", result)
    assert set(bench.state.rounds) == {1}, "the round goes on waiting"
    assert only(do.Merge, bench.contribute("a"))


def test_a_contribution_nobody_called_for_is_welcome_while_its_base_stands() -> None:
    bench = Bench(make_spec(quorum=2))
    opened(bench, "a", "b")
    bench.join("uncalled")
    bench.contribute("uncalled")
    bench.contribute("a")
    assert len(one(do.Merge, bench.contribute("b")).parts) == 3


def test_an_evaluator_cannot_contribute() -> None:
    bench = Bench()
    bench.join("eval", role="evaluator")
    result = bench.contribute("eval")
    assert notes("refused", result)
    assert len(only(do.Consume, result)) == 1
    assert not only(do.Fetch, result)


def test_a_fragment_that_does_not_exist_is_refused() -> None:
    bench = Bench()
    bench.worker("a")
    result = bench.send_offer(bench.offer("a", fragment=99))
    assert notes("refused", result)
    assert not only(do.Fetch, result)


# --- the called shrink ------------------------------------------------------------------------------------


def test_who_declines_is_no_longer_waited_for() -> None:
    bench = Bench()
    opened(bench, "a", "b")
    bench.contribute("a")
    entry, b = bench.entry(), bench.puppets["b"]
    decline = msg.Decline(incarnation=b.incarnation, fragment=0, round=1, reason="holds version -1")
    result = bench.say("b", decline, entry)
    assert notes("declined", result)[0].reason == "b declined round 1: holds version -1"
    assert one(do.Consume, result).entries == (entry,)
    assert one(do.Merge, result).reason.endswith("1 of 1")


def test_nobody_can_decline_for_another() -> None:
    bench = Bench()
    opened(bench, "a", "b")
    bench.contribute("a")
    decline = msg.Decline(incarnation=bench.puppets["b"].incarnation, fragment=0, round=1, reason="")
    result = bench.say("a", decline)
    assert not only(do.Merge, result)


def test_who_leaves_is_no_longer_waited_for() -> None:
    bench = Bench()
    opened(bench, "a", "b")
    bench.contribute("a")
    result = bench.leave("b")
    assert one(do.Merge, result).reason.startswith("all arrived")


def test_who_expires_is_no_longer_waited_for() -> None:
    bench = Bench(make_spec(quorum=2))
    opened(bench, "a", "b", "c")
    bench.contribute("a")
    bench.puppets["c"].silent = True
    bench.contribute("b")
    bench.state.averages.step_s = None
    assert one(do.Merge, bench.elapse(3.0)).reason.startswith(("all arrived", "grace expired"))


def test_the_departure_of_a_silent_member_closes_a_round_of_all() -> None:
    bench = Bench(make_spec(quorum="all"))
    opened(bench, "a", "silent")
    bench.contribute("a")
    bench.puppets["silent"].silent = True
    order = one(do.Merge, bench.elapse(3.0))
    assert order.reason.endswith("1 of 1")


def test_a_round_nobody_is_left_for_is_abandoned() -> None:
    bench = Bench()
    opened(bench, "a")
    result = bench.leave("a")
    assert told_one(msg.Abandoned, result).reason == "nobody left who was called"


# --- merge and commit -------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [("a", "b", "c"), ("c", "b", "a"), ("b", "c", "a")])
def test_parts_are_in_the_order_of_names_whoever_came_first(order: tuple[str, ...]) -> None:
    bench = Bench(make_spec(quorum=3))
    for name in ("c", "a", "b"):
        bench.worker(name)
    bench.steps(a=2, b=2, c=2)
    for name in order[:-1]:
        bench.contribute(name)
    merge = one(do.Merge, bench.contribute(order[-1]))
    assert [offer.sender for offer, _ in merge.parts] == ["a", "b", "c"]


def test_weights_are_tokens_times_tokens_per_step() -> None:
    bench = Bench()
    opened(bench, "a")
    order = one(do.Merge, bench.contribute("a", tokens=600, steps=3))
    assert [weight for _, weight in order.parts] == [600 * 600 / 3]
    result = bench.merge(order)
    [tell] = [tell for tell in only(do.Tell, result) if isinstance(tell.message, msg.Merged)]
    assert tell.details == {"weights": [[1, 600, 3, 120_000.0]]}


def test_global_tokens_are_weighted_by_parameters() -> None:
    bench = Bench(sizes=(30, 10))
    bench.worker("a")
    bench.steps(a=3)
    first = bench.merge(one(do.Merge, bench.contribute("a", tokens=400)))
    assert told_one(msg.Merged, first).tokens == 300, "400 tokens trained three quarters of the parameters"
    bench.steps(a=2)
    second = bench.merge(one(do.Merge, bench.contribute("a", 1, tokens=400)))
    assert told_one(msg.Merged, second).tokens == 400


def test_a_commit_consumes_what_it_applied() -> None:
    bench = Bench()
    opened(bench, "a")
    offer = bench.offer("a")
    bench.send_offer(offer)
    order = one(do.Merge, bench.fetched(offer))
    assert not [c for c in only(do.Consume, bench.log) if offer.entry in c.entries], "the inbox is the pending set"
    assert [c.entries for c in only(do.Consume, bench.merge(order))] == [(offer.entry,)]


def test_a_merge_nobody_ordered_is_ignored() -> None:
    bench = Bench()
    opened(bench, "a")
    assert bench.send(ev.Merged(1, claim("_"))) == []
    assert bench.send(ev.Merged(99, claim("_"))) == []
