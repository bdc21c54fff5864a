"""Timelines in the core: who is believed that acknowledged writes were lost, and what numbers go on from."""

from __future__ import annotations

import pytest

from anabranch.checkpoints.reading import rank
from anabranch.orchestrator.core import copies, policies, timelines
from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.state import State
from anabranch.queue import messages as msg
from tests.orchestrator.bench import Bench, make_spec, only, told_one


def begun(bench: Bench) -> int:
    return len(only(do.NewTimeline, bench.log))


def test_whoever_holds_a_newer_version_shows_that_writes_were_lost() -> None:
    bench = Bench()
    bench.worker("a").adopted[0] = 3
    bench.elapse(0.5)
    assert begun(bench) == 1
    assert bench.state.timeline.startswith("1-")


def test_a_liar_is_believed_once_however_often_it_echoes_the_timeline() -> None:
    bench = Bench()
    liar = bench.worker("liar")
    liar.adopted[0] = 3
    for _ in range(20):
        liar.timeline = bench.state.timeline  # as an honest member would after the news
        bench.elapse(0.5)
    assert begun(bench) == 1


def test_another_member_is_still_believed_after_a_liar() -> None:
    bench = Bench()
    liar, honest = bench.worker("liar"), bench.worker("honest")
    liar.adopted[0] = 3
    bench.elapse(0.5)
    liar.timeline = honest.timeline = bench.state.timeline
    honest.adopted[1] = 1
    bench.elapse(0.5)
    assert begun(bench) == 2


def test_what_is_said_of_an_earlier_timeline_shows_nothing() -> None:
    bench = Bench()
    worker = bench.worker("a")
    worker.timeline, worker.adopted[0] = "0-other", 3
    bench.elapse(0.5)
    assert begun(bench) == 0


@pytest.mark.parametrize(("one", "other"), [("9-a", "10-b"), ("10-b", "9-a"), ("99-a", "100-b"), ("", "0-a")])
def test_of_two_timelines_the_later_is_that_of_the_higher_number(one: str, other: str) -> None:
    later = max(one, other, key=lambda name: int(name.partition("-")[0] or -1))
    state, stored = State(make_spec(), "x", timeline=one), State(make_spec(), "y", timeline=other)
    timelines.outlast(state, stored)
    assert state.timeline == later
    place = {name: copies.Place(timelines.number_of(name), 5, 5) for name in (one, other)}
    assert max(place, key=lambda name: place[name]) == later
    manifests = {name: {"timeline": name, "tokens": 5} for name in (one, other)}
    assert max(manifests, key=lambda name: rank("00000001-x", manifests[name])) == later


def test_no_number_comes_back_for_something_else() -> None:
    state, stored = State(make_spec(), "x"), State(make_spec(), "y", next_round=7, next_incarnation=9)
    timelines.outlast(state, stored)
    assert (state.next_round, state.next_incarnation) == (7, 9)
    timelines.outlast(state, State(make_spec(), "z", next_round=2, next_incarnation=2))
    assert (state.next_round, state.next_incarnation) == (7, 9)


# --- liars besides ----------------------------------------------------------------------------------------


def test_more_tokens_than_were_ever_processed_are_nobodys() -> None:
    bench = Bench()
    bench.worker("a")
    bench.steps(a=2)
    result = bench.contribute("a", tokens=10**6, processed=300)
    assert not only(do.Fetch, result)
    assert not only(do.Merge, bench.log)
    assert [order.reason for order in only(do.Consume, result)] == ["refused"]
    assert bench.state.members[1].known[0][0] <= 300


def test_tokens_that_are_said_to_be_pending_are_none_that_were_processed() -> None:
    bench = Bench()
    bench.worker("a")
    bench.steps(a=2)
    said = msg.Figures(processed=300, discarded=0, pending=10**6)
    assert not only(do.Fetch, bench.contribute("a", tokens=10**6, figures=said))


def test_a_long_full_server_makes_nobody_gone() -> None:
    bench = Bench()
    bench.worker("a").silent = True  # its heartbeats are refused, too
    bench.send(ev.MemorySeen(0.9))
    bench.elapse(600.0)
    assert bench.state.members[1].live
    bench.send(ev.MemorySeen(0.5))
    bench.elapse(1.0)
    assert bench.state.members[1].live, "it has as long as ever from now on"
    bench.elapse(5.0)
    assert 1 not in bench.state.members or not bench.state.members[1].live


def test_who_slept_for_eight_hours_is_called_again_within_a_few_reports() -> None:
    """One pause says little about its steps; counted whole it would be too slow for H for dozens of reports."""
    bench = Bench()
    bench.worker("a")
    bench.worker("sleeper")
    for _ in range(4):
        bench.steps(a=1, sleeper=1)
    stepped_at = bench.state.members[2].stepped_at
    assert stepped_at is not None
    bench.state.members[2].stepped_at = stepped_at - 8 * 3600
    for _ in range(3):
        bench.steps(a=1, sleeper=1)
    now, state = bench.now, bench.state
    longest_s = policies.longest_step_s(state, now)
    assert policies.condition(state.members[2], state, now, longest_s) == "live"


def test_who_drains_opens_nothing_more() -> None:
    bench = Bench()
    bench.worker("a")
    bench.send(ev.Draining())
    bench.elapse(1.0)
    assert not [t for t in only(do.Tell, bench.steps(a=8)) if isinstance(t.message, msg.Call)]


def test_with_room_on_the_server_rounds_open_again() -> None:
    bench = Bench()
    bench.worker("a")
    bench.send(ev.MemorySeen(0.9))
    assert not [t for t in only(do.Tell, bench.steps(a=4)) if isinstance(t.message, msg.Call)]
    bench.send(ev.MemorySeen(0.5))
    assert told_one(msg.Call, bench.steps(a=2)).called == [1]
