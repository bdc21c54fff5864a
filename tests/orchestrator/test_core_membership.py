"""Members and operators: joining, birth, heartbeats, leaving, expiry, closing the books, commands."""

from __future__ import annotations

import dataclasses

import msgpack
import pytest

from anabranch.errors import MalformedMessage
from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.membership import BOOTSTRAP_S, BOOTSTRAPS
from anabranch.queue import messages as msg
from anabranch.spec import LimitsSpec, RunSpec
from tests.orchestrator.bench import (
    TIMELINE,
    TOKENS,
    Bench,
    claim,
    digest,
    make_spec,
    nonce,
    note,
    notes,
    one,
    only,
    told,
    told_one,
    why,
)
from tests.orchestrator.test_stages import past_its_deadline

# --- joining and birth ------------------------------------------------------------------------------------


def test_the_first_worker_is_welcomed_and_asked_for_version_0() -> None:
    bench = Bench(born=False)
    result = bench.join("first", can_init=True, label="my laptop")
    welcome = told_one(msg.Welcome, result)
    assert (welcome.incarnation, welcome.nonce) == (1, nonce("first"))
    assert why(msg.Welcome, result) == "worker first joined (my laptop)"
    assert told_one(msg.SendInit, result).incarnation == 1
    assert one(do.Consume, result).sender == "first"


def test_only_one_worker_is_asked() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    assert not told(msg.SendInit, bench.join("b", can_init=True))


def test_a_member_that_cannot_give_version_0_is_not_asked() -> None:
    bench = Bench(born=False)
    assert not told(msg.SendInit, bench.join("a", can_init=False))


def test_when_who_was_asked_goes_silent_another_is_asked() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    bench.join("b", can_init=True)
    bench.puppets["a"].silent = True
    assert told_one(msg.SendInit, bench.elapse(3.0)).incarnation == 2


def ready(incarnation: int, entry: bytes | None) -> ev.InitReady:
    return ev.InitReady(incarnation, "layout", (30, 10), (digest(0, 0), digest(1, 0)), entry)


def init(incarnation: int) -> msg.Init:
    return msg.Init(incarnation=incarnation, layout=claim("a"), fragments=claim("a", b"f" * 32))


def test_birth() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    fetch = one(do.FetchInit, bench.say("a", init(1), b"7-0"))
    assert (fetch.incarnation, fetch.entry, fetch.message) == (1, b"7-0", init(1))
    result = bench.send(ready(1, b"7-0"))
    birth = one(do.Birth, result)
    assert told_one(msg.Born, result).timeline == TIMELINE
    assert (birth.timeline, birth.reason) == (TIMELINE, "version 0 of 2 fragments, 40 parameters")
    assert one(do.Consume, result) == do.Consume("version 0 read", "a", (b"7-0",))
    assert [(f.size, f.version, f.digest) for f in bench.state.fragments] == [
        (30, 0, digest(0, 0)),
        (10, 0, digest(1, 0)),
    ]


def test_a_run_is_born_once() -> None:
    bench = Bench()
    assert not only(do.Birth, bench.send(ready(1, None)))
    bench.join("late", can_init=True)
    result = bench.say("late", init(1), b"7-0")
    assert notes("refused", result)
    assert one(do.Consume, result).entries == (b"7-0",)


def test_version_0_of_somebody_who_was_not_asked_is_refused() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    bench.join("b", can_init=True)
    for incarnation in (2, 1):
        result = bench.say("b", init(incarnation))
        assert notes("refused", result)
        assert not only(do.FetchInit, result)


def test_a_bad_version_0_is_asked_of_another() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    bench.join("b", can_init=True)
    result = bench.send(ev.InitFailed(1, "not finite", b"7-0"))
    assert told_one(msg.SendInit, result).incarnation == 2
    assert "not finite" in notes("refused", result)[0].reason
    assert one(do.Consume, result).sender == "a"


def test_the_failure_of_one_that_was_asked_before_is_not_blamed_on_the_next() -> None:
    bench = Bench(born=False)
    bench.join("a", can_init=True)
    bench.join("b", can_init=True)
    bench.say("a", init(1), b"7-0")
    bench.puppets["a"].silent = True
    bench.elapse(3.0)  # b is asked while a's is still being fetched
    assert not told(msg.SendInit, bench.send(ev.InitFailed(1, "not finite", b"7-0"))), "b is asked already"
    assert bench.state.asked_init == 2
    assert bench.state.members[2].register.can_init


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
    refused = told_one(msg.Refused, result)
    assert refused.retry, "the first may be dead and not yet known to be"
    assert "in use by a member heard a moment ago" in refused.reason
    assert not told(msg.Welcome, result)


