"""Members and operators: joining, birth, heartbeats, leaving, expiry, closing the books, commands."""

from __future__ import annotations

import dataclasses

import pytest

from anabranch.orchestrator import events as ev
from anabranch.orchestrator.membership import BOOTSTRAP_S, BOOTSTRAPS
from anabranch.spec import LimitsSpec, RunSpec
from tests.orchestrator.bench import TIMELINE, TOKENS, Bench, digest, make_spec, nonce, notes, one, only

# --- joining and birth ------------------------------------------------------------------------------------


def test_the_first_worker_is_welcomed_and_asked_for_version_0() -> None:
    bench = Bench(born=False)
    result = bench.join("first", can_init=True, label="my laptop")
    welcome = one(ev.Welcome, result)
    assert (welcome.incarnation, welcome.nonce) == (1, nonce("first"))
    assert welcome.reason == "worker first joined (my laptop)"
    assert one(ev.AskInit, result).incarnation == 1
    assert one(ev.Consume, result).worker == "first"


def test_only_one_worker_is_asked() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    assert not only(ev.AskInit, bench.join("b", can_init=True))


def test_a_member_that_cannot_give_version_0_is_not_asked() -> None:
    bench = Bench(born=False)
    assert not only(ev.AskInit, bench.join("a", can_init=False))


def test_when_who_was_asked_goes_silent_another_is_asked() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    bench.join("b", can_init=True)
    bench.puppets["a"].silent = True
    assert one(ev.AskInit, bench.elapse(3.0)).incarnation == 2


def ready(incarnation: int, entry: bytes | None) -> ev.InitReady:
    return ev.InitReady(incarnation, "layout", (30, 10), (digest(0, 0), digest(1, 0)), entry)


def test_birth() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    fetch = one(ev.FetchInit, bench.send(ev.InitOffered("a", 1, b"7-0", "payload")))
    assert fetch.payload == "payload"
    result = bench.send(ready(1, b"7-0"))
    birth = one(ev.Birth, result)
    assert (birth.timeline, birth.reason) == (TIMELINE, "version 0 of 2 fragments, 40 parameters")
    assert one(ev.Consume, result) == ev.Consume("version 0 read", "a", (b"7-0",))
    assert [(f.size, f.version, f.digest) for f in bench.state.fragments] == [
        (30, 0, digest(0, 0)),
        (10, 0, digest(1, 0)),
    ]


def test_a_run_is_born_once() -> None:
    bench = Bench()
    assert not only(ev.Birth, bench.send(ready(1, None)))
    bench.join("late", can_init=True)
    result = bench.send(ev.InitOffered("late", 1, b"7-0", "payload"))
    assert notes("refused", result)
    assert one(ev.Consume, result).entries == (b"7-0",)


def test_version_0_of_somebody_who_was_not_asked_is_refused() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    bench.join("b", can_init=True)
    for event in (ev.InitOffered("b", 2, b"7-0", "payload"), ev.InitOffered("b", 1, b"8-0", "payload")):
        result = bench.send(event)
        assert notes("refused", result)
        assert not only(ev.FetchInit, result)


def test_a_bad_version_0_is_asked_of_another() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    bench.join("b", can_init=True)
    result = bench.send(ev.InitFailed(1, "not finite", b"7-0"))
    assert one(ev.AskInit, result).incarnation == 2
    assert "not finite" in notes("refused", result)[0].reason
    assert one(ev.Consume, result).worker == "a"


def test_the_failure_of_one_that_was_asked_before_is_not_blamed_on_the_next() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    bench.join("b", can_init=True)
    bench.send(ev.InitOffered("a", 1, b"7-0", "payload"))
    bench.puppets["a"].silent = True
    bench.elapse(3.0)  # b is asked while a's is still being fetched
    assert not only(ev.AskInit, bench.send(ev.InitFailed(1, "not finite", b"7-0"))), "b is asked already"
    assert bench.state.asked_init == 2
    assert bench.state.members[2].can_init


def test_members_of_before_the_birth_are_sized_for_its_fragments() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    bench.send(ready(1, b"7-0"))
    assert bench.state.members[1].adopted == [-1, -1]


# --- one name, one live process ---------------------------------------------------------------------------


