"""The stored form of the core: msgpack, instants with the instant of storing, and what a new leader makes of it."""

from __future__ import annotations

from typing import Any

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.ledger import Account
from anabranch.orchestrator.core.record import core_record, member_record, pack_record, restore
from anabranch.orchestrator.core.state import COMMANDS_KEPT, DEPARTED_KEPT, OUTCOMES_KEPT, ROUNDS_KEPT, State
from anabranch.queue import messages as msg
from tests.orchestrator.bench import TOKENS, Bench, make_spec, notes, one, only, told, told_one

COMMAND = "c1" * 4


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
    bench.merge(one(do.Merge, bench.elapse(1.0)))
    bench.join("gone")
    bench.leave("gone")
    bench.say("", msg.Command(id=COMMAND, action="set", key="rounds.grace_factor", value=0.5))
    bench.steps(a=2, b=2, nan=2)
    offer = bench.offer("nan", 1)
    bench.send_offer(offer)
    bench.fetch_failed(offer, "not finite")
    bench.contribute("a", 1)
    bench.elapse(1.0)
    assert bench.state.rounds
    assert bench.state.departed
    assert bench.state.fragments[1].refused
    return bench


def stored(state: State, now: float) -> tuple[bytes, list[bytes]]:
    return core_record(state, now), [member_record(member, now) for _, member in sorted(state.members.items())]


def ages(record: bytes) -> Any:
    """A record's plain values, with ages for its instants: what another clock has no part in."""
    held = msg.unpack(record)
    now = held.pop("now")
    if "member" in held:
        held["member"]["seen_at"] -= now
    else:
        held["state"]["interval_at"] -= now
        for round_ in held["state"]["rounds"].values():
            round_["opened_at"] -= now
    return held


def test_dump_load_dump_is_the_same() -> None:
    bench = busy()
    assert stored(bench.reload(), bench.now) == stored(bench.state, bench.now)


def test_records_survive_msgpack() -> None:
    core, members = stored(busy().state, 10.0)
    assert [pack_record(msg.unpack(data)) for data in (core, *members)] == [core, *members]


def test_a_large_model_trained_for_long_can_be_stored() -> None:
    bench = Bench(sizes=(7 * 10**9, 10))
    bench.worker("a")
    bench.steps(a=2)
    bench.merge(one(do.Merge, bench.contribute("a", tokens=3 * 10**9)))
    core, _ = stored(bench.state, bench.now)
    assert pack_record(msg.unpack(core)) == core
    assert bench.reload().applied_parameter_tokens == 3 * 10**9 * 7 * 10**9


def test_records_hold_durations_so_another_process_with_another_clock_can_go_on() -> None:
    bench = busy()
    core, members = stored(bench.state, bench.now)
    accounts = {i: m.account for i, m in bench.state.members.items()}
    later = restore(core, members, accounts, spec=bench.state.spec, nonce="x", broadcast=9, now=77777.0)
    later_core, later_members = stored(later, 77777.0)
    assert ages(later_core) == ages(core)
    assert [ages(member) for member in later_members] == [ages(member) for member in members]
    (mine,), (theirs,) = bench.state.rounds.values(), later.rounds.values()
    assert 77777.0 - theirs.opened_at == bench.now - mine.opened_at


def test_a_loaded_core_continues_the_deadlines_of_its_rounds() -> None:
    bench = busy()
    (round_,) = bench.state.rounds.values()
    timers = only(do.SetTimer, bench.successor().engine.start(fresh=False))
    left = round_.opened_at + round_.deadline_s - bench.now
    assert [(t.name, t.round, t.after_s) for t in timers] == [
        ("sweep", 0, 0.5),
        ("round deadline", round_.number, left),
    ]


def test_a_deadline_that_passed_meanwhile_is_due_at_once() -> None:
    leader = busy().successor()
    leader.engine.now += 1000.0
    timers = only(do.SetTimer, leader.engine.start(fresh=False))
    (deadline,) = [t for t in timers if t.name == "round deadline"]
    assert deadline.after_s == 0.0


def test_a_new_leader_opens_nothing_before_it_has_heard_anybody() -> None:
    bench = Bench()
    a = bench.worker("a")
    bench.send(ev.Draining())  # the one before it opens nothing more
    a.train(1)
    a.extra = {"idle": True}
    bench.elapse(1.0)
    leader = bench.successor()
    assert not told(msg.Call, leader.engine.start(fresh=False)), "what a has sent may be in its inbox"
    assert told(msg.Call, leader.send(ev.TimerFired("sweep")))


def test_a_silence_goes_on_under_the_next_leader() -> None:
    bench = Bench()
    bench.worker("a").silent = True
    bench.elapse(2.0)
    leader = bench.successor()
    leader.engine.now += 0.25
    assert not notes("gone", leader.send(ev.TimerFired("sweep")))
    leader.engine.now += 0.5
    assert notes("gone", leader.send(ev.TimerFired("sweep")))