def test_a_registration_repeated_by_the_same_process_gets_the_same_answer() -> None:
    bench = Bench()
    first = told_one(msg.Welcome, bench.join("a"))
    again = told_one(msg.Welcome, bench.join("a"))
    assert (again.incarnation, again.nonce) == (first.incarnation, first.nonce)
    assert len(bench.state.members) == 1


def test_a_restarted_process_gets_a_new_incarnation_once_the_old_one_is_gone() -> None:
    bench = Bench()
    bench.join("a")
    bench.puppets["a"].silent = True
    bench.elapse(3.0)
    assert told_one(msg.Welcome, bench.join("a", life=2)).incarnation == 2


def test_another_model_is_refused_for_good() -> None:
    bench = Bench()
    refused = told_one(msg.Refused, bench.join("a", layout_hash="other"))
    assert not refused.retry
    assert "layout hash" in refused.reason
    assert told(msg.Welcome, bench.join("b", layout_hash="layout"))


def test_a_full_run_refuses_until_somebody_leaves() -> None:
    spec = make_spec()
    bench = Bench(RunSpec(rounds=spec.rounds, limits=LimitsSpec(max_members=1)))
    bench.join("a")
    assert told_one(msg.Refused, bench.join("b")).reason == "the run is full: limits.max_members = 1"
    bench.leave("a")
    assert told(msg.Welcome, bench.join("b"))


# --- leaving, expiry, coming back -------------------------------------------------------------------------


def test_a_silent_member_is_gone_within_three_heartbeats() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("silent").silent = True
    assert not notes("gone", bench.elapse(2.0))
    gone = note("gone", bench.elapse(1.0))
    assert gone.details["name"] == "silent"
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
    result = bench.leave("b", "done")
    assert note("gone", result).reason == "b left: done"
    assert not notes("back", bench.send(bench.puppets["b"].heartbeat()))
    assert not bench.state.members[2].live


def test_the_contribution_of_who_left_stays_valid() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("b")
    bench.leave("b")
    assert [offer.sender for offer, _ in one(do.Merge, bench.contribute("a")).parts] == ["a", "b"]


def test_an_incarnation_is_closed_once_everything_it_sent_has_an_outcome() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("b")
    bench.leave("b")
    assert not only(do.CloseBooks, bench.elapse(2.0))
    bench.merge(one(do.Merge, bench.contribute("a")))
    close = one(do.CloseBooks, bench.elapse(0.5))
    assert (close.incarnation, close.name, close.last_of_name) == (2, "b", True)
    assert 2 not in bench.state.members


def test_a_refused_contribution_keeps_the_books_open_until_its_base_is_superseded() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    offer = bench.offer("b")
    bench.send_offer(offer)
    bench.fetch_failed(offer, "not finite")
    bench.leave("b")
    assert not only(do.CloseBooks, bench.elapse(1.0))
    bench.merge(one(do.Merge, bench.contribute("a")))
    assert one(do.CloseBooks, bench.elapse(0.5)).incarnation == 2


def test_a_shared_inbox_is_kept_for_the_incarnation_that_still_uses_it() -> None:
    bench = Bench()
    bench.join("a")
    bench.leave("a")
    bench.join("a", life=2)
    assert not one(do.CloseBooks, bench.elapse(0.5)).last_of_name


def test_who_speaks_for_a_closed_incarnation_is_told_so() -> None:
    bench = Bench()
    ghost = bench.worker("ghost")
    bench.leave("ghost")
    ghost.silent = True
    bench.elapse(0.5)
    assert told_one(msg.Closed, bench.send(ghost.heartbeat())).incarnations == [1]
    offer = bench.offer("ghost")
    result = bench.send_offer(offer)
    assert told_one(msg.Closed, result).incarnations == [1]
    assert one(do.Consume, result).entries == (offer.entry,)


# --- hostile members --------------------------------------------------------------------------------------


def test_who_speaks_for_another_is_refused_and_the_other_is_not_sent_away() -> None:
    bench = Bench()
    victim = bench.worker("victim")
    bench.worker("mallory")
    bench.elapse(1.0)
    seen_at = bench.state.members[victim.incarnation].seen_at
    forged = victim.progress().model_copy(update={"steps": 10**6})
    offer = dataclasses.replace(bench.offer("victim"), sender="mallory")
    result = bench.say("mallory", forged, b"") + bench.send_offer(offer)
    assert len(notes("refused", result)) == 2
    assert not told(msg.Closed, result), "that would make the victim register anew"
    assert not only(do.Fetch, result)
    assert one(do.Consume, result).sender == "mallory"
    assert bench.state.members[victim.incarnation].seen_at == seen_at
    assert bench.state.members[victim.incarnation].steps == victim.steps


def test_nobody_can_say_farewell_for_another() -> None:
    bench = Bench()
    bench.worker("victim")
    bench.worker("mallory")
    assert not notes("gone", bench.say("mallory", msg.Farewell(incarnation=1)))
    assert bench.state.members[1].live