def test_a_second_process_of_the_same_name_is_refused_while_the_first_is_live() -> None:
    bench = Bench()
    bench.join("a")
    result = bench.join("a", life=2)
    refused = one(ev.TurnAway, result)
    assert refused.retry, "the first may be dead and not yet known to be"
    assert "in use by a live member" in refused.reason
    assert not only(ev.Welcome, result)


def test_a_registration_repeated_by_the_same_process_gets_the_same_answer() -> None:
    bench = Bench()
    first = one(ev.Welcome, bench.join("a"))
    again = one(ev.Welcome, bench.join("a"))
    assert (again.incarnation, again.nonce) == (first.incarnation, first.nonce)
    assert len(bench.state.members) == 1


def test_a_restarted_process_gets_a_new_incarnation_once_the_old_one_is_gone() -> None:
    bench = Bench()
    bench.join("a")
    bench.puppets["a"].silent = True
    bench.elapse(3.0)
    assert one(ev.Welcome, bench.join("a", life=2)).incarnation == 2


def test_another_model_is_refused_for_good() -> None:
    bench = Bench()
    refused = one(ev.TurnAway, bench.join("a", layout_hash="other"))
    assert not refused.retry
    assert "layout hash" in refused.reason
    assert only(ev.Welcome, bench.join("b", layout_hash="layout"))


def test_a_full_run_refuses_until_somebody_leaves() -> None:
    spec = make_spec()
    bench = Bench(RunSpec(rounds=spec.rounds, limits=LimitsSpec(max_members=1)))
    bench.join("a")
    assert one(ev.TurnAway, bench.join("b")).reason == "the run is full: limits.max_members = 1"
    bench.send(ev.Left("a", 1, "", bench.entry()))
    assert only(ev.Welcome, bench.join("b"))


# --- leaving, expiry, coming back -------------------------------------------------------------------------


def test_a_silent_member_is_gone_within_three_heartbeats() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("silent").silent = True
    assert not only(ev.Gone, bench.elapse(2.0))
    gone = one(ev.Gone, bench.elapse(1.0))
    assert gone.name == "silent"
    assert gone.reason.startswith("silent: no heartbeat for")


def test_a_heartbeat_before_the_books_close_brings_a_member_back() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("b")  # without an outcome, so its books stay open
    bench.puppets["b"].silent = True
    bench.elapse(3.0)
    assert not bench.state.members[2].live
    result = bench.send(bench.puppets["b"].heartbeat())
    assert len(notes("back", result)) == 1
    assert bench.state.members[2].live


def test_after_a_farewell_heartbeats_bring_nobody_back() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("b")
    result = bench.send(ev.Left("b", 2, "done", bench.entry()))
    assert one(ev.Gone, result).reason == "b left: done"
    assert not notes("back", bench.send(bench.puppets["b"].heartbeat()))
    assert not bench.state.members[2].live


def test_the_contribution_of_who_left_stays_valid() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("b")
    bench.send(ev.Left("b", 2, "", bench.entry()))
    assert [offer.sender for offer, _ in one(ev.Merge, bench.contribute("a")).parts] == ["a", "b"]


def test_an_incarnation_is_closed_once_everything_it_sent_has_an_outcome() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("b")
    bench.send(ev.Left("b", 2, "", bench.entry()))
    assert not only(ev.Close, bench.elapse(2.0))
    bench.merge(one(ev.Merge, bench.contribute("a")))
    close = one(ev.Close, bench.elapse(0.5))
    assert (close.incarnation, close.name, close.last_of_name) == (2, "b", True)
    assert 2 not in bench.state.members


def test_a_refused_contribution_keeps_the_books_open_until_its_base_is_superseded() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    offer = bench.offer("b")
    bench.send(ev.Offered(offer))
    bench.send(ev.FetchFailed(offer, "not finite"))
    bench.send(ev.Left("b", 2, "", bench.entry()))
    assert not only(ev.Close, bench.elapse(1.0))
    bench.merge(one(ev.Merge, bench.contribute("a")))
    assert one(ev.Close, bench.elapse(0.5)).incarnation == 2


