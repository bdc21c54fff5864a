"""The stored form, field by field: what survives a leader, what an image keeps, and what damage is noticed as.

Everything here is filled with values that are no defaults. A field that somebody adds fails these tests until it has
one here, and either survives or is named in `record.py` with the reason why not.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Mapping
from typing import Any, cast

import msgpack
import pytest

from anabranch.errors import MalformedMessage
from anabranch.orchestrator.core import record
from anabranch.orchestrator.core.events import Event, Offer
from anabranch.orchestrator.core.grace import Averages
from anabranch.orchestrator.core.ledger import Account
from anabranch.orchestrator.core.port import Batch, Core
from anabranch.orchestrator.core.record import core_record, from_image, image, member_record, restore
from anabranch.orchestrator.core.stages import Stage
from anabranch.orchestrator.core.state import (
    DataQueue,
    Departed,
    Fragment,
    Lately,
    LeasedRange,
    Member,
    Refusal,
    Round,
    State,
)
from anabranch.queue import messages as msg
from tests.orchestrator.bench import Bench, make_spec
from tests.orchestrator.test_core_properties import START, random_plan
from tests.orchestrator.test_stages import below_its_quorum_when_the_window_ends, past_its_deadline
from tests.orchestrator.world import World

NOW = 100.0
FRESH = Member(0, msg.Register(name="x", nonce=b"x" * 16), Account(), seen_at=0.0, joined_at=0.0)
BLANK: dict[type, Any] = {  # what each field has if nobody says anything
    State: State(make_spec(), "x"),
    Member: FRESH,
    Fragment: Fragment(0, 0, b""),
    Round: Round(0, 0, 0, 0.0, 0.0, set()),
    DataQueue: DataQueue(0, "", 0),
    LeasedRange: LeasedRange(0, 0, 0, 0, 0, 0, 0),
    Departed: Departed(0, "", "", 0.0, 0.0, 0.0, 0.0, 0.0),
    Refusal: Refusal(0, "", 0),
    Averages: Averages(),
    Account: Account(),
}


# --- a state without a default in it ----------------------------------------------------------------------


def an_offer() -> Offer:
    bench = Bench()
    bench.worker("a")
    return bench.offer("a", 0, base=3)


def a_report() -> msg.Progress:
    return msg.Progress(
        incarnation=7,
        steps=9,
        step_s=0.25,
        loss=2.5,
        adopted=[3, 4],
        held=[50, 60],
        processed=700,
        discarded=[10, 20],
        pending=[5, 6],
        read=88,
        train_s=4.0,
        rest_s=1.0,
        life_s=9.0,
        bytes_sent=1234,
        heldout_loss=2.25,
        measured_tokens=600,
        memory_bytes=700,
        timeline="2-old",
        leased=5,
        leases=[msg.Held(number=5, delivered=4, settled=3)],
        idle=True,
    )


def a_register() -> msg.Register:
    return msg.Register(
        nonce=b"n" * 16,
        name="a",
        label="my laptop",
        role="evaluator",
        layout_hash="layout",
        can_init=True,
        device="a GPU",
        release="1.2.3",
    )


def a_lease() -> LeasedRange:
    return LeasedRange(number=5, epoch=1, range=2, start=3, stop=10, delivered=8, settled=6, parted=7)


def a_member() -> Member:
    offer = an_offer()
    return Member(
        incarnation=7,
        register=a_register(),
        account=Account([1, 2], [3, 4], [5, 6]),
        seen_at=NOW - 1.5,
        joined_at=NOW - 50.0,
        live=False,
        left=True,
        report=a_report(),
        adopted=[3, 4],
        held=[50, 60],
        steps=9,
        step_s=0.25,
        observed_s=0.5,
        stepped_at=NOW - 2.0,
        mark=7.5,
        known=[(700, 10), (700, 20)],
        fetching={offer.entry: offer},
        outcomes={0: [(1, True, 100), (2, False, 50)], 1: [(3, True, 60)]},
        outcome_read={0: 80, 1: 85},
        imbalances={1: 40},
        lately=Lately([[1.0, 2.0, 3.0]], 4),
        last_round=11,
        leases={5: a_lease()},
        wants=2,
        state_from=3,
        claimed_newer=True,
    )


def a_fragment() -> Fragment:
    return Fragment(
        index=1,
        size=10,
        digest=b"d" * 32,
        version=3,
        in_hand={7: an_offer()},
        refused={8: Refusal(tokens=300, reason="not finite", round=12)},
        recent=[(11, 2), (12, 3)],
    )


def a_round() -> Round:
    return Round(
        number=12,
        fragment=1,
        base=3,
        opened_at=NOW - 4.0,
        deadline_s=10.0,
        called={7, 8},
        declined={9},
        stage="merging",
        quorum_at=NOW - 3.0,
        grace_s=0.5,
        closed="grace expired",
        closed_at=NOW - 2.5,
        reason="grace expired after 1.50 s: 1 of 2",
        parts=((an_offer(), 30000.0),),
    )


def a_queue() -> DataQueue:
    return DataQueue(
        items=25,
        fingerprint="ab" * 16,
        range_items=10,
        epoch=1,
        next=2,
        next_lease=6,
        done=4,
        redone=3,
        left={0: 1, 1: 3},
        returned=[(0, 2, 1)],
    )


def a_departed() -> Departed:
    return Departed(
        incarnation=2,
        name="gone",
        role="worker",
        processed=100.0,
        applied=50.0,
        rejected=20.0,
        discarded=10.0,
        lost=20.0,
        left=True,
        train_s=4.0,
        rest_s=1.0,
        life_s=9.0,
        bytes_sent=77,
    )


def a_state() -> State:
    first = dataclasses.replace(a_fragment(), index=0, in_hand={}, refused={}, recent=[(10, 1)])
    return State(
        spec=make_spec(quorum=2),
        nonce="old",
        timeline="2-old",
        layout_hash="layout",
        fragments=[first, a_fragment()],
        members={7: a_member()},
        rounds={12: a_round()},
        averages=Averages(step_s=0.25, quorum_s=0.5, sync_s=0.125),
        interval_at=NOW - 5.0,
        due_at=NOW - 0.25,
        next_round=13,
        next_incarnation=9,
        next_fragment=1,
        asked_init=7,
        init_given=True,
        init_reading=True,
        orphaned=True,
        paused=True,
        stopped=True,
        full=True,
        draining=True,
        applied_parameter_tokens=3 * 2**70,
        counts={"all arrived": 5},
        heldout=[(300, 2.5)],
        departed_books=[[1, 2, 3], [4, 5, 6]],
        departed=[a_departed()],
        commands=["c1c1c1c1"],
        data=a_queue(),
        changed={7},
        removed={6},
        unmarked=[(7, 1)],
        committing=[NOW - 2.5],
    )


FILLED: dict[type, Callable[[], Any]] = {
    State: a_state,
    Member: a_member,
    Fragment: a_fragment,
    Round: a_round,
    DataQueue: a_queue,
    LeasedRange: a_lease,
    Departed: a_departed,
    Refusal: lambda: a_fragment().refused[8],
    Averages: lambda: a_state().averages,
    Account: lambda: a_member().account,
}


def fields(value: Any) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}


@pytest.mark.parametrize("kind", FILLED, ids=lambda kind: str(kind.__name__))
def test_these_tests_fill_every_field(kind: type) -> None:
    filled, blank = fields(FILLED[kind]()), fields(BLANK[kind])
    assert not [name for name in filled if filled[name] == blank[name]], "give it another value than its default"


def test_the_messages_that_are_kept_are_filled_too() -> None:
    for message in (a_report(), a_register()):
        blank = {name: f.default for name, f in type(message).model_fields.items() if not f.is_required()}
        assert not [name for name, default in blank.items() if getattr(message, name) == default]


# --- a successor ------------------------------------------------------------------------------------------


def successor(state: State, now: float = NOW, accounts: Mapping[int, Account] | None = None) -> State:
    """Restored by another leader, with another spec and ledger, at this instant of its clock."""
    members = [member_record(member, NOW) for member in state.members.values()]
    return restore(
        core_record(state, NOW),
        members,
        accounts if accounts is not None else {7: Account([9, 9], [9, 9], [9, 9])},
        spec=make_spec(quorum=3),
        nonce="new",
        broadcast=99,
        now=now,
    )


def survived(before: Any, after: Any) -> set[str]:
    theirs = fields(after)
    return {name for name, value in fields(before).items() if theirs[name] == value}


def test_of_the_state_exactly_what_is_named_does_not_survive() -> None:
    before = a_state()
    after = successor(before)
    inside = {"fragments", "rounds"}  # what is named there does not survive
    assert survived(before, after) == fields(before).keys() - record.STATE_NOT_STORED.keys() - inside
    assert (after.spec, after.nonce) == (make_spec(quorum=3), "new")
    assert list(after.members) == [7]
    blank = fields(BLANK[State])
    given = {"spec", "nonce", "members"}
    assert {n: getattr(after, n) for n in record.STATE_NOT_STORED if n not in given} == {
        n: blank[n] for n in record.STATE_NOT_STORED if n not in given
    }


@pytest.mark.parametrize(
    ("find", "not_stored"),
    [
        (lambda state: state.fragments[1], record.FRAGMENT_NOT_STORED),
        (lambda state: state.rounds[12], record.ROUND_NOT_STORED),
    ],
    ids=["fragment", "round"],
)
def test_of_its_parts_exactly_what_is_named_does_not_survive(
    find: Callable[[State], Any], not_stored: dict[str, str]
) -> None:
    before = a_state()
    old, new = find(before), find(successor(before))
    assert survived(old, new) == fields(old).keys() - not_stored.keys()
    blank = fields(BLANK[type(old)])
    assert {name: getattr(new, name) for name in not_stored} == {name: blank[name] for name in not_stored}


def test_of_a_member_exactly_what_is_named_does_not_survive() -> None:
    before = a_state()
    old, new = before.members[7], successor(before).members[7]
    assert survived(old, new) == fields(old).keys() - record.MEMBER_NOT_STORED.keys()
    instead = {"account": Account([9, 9], [9, 9], [9, 9]), "joined_at": NOW, "outcome_read": {0: 99, 1: 99}}
    blank = fields(FRESH)
    assert {name: getattr(new, name) for name in record.MEMBER_NOT_STORED} == {
        name: instead.get(name, blank[name]) for name in record.MEMBER_NOT_STORED
    }


@pytest.mark.parametrize(
    ("not_stored", "names"),
    [
        (
            record.STATE_NOT_STORED,
            "spec nonce members init_given init_reading orphaned due_at full draining "
            "changed removed unmarked committing",
        ),
        (record.FRAGMENT_NOT_STORED, "in_hand"),
        (record.ROUND_NOT_STORED, "stage quorum_at grace_s closed closed_at parts"),
        (
            record.MEMBER_NOT_STORED,
            "account joined_at observed_s stepped_at fetching outcome_read imbalances lately state_from",
        ),
    ],
    ids=["state", "fragment", "round", "member"],
)
def test_nothing_else_is_left_out(not_stored: dict[str, str], names: str) -> None:
    """Whoever leaves out more says so here, too: what a successor lacks is seldom missed at once."""
    assert not_stored.keys() == set(names.split())


def test_every_reason_is_about_a_field() -> None:
    for kind, not_stored in (
        (State, record.STATE_NOT_STORED),
        (Fragment, record.FRAGMENT_NOT_STORED),
        (Round, record.ROUND_NOT_STORED),
        (Member, record.MEMBER_NOT_STORED),
    ):
        assert not_stored.keys() <= fields(BLANK[kind]).keys()
        assert all(not_stored.values())


def test_instants_are_as_long_ago_for_the_successor() -> None:
    before = a_state()
    after = successor(before, now=5.0)
    assert 5.0 - after.interval_at == NOW - before.interval_at
    assert 5.0 - after.rounds[12].opened_at == NOW - before.rounds[12].opened_at
    assert 5.0 - after.members[7].seen_at == NOW - before.members[7].seen_at
    assert after.members[7].joined_at == 5.0


def test_who_is_not_in_the_ledger_has_an_empty_account() -> None:
    assert successor(a_state(), accounts={}).members[7].account == Account.empty(2)


def test_a_record_does_not_depend_on_the_order_in_which_sets_grew() -> None:
    one, other = a_state(), a_state()
    one.rounds[12].called, other.rounds[12].called = set(range(0, 320, 8)), set(range(312, -1, -8))
    assert core_record(one, NOW) == core_record(other, NOW)


# --- images -----------------------------------------------------------------------------------------------


def test_an_image_keeps_every_field() -> None:
    state = a_state()
    copy = from_image(image(state))
    assert copy == state
    assert image(copy) == image(state)


def busy_states() -> dict[str, State]:
    """States of property worlds (and two scenarios, for what is rare) by what is special about them."""
    found: dict[str, State] = {}

    def look(state: State) -> None:
        features: list[str] = [round_.stage for round_ in state.rounds.values()]
        features += ["in hand"] * any(f.in_hand for f in state.fragments)
        features += ["being fetched"] * any(m.fetching for m in state.members.values())
        features += ["refused"] * any(f.refused for f in state.fragments)
        features += ["departed"] * bool(state.departed)
        for feature in features:
            if feature not in found:
                assert from_image(image(state)) == state
                found[feature] = from_image(image(state))

    for seed in range(4):
        world = World(seed, quorum=1 + seed % 3)
        world.after_each = look
        world.run(START + random_plan(seed, 60))
    look(past_its_deadline().state)
    look(below_its_quorum_when_the_window_ends()[0].state)
    return found


def test_an_image_keeps_rounds_in_every_stage_and_offers_in_hand_and_on_their_way() -> None:
    open_stages: list[Stage] = ["collecting", "grace", "overtime", "short", "merging"]
    found = busy_states()
    assert found.keys() == {*open_stages, "in hand", "being fetched", "refused", "departed"}
    for state in found.values():
        assert from_image(image(state)) == state


class Twins:
    """In the place of a core: it, and another that began from an image of it."""

    def __init__(self, core: Core) -> None:
        self._one, self._other = core, Core(from_image(image(core.state)))
        self._out: Batch | None = None
        self.compared = 0

    @property
    def state(self) -> State:
        return self._one.state

    def step(self, event: Event, now: float) -> None:
        self._one.step(event, now)
        self._other.step(event, now)

    def take(self) -> Batch | None:
        batch, self._out = self._one.take(), self._other.take()
        if batch is None or self._out is None:
            assert batch is self._out
            return batch
        assert dataclasses.replace(self._out, number=batch.number) == batch
        self.compared += 1
        return batch

    def stored(self, batch: Batch, number: int, now: float) -> None:
        assert self._out is not None
        self._one.stored(batch, number, now)
        self._other.stored(self._out, number, now)

    def part(self) -> Core:
        """The original, once both have come to the same."""
        assert self._other.state == self._one.state
        assert image(self._other.state) == image(self._one.state)
        return self._one


@pytest.mark.parametrize("seed", range(5))
def test_a_core_that_goes_on_from_an_image_decides_the_same(seed: int) -> None:
    world = World(seed, quorum=1 + seed % 3, in_flight=1 + seed % 2)
    events = compared = 0

    def renew(_: State) -> None:
        """Every so often both are compared, and a new twin begins."""
        nonlocal events, compared
        events += 1
        core = cast("Core | Twins", world.engine.core)  # another leader's after a fail-over
        if isinstance(core, Core):
            world.engine.core = cast(Core, Twins(core))
        elif events % 50 == 0:
            compared += core.compared
            world.engine.core = cast(Core, Twins(core.part()))

    world.after_each = renew
    world.run(START + random_plan(seed, 120))
    assert compared > 100


# --- damage -----------------------------------------------------------------------------------------------


def load(core: bytes, member: bytes) -> State:
    return restore(core, [member], {}, spec=make_spec(), nonce="new", broadcast=0, now=NOW)


def records() -> tuple[bytes, bytes]:
    state = a_state()
    return core_record(state, NOW), member_record(state.members[7], NOW)


def test_a_record_that_was_cut_short_is_damaged() -> None:
    core, member = records()
    load(core, member)
    for length in range(0, len(core), 7):
        with pytest.raises(MalformedMessage):
            load(core[:length], member)
    for length in range(0, len(member), 7):
        with pytest.raises(MalformedMessage):
            load(core, member[:length])


def test_an_image_that_was_cut_short_is_damaged() -> None:
    data = image(a_state())
    for length in range(0, len(data), 13):
        with pytest.raises(MalformedMessage):
            from_image(data[:length])


GARBAGE = [
    5,
    [],
    "text",
    {},
    {"now": 1.0},
    {"now": "then", "state": {}, "member": {}},
    {"now": 1.0, "state": 7, "member": 7, "spec": 7},
    {"now": 1.0, "state": {}, "member": {}, "spec": {}},
    {"now": 1.0, "state": {"rounds": 3, "interval_at": 0.0}, "member": {"seen_at": None}, "spec": {"rounds": 1}},
    {"now": 1.0, "state": {"rounds": {1: {}}, "interval_at": 0.0}, "member": {"seen_at": 1.0}},
]


@pytest.mark.parametrize("value", GARBAGE, ids=str)
def test_what_is_no_record_is_damaged(value: object) -> None:
    core, member = records()
    data = msgpack.packb(value)
    with pytest.raises(MalformedMessage):
        load(data, member)
    with pytest.raises(MalformedMessage):
        load(core, data)
    with pytest.raises(MalformedMessage):
        from_image(data)


def test_a_round_of_a_fragment_that_is_not_there_is_damage() -> None:
    state = a_state()
    state.fragments.pop()
    with pytest.raises(MalformedMessage):
        load(core_record(state, NOW), records()[1])


def test_any_flipped_byte_gives_a_state_or_is_damage() -> None:
    dice, originals = random.Random(7), (*records(), image(a_state()))
    noticed = 0
    for _ in range(1500):
        damaged = [bytearray(data) for data in originals]
        hit = dice.choice(damaged)
        hit[dice.randrange(len(hit))] ^= 1 << dice.randrange(8)
        core, member, whole = map(bytes, damaged)
        try:
            load(core, member)
            from_image(whole)
        except MalformedMessage:
            noticed += 1
    assert noticed > 300
