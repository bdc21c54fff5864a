"""A joiner's optimizer state from a peer, in the decision core: who is asked, and whose word is passed on."""

from __future__ import annotations

import pytest

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.peers import WARM_STEPS
from anabranch.queue import messages as msg
from tests.orchestrator.bench import Bench, claim, notes, one, told, told_one


def ask(bench: Bench, name: str, *not_from: int, incarnation: int | None = None) -> list[do.Instruction]:
    number = bench.puppets[name].incarnation if incarnation is None else incarnation
    return bench.say(name, msg.StateRequest(incarnation=number, not_from=list(not_from)))


def give(bench: Bench, name: str, to: str, owner: str = "", reason: str = "") -> list[do.Instruction]:
    giver, joiner = bench.puppets[name].incarnation, bench.puppets[to].incarnation
    payload = claim(owner or name) if not reason else None
    return bench.say(name, msg.StateOffer(incarnation=giver, to=joiner, claim=payload, reason=reason))


def train(bench: Bench, seconds: float, **steps: int) -> None:
    """Time passes; per half second the workers named make so many steps."""
    for _ in range(round(2 * seconds)):
        bench.elapse(0.5)
        for name, count in steps.items():
            bench.puppets[name].train(count)
            bench.send(bench.puppets[name].heartbeat())


@pytest.fixture
def bench() -> Bench:
    bench = Bench()
    for name in ("a", "b", "joiner"):
        bench.worker(name)
    train(bench, seconds=5.0, a=2, b=4)
    assert bench.state.members[bench.puppets["a"].incarnation].steps >= WARM_STEPS
    return bench


def test_the_peer_with_most_steps_is_asked(bench: Bench) -> None:
    said = ask(bench, "joiner")
    order = told_one(msg.SendState, said)
    assert order.incarnation == bench.puppets["b"].incarnation
    assert order.to == bench.puppets["joiner"].incarnation
    assert one(do.Consume, said).sender == "joiner"


def test_who_could_not_help_is_not_asked_again(bench: Bench) -> None:
    a, b = bench.puppets["a"].incarnation, bench.puppets["b"].incarnation
    assert told_one(msg.SendState, ask(bench, "joiner", b)).incarnation == a
    answer = told_one(msg.PeerState, ask(bench, "joiner", a, b))
    assert (answer.incarnation, answer.claim) == (0, None)
    assert "no other worker" in answer.reason


def test_neither_the_dead_nor_the_cold_are_asked(bench: Bench) -> None:
    bench.worker("fresh")
    bench.puppets["b"].silent = True
    train(bench, seconds=5.0, a=2, fresh=1)
    warm = bench.puppets["a"].incarnation
    assert told_one(msg.SendState, ask(bench, "joiner")).incarnation == warm
    assert told_one(msg.PeerState, ask(bench, "joiner", warm)).incarnation == 0, "the others are dead or cold"


def test_a_stuck_worker_is_not_asked(bench: Bench) -> None:
    bench.elapse(60.0)  # hearts beat, nobody makes a step
    assert told_one(msg.PeerState, ask(bench, "joiner")).incarnation == 0


def test_a_full_server_gets_no_more_payloads(bench: Bench) -> None:
    bench.send(ev.MemorySeen(0.9))
    assert "full" in told_one(msg.PeerState, ask(bench, "joiner")).reason


def test_an_answer_is_passed_on_once(bench: Bench) -> None:
    ask(bench, "joiner")
    said = told_one(msg.PeerState, give(bench, "b", "joiner"))
    assert said.claim == claim("b")
    assert (said.incarnation, said.to) == (bench.puppets["b"].incarnation, bench.puppets["joiner"].incarnation)
    assert not told(msg.PeerState, give(bench, "b", "joiner")), "nobody asked for it again"


def test_who_was_not_asked_is_not_passed_on(bench: Bench) -> None:
    assert not told(msg.PeerState, give(bench, "b", "joiner"))
    ask(bench, "joiner")
    assert not told(msg.PeerState, give(bench, "a", "joiner"))


def test_a_refusal_is_passed_on_with_its_reason(bench: Bench) -> None:
    ask(bench, "joiner")
    said = told_one(msg.PeerState, give(bench, "b", "joiner", reason="SGD keeps no state"))
    assert said.claim is None
    assert "SGD keeps no state" in said.reason


def test_the_payload_of_somebody_else_is_not_passed_on(bench: Bench) -> None:
    ask(bench, "joiner")
    said = give(bench, "b", "joiner", owner="a")
    assert not told(msg.PeerState, said)
    assert notes("refused", said)


def test_an_answer_for_somebody_who_is_gone_goes_nowhere(bench: Bench) -> None:
    ask(bench, "joiner")
    bench.puppets["joiner"].silent = True
    bench.elapse(5.0)
    assert not told(msg.PeerState, give(bench, "b", "joiner"))


def test_who_speaks_for_another_is_not_served(bench: Bench) -> None:
    said = ask(bench, "joiner", incarnation=bench.puppets["b"].incarnation)
    assert not told(msg.SendState, said)
    assert notes("refused", said)
