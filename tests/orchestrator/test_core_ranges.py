"""The data queue in the decision core: granting, settling, coming back, epochs, and the stored form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.state import DataQueue
from anabranch.orchestrator.core.view import view
from anabranch.queue import messages as msg
from anabranch.queue.messages import Held, Lease
from anabranch.shuffle import item_order, range_order
from anabranch.spec import DataSpec, RunSpec
from tests.orchestrator.bench import TIMELINE, Bench, make_spec, notes, only, told, told_one

PRINT = "ab" * 16
ITEMS, LENGTH = 25, 10  # three ranges, the last of five


def data_spec(epochs: int | None = None) -> RunSpec:
    return make_spec().model_copy(update={"data": DataSpec(range_items=LENGTH, epochs=epochs)})


def ask(bench: Bench, name: str, wanted: int = 1, after: int = 0, **changes: Any) -> list[do.Instruction]:
    said = {"items": ITEMS, "fingerprint": PRINT, "wanted": wanted, "after": after, **changes}
    return bench.say(name, msg.RangeRequest(incarnation=bench.puppets[name].incarnation, **said))


def granted(instructions: Iterable[do.Instruction]) -> list[Lease]:
    return told_one(msg.Leases, instructions).leases


def say(bench: Bench, name: str, leased: int, *held: tuple[int, int, int]) -> list[do.Instruction]:
    """A heartbeat about ranges: (number, delivered, settled) of each that is not done."""
    puppet = bench.puppets[name]
    items = [Held(number=n, delivered=d, settled=s) for n, d, s in held]
    puppet.extra = {"timeline": bench.state.timeline, "leased": leased, "leases": items}
    return bench.send(puppet.heartbeat())


@pytest.fixture
def bench() -> Bench:
    bench = Bench(data_spec())
    bench.worker("a")
    bench.worker("b")
    return bench


def queue(bench: Bench) -> DataQueue:
    assert bench.state.data is not None
    return bench.state.data


def test_ranges_are_granted_in_the_order_of_seed_and_epoch(bench: Bench) -> None:
    first = granted(ask(bench, "a", 2))
    second = granted(ask(bench, "b", 2))
    order = [*range_order(3, 0, 0), *range_order(3, 0, 1)]
    assert [lease.range for lease in (*first, *second)] == [int(r) for r in order[:4]]
    assert [lease.epoch for lease in (*first, *second)] == [0, 0, 0, 1], "the next epoch begins at once"
    assert [lease.stop for lease in (*first, *second)] == [
        5 if lease.range == 2 else 10 for lease in (*first, *second)
    ]
    assert all(lease.first == lease.range * LENGTH and lease.start == 0 for lease in first)


def test_a_repeated_request_is_granted_once(bench: Bench) -> None:
    [lease] = granted(ask(bench, "a"))
    assert granted(ask(bench, "a")) == [lease], "the answer was lost"
    [other] = granted(ask(bench, "a", after=lease.number))
    assert other.number > lease.number


def test_another_dataset_is_refused_and_says_what_differs(bench: Bench) -> None:
    ask(bench, "a")
    for changes in ({"items": 26}, {"fingerprint": "cd" * 16}):
        grant = told_one(msg.Leases, ask(bench, "b", **changes))
        assert not grant.leases
        assert "every worker needs the same copy" in grant.refused
        assert "25" in grant.refused


def test_the_first_request_decides_how_ranges_are_cut() -> None:
    bench = Bench()
    bench.worker("a")
    for items, length in ((100, 16), (512 * 40, 40), (10**9, 65_536)):
        bench.state.data = None
        ask(bench, "a", items=items)
        assert queue(bench).range_items == length


def test_a_range_is_done_when_it_is_settled_to_its_end(bench: Bench) -> None:
    [lease] = granted(ask(bench, "a"))
    say(bench, "a", lease.number, (lease.number, 8, 3))
    assert queue(bench).done == 0
    say(bench, "a", lease.number)
    assert queue(bench).done == 1
    assert not bench.state.members[bench.puppets["a"].incarnation].leases


def test_a_lease_that_was_not_heard_of_is_not_done(bench: Bench) -> None:
    [lease] = granted(ask(bench, "a"))
    say(bench, "a", lease.number - 1)
    assert queue(bench).done == 0


def test_a_dead_workers_range_goes_on_at_its_settled_position(bench: Bench) -> None:
    [lease] = granted(ask(bench, "a"))
    say(bench, "a", lease.number, (lease.number, 4, 2))
    bench.puppets["a"].silent = True
    log = bench.elapse(5.0)
    [redone] = notes("redone", log)
    assert redone.details == {"epoch": 0, "range": lease.range, "from": 2, "delivered": 4}
    [again] = granted(ask(bench, "b"))
    assert (again.epoch, again.range, again.start, again.stop) == (0, lease.range, 2, lease.stop)
    assert queue(bench).redone == 2


def test_what_came_back_goes_out_in_its_own_order_whoever_died_first(bench: Bench) -> None:
    leases = {name: granted(ask(bench, name))[0].range for name in ("a", "b")}
    bench.worker("c")
    for name in sorted(leases, key=lambda name: -leases[name]):
        bench.leave(name)
        bench.elapse(0.5)
    assert [lease.range for lease in granted(ask(bench, "c", 2))] == sorted(leases.values())


def figures_of(processed: int, discarded: int) -> msg.Figures:
    return msg.Figures(processed=processed, discarded=discarded, pending=0)


def test_whoever_leaves_in_order_has_settled_what_it_sent(bench: Bench) -> None:
    [lease] = granted(ask(bench, "a"))
    puppet = bench.puppets["a"]
    say(bench, "a", lease.number, (lease.number, 4, 0))
    puppet.silent = True
    held = [Held(number=lease.number, delivered=4, settled=4)]
    figures = [figures_of(puppet.processed, puppet.processed)] * 2  # all discarded, nothing lost
    bench.leave("a", "done", figures=figures, leases=held)
    log = bench.elapse(1.0)
    assert not notes("redone", log)
    [again] = granted(ask(bench, "b"))
    assert (again.range, again.start) == (lease.range, 4)


def test_what_was_lost_in_spite_of_a_farewell_is_redone(bench: Bench) -> None:
    [lease] = granted(ask(bench, "a"))
    puppet = bench.puppets["a"]
    puppet.silent = True
    held = [Held(number=lease.number, delivered=4, settled=4)]
    figures = [figures_of(puppet.processed, 0)] * 2  # nothing discarded, nothing sent: lost
    bench.leave("a", "done", figures=figures, leases=held)
    bench.elapse(1.0)
    [again] = granted(ask(bench, "b"))
    assert (again.range, again.start) == (lease.range, 0)


def test_who_waits_gets_what_comes_back_without_asking_again() -> None:
    bench = Bench(data_spec(epochs=1))
    bench.worker("a")
    bench.worker("b")
    ask(bench, "a", 3)
    grant = told_one(msg.Leases, ask(bench, "b"))
    assert grant.exhausted
    assert not grant.leases
    bench.puppets["a"].silent = True
    log = bench.elapse(5.0)
    assert [grant.incarnation for grant in told(msg.Leases, log) if grant.leases] == [bench.puppets["b"].incarnation]


def test_the_run_stops_when_its_epochs_are_settled() -> None:
    bench = Bench(data_spec(epochs=1))
    bench.worker("a")
    leases = granted(ask(bench, "a", 8))
    assert len(leases) == 3
    log = say(bench, "a", leases[-1].number, (leases[-1].number, 5, 4))
    assert not told(msg.Stop, log)
    log = say(bench, "a", leases[-1].number)
    assert told_one(msg.Stop, log)
    assert notes("epoch", log)
    assert bench.state.stopped


def test_out_of_data_is_neither_stuck_nor_pacing_but_called() -> None:
    bench = Bench(data_spec(epochs=1))
    bench.worker("a")
    bench.puppets["a"].train(1)
    bench.puppets["a"].extra = {"idle": True}
    log = bench.elapse(1.0)
    [opened] = [tell for tell in only(do.Tell, log) if tell.on_tape == "opened"][:1]
    assert "no worker advances" in opened.reason
    assert told(msg.Call, [opened])[0].called == [bench.puppets["a"].incarnation]
    shown = view(bench.state, bench.now + 100)
    assert shown["members"][0]["condition"] == "out of data"
    assert shown["phase"] == "no data left: data.epochs is reached"


def test_a_report_of_another_timeline_settles_nothing(bench: Bench) -> None:
    [lease] = granted(ask(bench, "a"))
    bench.send(ev.Returned("the server lost writes"))
    bench.puppets["a"].extra = {"timeline": TIMELINE, "leased": lease.number, "leases": []}
    bench.send(bench.puppets["a"].heartbeat())
    assert queue(bench).done == 0
    [again] = granted(ask(bench, "b"))
    assert again.number > lease.number + 1000, "numbers given out on the lost stretch do not come back"


# --- the whole, at random ---------------------------------------------------------------------------------


@dataclass
class Trainer:
    """What a worker holds, as its books would have it."""

    leased: int = 0
    at: dict[int, list[int]] = field(default_factory=dict)  # lease: delivered, settled, stop
    leases: dict[int, Lease] = field(default_factory=dict)


class Storm(RuleBasedStateMachine):
    """Workers ask, train, die, leave; the leader is replaced. Every item of both epochs is delivered."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(data_spec(epochs=2))
        self.trainers: dict[str, Trainer] = {}
        self.delivered: Counter[tuple[int, int]] = Counter()  # (epoch, item)
        self.born = 0

    @precondition(lambda self: not self.bench.state.stopped and len(self.trainers) < 4)
    @rule()
    def join(self) -> None:
        self.born += 1
        name = f"w{self.born}"
        self.bench.worker(name)
        self.trainers[name] = Trainer()

    @precondition(lambda self: self.trainers)
    @rule(data=st.data(), wanted=st.integers(1, 3), lost=st.booleans())
    def ask(self, data: st.DataObject, wanted: int, lost: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.trainers)))
        trainer = self.trainers[name]
        for grant in told(msg.Leases, ask(self.bench, name, wanted, trainer.leased)):
            if not lost:
                self._take(grant.leases, trainer)

    def _take(self, leases: list[Lease], trainer: Trainer) -> None:
        for lease in leases:
            if lease.number > trainer.leased:
                trainer.leased = lease.number
                trainer.leases[lease.number] = lease
                trainer.at[lease.number] = [lease.start, lease.start, lease.stop]

    @precondition(lambda self: any(t.at for t in self.trainers.values()))
    @rule(data=st.data(), steps=st.integers(1, 12), lag=st.integers(0, 12), heard=st.booleans())
    def train(self, data: st.DataObject, steps: int, lag: int, heard: bool) -> None:
        name = data.draw(st.sampled_from(sorted(n for n, t in self.trainers.items() if t.at)))
        trainer = self.trainers[name]
        number = data.draw(st.sampled_from(sorted(trainer.at)))
        lease, at = trainer.leases[number], trainer.at[number]
        order = item_order(lease.stop, 0, lease.epoch, lease.range)
        stop = min(at[2], at[0] + steps)
        for position in range(at[0], stop):
            self.delivered[lease.epoch, lease.first + int(order[position])] += 1
        at[0] = stop
        at[1] = max(at[1], stop - lag)
        if heard:
            self._beat(name)

    def _beat(self, name: str) -> None:
        trainer = self.trainers[name]
        for number in [n for n, at in trainer.at.items() if at[1] == at[2]]:
            del trainer.at[number]
        say(self.bench, name, trainer.leased, *((n, d, s) for n, (d, s, _) in trainer.at.items()))

    @precondition(lambda self: self.trainers)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.trainers)))
        del self.trainers[name]
        self.bench.puppets[name].silent = True
        self.bench.elapse(4.0)

    @precondition(lambda self: self.trainers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Everything it trained on is sent or discarded, so all of it is settled."""
        name = data.draw(st.sampled_from(sorted(self.trainers)))
        trainer, puppet = self.trainers.pop(name), self.bench.puppets[name]
        puppet.silent = True
        held = [Held(number=n, delivered=at[0], settled=at[0]) for n, at in trainer.at.items()]
        figures = [figures_of(puppet.processed, puppet.processed)] * 2
        self.bench.leave(name, "done", figures=figures, leases=held)
        self.bench.elapse(1.0)

    @rule()
    def a_new_leader(self) -> None:
        self.bench.engine.succeed(self.bench.reload())

    @invariant()
    def every_range_is_somewhere(self) -> None:
        if (data := self.bench.state.data) is None:
            return
        held = [(x.epoch, x.range) for m in self.bench.state.members.values() for x in m.leases.values()]
        places = Counter([*held, *((epoch, range_) for epoch, range_, _ in data.returned)])
        assert not places or max(places.values()) == 1, "a range is in two places"
        unfinished = sum(data.left.values())
        not_yet = (data.ranges - data.next) if data.next else 0
        assert unfinished == len(places) + not_yet

    def teardown(self) -> None:
        """One worker finishes what is left; then the books of the data add up."""
        self.bench.state.stopped = False
        self.bench.worker("last")
        self.trainers["last"] = Trainer()
        for name in [n for n in self.trainers if n != "last"]:
            del self.trainers[name]
            self.bench.puppets[name].silent = True
        self.bench.elapse(4.0)
        for _ in range(20):
            trainer = self.trainers["last"]
            for grant in told(msg.Leases, ask(self.bench, "last", 2, trainer.leased)):
                self._take(grant.leases, trainer)
            for number, at in list(trainer.at.items()):
                lease = trainer.leases[number]
                order = item_order(lease.stop, 0, lease.epoch, lease.range)
                for position in range(at[0], at[2]):
                    self.delivered[lease.epoch, lease.first + int(order[position])] += 1
                at[:2] = [at[2], at[2]]
            self._beat("last")
        redone = {(n.details["epoch"], n.details["range"]) for n in notes("redone", self.bench.log)}
        for epoch in range(2):
            for item in range(ITEMS):
                times = self.delivered[epoch, item]
                assert times >= 1, f"item {item} of epoch {epoch} was skipped"
                unknown = (epoch, item // LENGTH) in redone or not self.bench.state.stopped
                assert times == 1 or unknown or self._unheard(epoch, item // LENGTH)
        assert queue(self.bench).done == 6

    def _unheard(self, epoch: int, range_: int) -> bool:
        """Delivered after the last heartbeat of a worker that died: leased again from a position it knew of."""
        again = [x for note in notes("leased", self.bench.log) for x in note.details["leases"]]
        return sum((e, r) == (epoch, range_) for _, e, r, _ in again) > 1


TestStorm = Storm.TestCase
TestStorm.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
