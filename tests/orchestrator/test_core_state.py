"""The stored form of the core: durations instead of instants, msgpack, and what a new leader makes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from anabranch.orchestrator import events as ev
from anabranch.orchestrator.core import Core
from anabranch.orchestrator.ledger import Account
from anabranch.orchestrator.state import COMMANDS_KEPT, DEPARTED_KEPT, OUTCOMES_KEPT, ROUNDS_KEPT
from anabranch.queue.messages import pack, unpack
from tests.orchestrator.bench import TOKENS, Bench, make_spec, one, only


def busy() -> Bench:
    """A run with a bit of everything: a merge, an open round, a refusal, somebody departed, an evaluator."""
    bench = Bench(make_spec(quorum=2))
    for name in ("a", "b", "nan"):
        bench.worker(name)
    bench.join("eval", role="evaluator", label="the judge")
    bench.puppets["eval"].extra = {"heldout_loss": 2.5, "measured_tokens": 300}
    bench.steps(a=2, b=2)
    bench.contribute("a")
    bench.contribute("b")
    bench.merge(one(ev.Merge, bench.elapse(1.0)))
    bench.join("gone")
    bench.send(ev.Left("gone", bench.puppets["gone"].incarnation, "", bench.entry()))
    bench.send(ev.Commanded("c1", "set", bench.entry(), "rounds.grace_factor", 0.5))
    bench.steps(a=2, b=2, nan=2)
    offer = bench.offer("nan", 1)
    bench.send(ev.Offered(offer))
    bench.send(ev.FetchFailed(offer, "not finite"))
    bench.contribute("a", 1)
    bench.elapse(1.0)
    assert bench.state.rounds
    assert bench.state.departed
    assert bench.state.fragments[1].refused
    return bench


def stored(core: Core, now: float) -> tuple[Any, Any]:
    return core.dump(now, everything=True)


def test_dump_load_dump_is_the_same() -> None:
    bench = busy()
    assert stored(bench.reload(), bench.now) == stored(bench.core, bench.now)


def test_records_survive_msgpack() -> None:
    core, members = stored(busy().core, 10.0)
    assert unpack(pack(core)) == core
    assert {i: unpack(pack(m)) for i, m in members.items()} == members


def test_a_large_model_trained_for_long_can_be_stored() -> None:
    bench = Bench(sizes=(7 * 10**9, 10))
    bench.worker("a")
    bench.steps(a=2)
    bench.merge(one(ev.Merge, bench.contribute("a", tokens=3 * 10**9)))
    core, _ = stored(bench.core, bench.now)
    assert unpack(pack(core)) == core


def test_records_hold_durations_so_another_process_with_another_clock_can_go_on() -> None:
    bench = busy()
    core, members = stored(bench.core, bench.now)
    accounts = {i: dataclasses.replace(m.account) for i, m in bench.state.members.items()}
    later = Core.load(
        core, list(members.values()), accounts, spec=bench.state.spec, nonce="x", broadcast=9, now=77777.0
    )
    assert stored(later, 77777.0) == (core, members)
    (mine,), (theirs,) = bench.state.rounds.values(), later.state.rounds.values()
    assert 77777.0 - theirs.opened_at == bench.now - mine.opened_at


def test_a_loaded_core_continues_the_deadlines_of_its_rounds() -> None:
    bench = busy()
    (round_,) = bench.state.rounds.values()
    timers = only(ev.SetTimer, bench.reload().start(bench.now))
    left = round_.opened_at + round_.deadline_s - bench.now
    assert [(t.name, t.round, t.after_s) for t in timers] == [
        ("sweep", 0, 0.5),
        ("round deadline", round_.number, left),
    ]


def test_a_deadline_that_passed_meanwhile_is_due_at_once() -> None:
    bench = busy()
    loaded = bench.reload()
    (deadline,) = [t for t in only(ev.SetTimer, loaded.start(bench.now + 1000.0)) if t.name == "round deadline"]
    assert deadline.after_s == 0.0


def test_a_silence_goes_on_under_the_next_leader() -> None:
    bench = Bench()
    bench.worker("a").silent = True
    bench.elapse(2.0)
    leader = bench.reload()
    assert not only(ev.Gone, leader.handle(ev.TimerFired("sweep"), bench.now + 0.25))
    assert only(ev.Gone, leader.handle(ev.TimerFired("sweep"), bench.now + 0.75))


def test_a_round_whose_base_is_not_current_is_dropped() -> None:
    bench = busy()
    bench.state.fragments[1].version += 1  # the stored version is newer than the stored round
    assert not bench.reload().state.rounds


def test_a_loaded_member_is_live_but_paces_only_after_its_next_step() -> None:
    bench = busy()
    loaded = bench.reload()
    a = bench.puppets["a"]
    assert loaded.state.members[a.incarnation].live
    assert loaded.state.members[a.incarnation].stepped_at is None
    a.train(1)
    loaded.handle(a.heartbeat(), bench.now + 0.125)
    assert loaded.state.members[a.incarnation].stepped_at is not None


def test_a_new_leader_that_reads_the_inbox_again_continues_the_round() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    offers = [bench.offer("a"), bench.offer("b")]
    bench.send(ev.Offered(offers[0]))
    bench.send(ev.Fetched(offers[0]))  # in hand: not stored, but its entry is still in the inbox
    leader = bench.reload()
    result = [i for offer in offers for i in leader.handle(ev.Offered(offer), bench.now)]
    assert [fetch.offer for fetch in only(ev.Fetch, result)] == offers
    result = [i for offer in offers for i in leader.handle(ev.Fetched(offer), bench.now)]
    assert [offer for offer, _ in one(ev.Merge, result).parts] == offers


def test_a_new_leader_knows_what_was_applied() -> None:
    bench = Bench()
    bench.worker("a")
    bench.steps(a=2)
    offer = bench.offer("a")
    bench.send(ev.Offered(offer))
    bench.merge(one(ev.Merge, bench.send(ev.Fetched(offer))))
    result = bench.reload().handle(ev.Offered(offer), bench.now)
    assert one(ev.Settle, result).verdicts[0].applied
    assert not only(ev.Book, result)


def test_a_refusal_outlives_its_leader() -> None:
    bench = busy()
    leader = bench.reload()
    b = bench.offer("b", 1)
    a = bench.offer("a", 1)
    result: list[ev.Instruction] = []
    for offer in (a, b):
        leader.handle(ev.Offered(offer), bench.now)
        result += leader.handle(ev.Fetched(offer), bench.now)
    order = one(ev.Merge, result)
    commit = one(ev.Commit, leader.handle(ev.Merged(order.round, b"2" * 32), bench.now))
    assert [(v.incarnation, v.applied) for v in commit.verdicts] == [(1, True), (2, True), (3, False)]


def test_a_new_leader_checks_no_books_before_its_own_broadcast_position() -> None:
    bench = busy()
    loaded = bench.reload()
    assert loaded.state.members[1].outcome_read == {0: bench.broadcast}


def test_a_repeated_command_is_known_to_the_next_leader() -> None:
    bench = busy()
    result = bench.reload().handle(ev.Commanded("c1", "stop", b"9-0"), bench.now)
    assert result == [ev.Consume("command read", "", (b"9-0",))]


def test_between_full_dumps_only_members_whose_durable_part_changed_are_dumped() -> None:
    bench = busy()
    bench.core.dump(bench.now)
    bench.elapse(0.5)  # heartbeats only
    assert bench.core.dump(bench.now)[1] == {}
    bench.send(ev.Left("b", bench.puppets["b"].incarnation, "", bench.entry()))
    assert set(bench.core.dump(bench.now)[1]) == {bench.puppets["b"].incarnation}


def test_a_closed_members_record_is_to_be_removed() -> None:
    bench = Bench()
    bench.join("a")
    bench.send(ev.Left("a", 1, "", bench.entry()))
    bench.elapse(0.5)
    assert bench.state.removed == {1}
    assert bench.core.dump(bench.now, everything=True)[1] == {}


def test_loading_takes_the_ledgers_figures() -> None:
    bench = busy()
    core, members = stored(bench.core, bench.now)
    accounts = {1: Account([5, 0], [0, 6], [0, 0])}
    loaded = Core.load(core, list(members.values()), accounts, spec=bench.state.spec, nonce="x", broadcast=0, now=0.0)
    assert loaded.state.members[1].account == accounts[1]
    assert loaded.state.members[2].account == Account.empty(2)


def test_memory_is_bounded_over_any_number_of_rounds_and_incarnations() -> None:
    bench = Bench(make_spec(fragments=1, inner_steps=1), sizes=(10,))
    bench.worker("a")
    for life in range(1, 81):
        bench.steps(a=1)
        bench.merge(one(ev.Merge, bench.contribute("a")))
        bench.join("guest", life=life)
        bench.send(ev.Left("guest", bench.puppets["guest"].incarnation, "", bench.entry()))
        bench.send(ev.Commanded(f"c{life}", "resume", bench.entry()))
        bench.elapse(0.5)
    state = bench.state
    assert state.fragments[0].version == 80
    assert list(state.members) == [1]
    assert len(state.departed) == DEPARTED_KEPT
    assert len(state.commands) == COMMANDS_KEPT
    assert len(state.fragments[0].recent) == ROUNDS_KEPT
    assert len(state.members[1].outcomes[0]) == OUTCOMES_KEPT
    assert state.tokens == 81 * TOKENS
    assert not state.fetching