def test_a_shared_inbox_is_kept_for_the_incarnation_that_still_uses_it() -> None:
    bench = Bench()
    bench.join("a")
    bench.send(ev.Left("a", 1, "", bench.entry()))
    bench.join("a", life=2)
    assert not one(ev.Close, bench.elapse(0.5)).last_of_name


def test_who_speaks_for_a_closed_incarnation_is_told_so() -> None:
    bench = Bench()
    ghost = bench.worker("ghost")
    bench.send(ev.Left("ghost", 1, "", bench.entry()))
    ghost.silent = True
    bench.elapse(0.5)
    assert one(ev.TellClosed, bench.send(ghost.heartbeat())).incarnation == 1
    offer = bench.offer("ghost")
    result = bench.send(ev.Offered(offer))
    assert one(ev.TellClosed, result).incarnation == 1
    assert one(ev.Consume, result).entries == (offer.entry,)


# --- hostile members --------------------------------------------------------------------------------------


def test_who_speaks_for_another_is_refused_and_the_other_is_not_sent_away() -> None:
    bench = Bench()
    victim = bench.worker("victim")
    bench.worker("mallory")
    bench.elapse(1.0)
    seen_at = bench.state.members[victim.incarnation].seen_at
    forged = dataclasses.replace(victim.heartbeat(), sender="mallory", steps=10**6)
    offer = dataclasses.replace(bench.offer("victim"), sender="mallory")
    result = bench.send(forged) + bench.send(ev.Offered(offer))
    assert len(notes("refused", result)) == 2
    assert not only(ev.TellClosed, result), "that would make the victim register anew"
    assert not only(ev.Fetch, result)
    assert one(ev.Consume, result).worker == "mallory"
    assert bench.state.members[victim.incarnation].seen_at == seen_at
    assert bench.state.members[victim.incarnation].steps == victim.steps


def test_nobody_can_say_farewell_for_another() -> None:
    bench = Bench()
    bench.worker("victim")
    bench.worker("mallory")
    assert not only(ev.Gone, bench.send(ev.Left("mallory", 1, "", bench.entry())))
    assert bench.state.members[1].live


@pytest.mark.parametrize("field", ["adopted", "held", "discarded", "pending"])
def test_figures_of_the_wrong_length_are_ignored(field: str) -> None:
    bench = Bench()
    a = bench.worker("a")
    before = dataclasses.replace(bench.state.members[1])
    heartbeat = dataclasses.replace(a.heartbeat(), processed=999)
    bench.send(dataclasses.replace(heartbeat, **{field: (1, 2, 3)}))  # type: ignore[arg-type]
    after = bench.state.members[1]
    assert getattr(after, field) == getattr(before, field)
    assert after.processed == before.processed


def test_an_unreadable_entry_is_consumed_and_noted() -> None:
    bench = Bench()
    result = bench.send(ev.Unreadable("mallory", b"5-0", "envelope of 70000 bytes"))
    assert one(ev.Consume, result) == ev.Consume("unreadable", "mallory", (b"5-0",))
    assert notes("refused", result)[0].reason == "message of mallory refused: envelope of 70000 bytes"


# --- evaluators -------------------------------------------------------------------------------------------


def test_an_evaluator_fills_the_heldout_history_and_is_never_called() -> None:
    bench = Bench()
    bench.worker("a")
    bench.join("eval", role="evaluator")
    judge = bench.puppets["eval"]
    judge.held, judge.steps = [TOKENS, TOKENS], 5
    judge.extra = {"heldout_loss": 2.5, "measured_tokens": 1000}
    bench.elapse(2.0)
    judge.extra = {"heldout_loss": 2.25, "measured_tokens": 2000}
    bench.elapse(2.0)
    assert bench.state.heldout == [(1000, 2.5), (2000, 2.25)]
    assert one(ev.OpenRound, bench.steps(a=2)).called == (1,)


def test_two_evaluators_do_not_repeat_each_other_into_the_history() -> None:
    bench = Bench()
    for name, loss in (("one", 2.5), ("two", 2.75)):
        bench.join(name, role="evaluator")
        bench.puppets[name].extra = {"heldout_loss": loss, "measured_tokens": 1000}
    bench.elapse(5.0)
    assert bench.state.heldout == [(1000, 2.5), (1000, 2.75)]