@pytest.mark.parametrize("field", ["adopted", "held", "discarded", "pending"])
def test_figures_of_the_wrong_length_are_ignored(field: str) -> None:
    bench = Bench()
    a = bench.worker("a")
    before = dataclasses.replace(bench.state.members[1])
    bench.say("a", a.progress().model_copy(update={"processed": 999, field: [1, 2, 3]}), b"")
    after = bench.state.members[1]
    assert getattr(after, field) == getattr(before, field)
    assert after.processed == before.processed


def test_an_unreadable_entry_is_consumed_and_noted() -> None:
    bench = Bench()
    result = bench.send(ev.Unreadable("mallory", b"5-0", "envelope of 70000 bytes"))
    assert one(do.Consume, result) == do.Consume("unreadable", "mallory", (b"5-0",))
    assert notes("refused", result)[0].reason == "message of mallory refused: envelope of 70000 bytes"


def test_an_entry_of_a_progress_stream_needs_no_deletion() -> None:
    result = Bench().send(ev.Unreadable("mallory", b"", "not msgpack"))
    assert notes("refused", result)
    assert not only(do.Consume, result)


def test_who_registers_in_anothers_inbox_is_refused() -> None:
    bench = Bench()
    result = bench.say("mallory", msg.Register(nonce=nonce("victim"), name="victim"), b"5-0")
    assert note("refused", result).reason == "message of mallory refused: registers as 'victim' in another's inbox"
    assert one(do.Consume, result) == do.Consume("unreadable", "mallory", (b"5-0",))
    assert not bench.state.members


def test_a_member_cannot_command() -> None:
    bench = Bench()
    result = bench.say("mallory", msg.Command(id="1d" * 4, action="stop"))
    assert note("refused", result).reason == "message of mallory refused: a command message does not belong there"
    assert not bench.state.stopped


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
    assert told_one(msg.Call, bench.steps(a=2)).called == [1]


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
        bench.puppets["eval"].extra = {"heldout_loss": 1.0, "measured_tokens": tokens}
        bench.send(bench.puppets["eval"].heartbeat())
    assert len(bench.state.heldout) <= 400
    assert (bench.state.heldout[0][0], bench.state.heldout[-1][0]) == (0, 2999)
    assert bench.state.heldout == sorted(bench.state.heldout)


# --- operators --------------------------------------------------------------------------------------------


def command(bench: Bench, action: str, key: str = "", value: int | float | str | None = None) -> list[do.Instruction]:
    return bench.command(action, key, value, by="ann")


def test_while_paused_nothing_opens() -> None:
    bench = Bench()
    bench.worker("a")
    assert why(msg.Pause, command(bench, "pause")) == "paused (by ann)"
    assert not told(msg.Call, bench.steps(a=4))
    result = command(bench, "resume")
    assert told_one(msg.Resume, result)
    assert told(msg.Call, result), "what was due opens at once"


def test_a_round_in_flight_is_merged_though_the_run_is_paused() -> None:
    bench = Bench()
    bench.worker("a")
    bench.steps(a=2)
    command(bench, "pause")
    assert told(msg.Merged, bench.merge(one(do.Merge, bench.contribute("a"))))


def test_after_a_stop_nothing_opens_and_nobody_joins() -> None:
    bench = Bench()
    bench.worker("a")
    assert told_one(msg.Stop, command(bench, "stop"))
    assert not told(msg.Call, bench.steps(a=4))
    assert told_one(msg.Refused, bench.join("b")).reason == "the run has stopped"


def test_a_command_repeated_under_its_id_is_consumed_and_ignored() -> None:
    bench = Bench()
    pause, resume = msg.Command(id="1d" * 4, action="pause"), msg.Command(id="2d" * 4, action="resume")
    bench.say("", pause, b"1-0")
    bench.say("", resume, b"2-0")
    result = bench.say("", pause, b"3-0")
    assert result == [do.Consume("command read", "", (b"3-0",))]
    assert not bench.state.paused


def test_a_checkpoint_can_be_asked_for() -> None:
    assert only(do.Checkpoint, command(Bench(), "checkpoint"))


def test_a_lower_quorum_acts_at_once() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("a")
    bench.elapse(1.0)  # more than the slack
    result = command(bench, "set", "rounds.quorum", 1)
    changed = told_one(msg.Setting, result)
    assert (changed.key, changed.value) == ("rounds.quorum", 1)
    assert why(msg.Setting, result) == "rounds.quorum = 1 (by ann)"
    assert one(do.Merge, result).reason == "grace expired after 1.00 s: 1 of 2, without b"


def test_a_higher_quorum_acts_at_once() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    command(bench, "set", "rounds.quorum", 2)
    bench.contribute("a")
    assert not only(do.Merge, bench.elapse(5.0))
    assert only(do.Merge, bench.contribute("b"))