def test_a_round_whose_base_is_not_current_is_dropped() -> None:
    bench = busy()
    bench.state.fragments[1].version += 1  # the stored version is newer than the stored round
    assert not bench.reload().rounds


def test_a_loaded_member_is_live_but_paces_only_after_its_next_step() -> None:
    bench = busy()
    leader = bench.successor()
    a = bench.puppets["a"]
    assert leader.state.members[a.incarnation].live
    assert leader.state.members[a.incarnation].stepped_at is None
    a.train(1)
    leader.engine.now += 0.125
    leader.send(a.heartbeat())
    assert leader.state.members[a.incarnation].stepped_at is not None


def test_a_new_leader_that_reads_the_inbox_again_continues_the_round() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    offers = [bench.offer("a"), bench.offer("b")]
    bench.send_offer(offers[0])
    bench.fetched(offers[0])  # in hand: not stored, but its entry is still in the inbox
    leader = bench.successor()
    result = [i for offer in offers for i in leader.send_offer(offer)]
    assert [fetch.offer for fetch in only(do.Fetch, result)] == offers
    result = [i for offer in offers for i in leader.fetched(offer)]
    assert [offer for offer, _ in one(do.Merge, result).parts] == offers


def test_a_new_leader_knows_what_was_applied() -> None:
    bench = Bench()
    bench.worker("a")
    bench.steps(a=2)
    offer = bench.offer("a")
    bench.send_offer(offer)
    bench.merge(one(do.Merge, bench.fetched(offer)))
    result = bench.successor().send_offer(offer)
    assert told_one(msg.Verdicts, result).verdicts[0].applied
    assert not only(do.Book, result)


def test_a_refusal_outlives_its_leader() -> None:
    bench = busy()
    leader = bench.successor()
    b = bench.offer("b", 1)
    a = bench.offer("a", 1)
    result: list[do.Instruction] = []
    for offer in (a, b):
        leader.send_offer(offer)
        result += leader.fetched(offer)
    commit = told_one(msg.Merged, leader.commit(one(do.Merge, result)))
    assert [(v.incarnation, v.applied) for v in commit.verdicts] == [(1, True), (2, True), (3, False)]


def test_a_new_leader_checks_no_books_before_its_own_broadcast_position() -> None:
    bench = busy()
    assert bench.reload().members[1].outcome_read == {0: bench.engine.broadcast}


def test_a_repeated_command_is_known_to_the_next_leader() -> None:
    result = busy().successor().say("", msg.Command(id=COMMAND, action="stop"), b"9-0")
    assert result == [do.Consume("command read", "", (b"9-0",))]


def test_between_full_dumps_only_members_whose_durable_part_changed_are_dumped() -> None:
    bench = busy()
    core = bench.engine.core
    everything = core.take(everything=True)
    assert everything is not None
    assert everything.everything
    core.stored(everything, bench.engine.broadcast, bench.now)
    bench.elapse(0.5)  # heartbeats only
    assert bench.state.changed == set()
    b = bench.puppets["b"]
    core.step(ev.Heard("b", bench.entry(), msg.Farewell(incarnation=b.incarnation)), bench.now)
    batch = core.take()
    assert batch is not None
    assert batch.changed == {b.incarnation}
    assert not batch.everything


def test_a_closed_members_record_is_to_be_removed() -> None:
    bench = Bench()
    bench.join("a")
    bench.leave("a")
    core = bench.engine.core
    core.step(ev.TimerFired("sweep"), bench.now)
    batch = core.take()
    assert batch is not None
    assert batch.removed == {1}
    assert not batch.changed
    assert bench.state.members == {}


def test_loading_takes_the_ledgers_figures() -> None:
    bench = busy()
    core, members = stored(bench.state, bench.now)
    accounts = {1: Account([5, 0], [0, 6], [0, 0])}
    loaded = restore(core, members, accounts, spec=bench.state.spec, nonce="x", broadcast=0, now=0.0)
    assert loaded.members[1].account == accounts[1]
    assert loaded.members[2].account == Account.empty(2)


def test_memory_is_bounded_over_any_number_of_rounds_and_incarnations() -> None:
    bench = Bench(make_spec(fragments=1, inner_steps=1), sizes=(10,))
    bench.worker("a")
    for life in range(1, 81):
        bench.steps(a=1)
        bench.merge(one(do.Merge, bench.contribute("a")))
        bench.join("guest", life=life)
        bench.leave("guest")
        bench.command("resume")
        bench.elapse(0.5)
    state = bench.state
    assert state.fragments[0].version == 80
    assert list(state.members) == [1]
    assert len(state.departed) == DEPARTED_KEPT
    assert len(state.commands) == COMMANDS_KEPT
    assert len(state.fragments[0].recent) == ROUNDS_KEPT
    assert len(state.members[1].outcomes[0]) == OUTCOMES_KEPT
    assert state.tokens == 81 * TOKENS
    assert not state.members[1].fetching