def test_a_worker_cannot_report_a_heldout_loss() -> None:
    bench = Bench()
    bench.worker("a").extra = {"heldout_loss": 0.1, "measured_tokens": 1}
    bench.elapse(1.0)
    assert bench.state.heldout == []


def test_the_history_stays_bounded_and_keeps_its_first_and_last_points() -> None:
    bench = Bench()
    bench.join("eval", role="evaluator")
    for tokens in range(3000):
        judge = dataclasses.replace(bench.puppets["eval"].heartbeat(), heldout_loss=1.0, measured_tokens=tokens)
        bench.send(judge)
    assert len(bench.state.heldout) <= 400
    assert (bench.state.heldout[0][0], bench.state.heldout[-1][0]) == (0, 2999)
    assert bench.state.heldout == sorted(bench.state.heldout)


# --- operators --------------------------------------------------------------------------------------------


def command(bench: Bench, action: str, key: str = "", value: int | float | str | None = None) -> list[ev.Instruction]:
    entry = bench.entry()
    return bench.send(ev.Commanded(f"{action}-{entry!r}", action, entry, key, value, by="ann"))


def test_while_paused_nothing_opens() -> None:
    bench = Bench()
    bench.worker("a")
    announced = one(ev.Announce, command(bench, "pause"))
    assert (announced.what, announced.reason) == ("pause", "paused (by ann)")
    assert not only(ev.OpenRound, bench.steps(a=4))
    result = command(bench, "resume")
    assert one(ev.Announce, result).what == "resume"
    assert only(ev.OpenRound, result), "what was due opens at once"


def test_a_round_in_flight_is_merged_though_the_run_is_paused() -> None:
    bench = Bench()
    bench.worker("a")
    bench.steps(a=2)
    command(bench, "pause")
    assert only(ev.Commit, bench.merge(one(ev.Merge, bench.contribute("a"))))


def test_after_a_stop_nothing_opens_and_nobody_joins() -> None:
    bench = Bench()
    bench.worker("a")
    assert one(ev.Announce, command(bench, "stop")).what == "stop"
    assert not only(ev.OpenRound, bench.steps(a=4))
    assert one(ev.TurnAway, bench.join("b")).reason == "the run has stopped"


def test_a_command_repeated_under_its_id_is_consumed_and_ignored() -> None:
    bench = Bench()
    bench.send(ev.Commanded("id", "pause", b"1-0"))
    bench.send(ev.Commanded("other", "resume", b"2-0"))
    result = bench.send(ev.Commanded("id", "pause", b"3-0"))
    assert result == [ev.Consume("command read", "", (b"3-0",))]
    assert not bench.state.paused


def test_a_checkpoint_can_be_asked_for() -> None:
    assert only(ev.Checkpoint, command(Bench(), "checkpoint"))


def test_a_lower_quorum_acts_at_once() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("a")
    bench.elapse(1.0)  # more than the slack
    result = command(bench, "set", "rounds.quorum", 1)
    changed = one(ev.ChangeSetting, result)
    assert (changed.key, changed.value, changed.reason) == ("rounds.quorum", 1, "rounds.quorum = 1 (by ann)")
    assert one(ev.Merge, result).reason == "grace expired after 1.00 s: 1 of 2, without b"


def test_a_higher_quorum_acts_at_once() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    command(bench, "set", "rounds.quorum", 2)
    bench.contribute("a")
    assert not only(ev.Merge, bench.elapse(5.0))
    assert only(ev.Merge, bench.contribute("b"))


def test_a_quorum_raised_during_the_grace_window_is_waited_for() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.worker(name)
    bench.steps(a=2, b=2, c=2)
    bench.contribute("a")
    command(bench, "set", "rounds.quorum", 2)
    assert not only(ev.Merge, bench.elapse(1.0))
    assert one(ev.Merge, bench.contribute("b")).reason.endswith("2 of 3, without c")


def test_a_shorter_grace_acts_on_windows_that_are_open() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("a")
    bench.elapse(0.125)
    assert only(ev.Merge, command(bench, "set", "rounds.grace_factor", 0.0))