def test_a_quorum_raised_during_the_grace_window_is_waited_for() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.worker(name)
    bench.steps(a=2, b=2, c=2)
    bench.contribute("a")
    command(bench, "set", "rounds.quorum", 2)
    assert not only(do.Merge, bench.elapse(1.0))
    assert one(do.Merge, bench.contribute("b")).reason.endswith("2 of 3, without c")


def test_a_shorter_grace_acts_on_windows_that_are_open() -> None:
    bench = Bench()
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("a")
    bench.elapse(0.125)
    assert only(do.Merge, command(bench, "set", "rounds.grace_factor", 0.0))


def test_a_longer_grace_acts_on_windows_that_are_open() -> None:
    bench = Bench(make_spec(grace_cap_s=0.25, inner_steps=16))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=8, b=8)
    bench.contribute("a")
    bench.elapse(0.125)
    result = command(bench, "set", "rounds.grace_cap_s", 1.0)
    assert one(do.SetTimer, result).after_s == pytest.approx(1.0 - 0.125)
    assert not only(do.Merge, bench.elapse(0.5))
    assert only(do.Merge, bench.elapse(0.5))


def test_a_shorter_grace_acts_on_a_round_in_overtime() -> None:
    order = one(do.Merge, command(past_its_deadline(), "set", "rounds.grace_factor", 0.0))
    assert order.reason.startswith("grace expired after 3.")


def test_inner_steps_act_at_the_next_opening() -> None:
    bench = Bench()
    bench.worker("a")
    command(bench, "set", "rounds.inner_steps", 8)
    assert not told(msg.Call, bench.steps(a=3))
    assert told(msg.Call, bench.steps(a=1))


def merge_once(bench: Bench) -> list[do.Instruction]:
    """A makes steps until a round opens, contributes, and its contribution is merged."""
    opened = bench.steps(a=1)
    while not told(msg.Call, opened):
        opened = bench.steps(a=1)
    return bench.merge(one(do.Merge, bench.contribute("a", told_one(msg.Call, opened).fragment)))


def test_the_interval_may_be_longer_later_in_the_run() -> None:
    bench = Bench(make_spec(inner_steps=4, later_inner_steps=16, later_from_tokens=400))
    bench.worker("a")
    said = merge_once(bench)
    assert bench.state.tokens < 400
    assert not told(msg.Setting, said)
    while bench.state.tokens < 400:
        said = merge_once(bench)
    changed = [(change.key, change.value) for change in told(msg.Setting, said)]
    assert changed == [("rounds.inner_steps", 16), ("rounds.later_inner_steps", None)]
    assert {tell.reason for tell in only(do.Tell, said) if tell.on_tape == "set"} == {"400 tokens are merged"}
    command(bench, "set", "rounds.inner_steps", 4)  # an operator knows better
    assert not told(msg.Setting, merge_once(bench))
    assert bench.state.spec.rounds.inner_steps == 4


@pytest.mark.parametrize(
    ("key", "value"),
    [("rounds.fragments", 3), ("rounds.unheard_of", 1), ("rounds.quorum", 0), ("rounds.quorum", "most")],
)
def test_a_setting_that_cannot_be_is_refused_with_its_reason(key: str, value: int | str) -> None:
    bench = Bench()
    result = command(bench, "set", key, value)
    assert key in notes("refused", result)[0].reason
    assert not told(msg.Setting, result)
    assert bench.state.spec == make_spec()


def test_an_unknown_command_is_refused() -> None:
    body = msgpack.packb({"id": "1d" * 4, "action": "explode"})
    envelope = msgpack.packb({"s": msg.SCHEMA, "t": "command", "r": "run", "b": body, "g": b""})
    with pytest.raises(MalformedMessage, match="explode") as refused:  # whoever reads the stream hands on why
        msg.decode(envelope, "run")
    result = Bench().send(ev.Unreadable("", b"1-0", str(refused.value)))
    assert "explode" in note("refused", result).reason
    assert one(do.Consume, result) == do.Consume("unreadable", "", (b"1-0",))


# --- many at once -----------------------------------------------------------------------------------------


def test_of_fifty_who_come_at_once_a_few_fetch_the_model_at_the_same_time() -> None:
    bench = Bench()
    welcomed: list[str] = []

    def ask(names: list[str]) -> None:
        for name in names:
            welcomed.extend(w.name for w in told(msg.Welcome, bench.join(name)))

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
    assert not told(msg.Welcome, bench.join("quick"))
    bench.elapse(BOOTSTRAP_S + 1.0)
    assert told(msg.Welcome, bench.join("quick"))


def test_before_birth_there_is_nothing_to_fetch() -> None:
    bench = Bench(born=False)
    for i in range(50):
        assert told(msg.Welcome, bench.join(f"w{i}"))