def test_a_longer_grace_acts_on_windows_that_are_open() -> None:
    bench = Bench(make_spec(grace_cap_s=0.25, inner_steps=16))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=8, b=8)
    bench.contribute("a")
    bench.elapse(0.125)
    result = command(bench, "set", "rounds.grace_cap_s", 1.0)
    assert one(ev.SetTimer, result).after_s == pytest.approx(1.0 - 0.125)
    assert not only(ev.Merge, bench.elapse(0.5))
    assert only(ev.Merge, bench.elapse(0.5))


def test_inner_steps_act_at_the_next_opening() -> None:
    bench = Bench()
    bench.worker("a")
    command(bench, "set", "rounds.inner_steps", 8)
    assert not only(ev.OpenRound, bench.steps(a=3))
    assert only(ev.OpenRound, bench.steps(a=1))


def merge_once(bench: Bench) -> list[ev.Instruction]:
    """A makes steps until a round opens, contributes, and its contribution is merged."""
    opened = bench.steps(a=1)
    while not only(ev.OpenRound, opened):
        opened = bench.steps(a=1)
    return bench.merge(one(ev.Merge, bench.contribute("a", one(ev.OpenRound, opened).fragment)))


def test_the_interval_may_be_longer_later_in_the_run() -> None:
    bench = Bench(make_spec(inner_steps=4, later_inner_steps=16, later_from_tokens=400))
    bench.worker("a")
    said = merge_once(bench)
    assert bench.state.tokens < 400
    assert not only(ev.ChangeSetting, said)
    while bench.state.tokens < 400:
        said = merge_once(bench)
    changed = [(change.key, change.value) for change in only(ev.ChangeSetting, said)]
    assert changed == [("rounds.inner_steps", 16), ("rounds.later_inner_steps", None)]
    assert "400 tokens are merged" in only(ev.ChangeSetting, said)[0].reason
    command(bench, "set", "rounds.inner_steps", 4)  # an operator knows better
    assert not only(ev.ChangeSetting, merge_once(bench))
    assert bench.state.spec.rounds.inner_steps == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [("rounds.fragments", 3), ("rounds.unheard_of", 1), ("rounds.quorum", 0), ("rounds.quorum", "most")],
)
def test_a_setting_that_cannot_be_is_refused_with_its_reason(key: str, value: int | str) -> None:
    bench = Bench()
    result = command(bench, "set", key, value)
    assert key in notes("refused", result)[0].reason
    assert not only(ev.ChangeSetting, result)
    assert bench.state.spec == make_spec()


def test_an_unknown_command_is_refused() -> None:
    assert notes("refused", command(Bench(), "explode"))


# --- many at once -----------------------------------------------------------------------------------------


def test_of_fifty_who_come_at_once_a_few_fetch_the_model_at_the_same_time() -> None:
    bench = Bench()
    welcomed: list[str] = []

    def ask(names: list[str]) -> None:
        for name in names:
            welcomed.extend(w.name for w in only(ev.Welcome, bench.join(name)))

    everybody = [f"w{i}" for i in range(50)]
    for name in everybody:
        bench.join(name)
    first = [name for name in everybody if name in bench.puppets]
    assert len(first) == BOOTSTRAPS
    for name in first:  # a welcomed member has adopted nothing yet
        bench.puppets[name].adopted = [-1, -1]
    ask(everybody[BOOTSTRAPS:])
    assert not welcomed
    bench.puppets[first[0]].adopted = [0, 0]
    bench.send(bench.puppets[first[0]].heartbeat())
    ask(everybody[BOOTSTRAPS:])
    assert len(welcomed) == 1


def test_a_slow_link_does_not_keep_the_others_out() -> None:
    bench = Bench()
    for i in range(BOOTSTRAPS):
        bench.join(f"slow{i}")
        bench.puppets[f"slow{i}"].adopted = [-1, -1]
    assert not only(ev.Welcome, bench.join("quick"))
    bench.elapse(BOOTSTRAP_S + 1.0)
    assert only(ev.Welcome, bench.join("quick"))


def test_before_birth_there_is_nothing_to_fetch() -> None:
    bench = Bench(born=False)
    for i in range(50):
        assert only(ev.Welcome, bench.join(f"w{i}"))
