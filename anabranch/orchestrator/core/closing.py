"""What an open round does next: wait, open its grace window, merge, commit, or give up (stages: `stages.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from anabranch.merge.weights import token_weight
from anabranch.orchestrator.core import outcomes, policies
from anabranch.orchestrator.core.events import Merged
from anabranch.orchestrator.core.grace import average
from anabranch.orchestrator.core.instructions import Commit, Drop, Instruction, Merge, SetTimer, Tell
from anabranch.orchestrator.core.stages import OVER
from anabranch.orchestrator.core.state import Closed, Round, State
from anabranch.queue import messages

Passed = Literal["window", "deadline"] | None


def review(state: State, round_: Round, now: float, passed: Passed = None) -> Iterator[Instruction]:
    """After anything that may let a round go on or end it. `passed`: what of it is running out at this moment."""
    if round_.stage in OVER:
        return
    arrived = len(state.fragments[round_.fragment].in_hand)
    missing = policies.missing(round_, state)
    quorum = policies.quorum_of(round_, state)
    if arrived < quorum:
        if not arrived and not missing and not round_.called - policies.refused_in(round_, state):
            yield from abandon(state, round_, "nobody left who was called")
        elif passed == "deadline" or round_.stage == "overtime":
            yield from abandon(state, round_, f"quorum {arrived}/{quorum}")
        elif passed == "window":
            round_.move("short")
        return
    if round_.quorum_at is None:
        round_.quorum_at = now
        state.averages.quorum_s = average(state.averages.quorum_s, now - round_.opened_at)
    if not missing:
        yield from _close(state, round_, "all arrived", now)
    elif passed == "window" or round_.stage == "short":
        yield from _close(state, round_, "grace expired", now)
    elif round_.stage == "collecting":
        round_.move("grace")
        if passed == "deadline":
            round_.move("overtime")
        yield from _wait_for_more(state, round_, now)
    elif passed == "deadline" and round_.stage == "grace":
        round_.move("overtime")


def review_all(state: State, now: float) -> Iterator[Instruction]:
    """After somebody left or a setting changed."""
    for round_ in list(state.rounds.values()):
        yield from review(state, round_, now)


def _wait_for_more(state: State, round_: Round, now: float) -> Iterator[Instruction]:
    """The grace window, from the quorum on."""
    assert round_.quorum_at is not None
    round_.grace_s = state.averages.grace_s(state.pacing)
    left = round_.grace_s - (now - round_.quorum_at)
    if left > 0:
        yield SetTimer("grace", "grace", left, round_.number)
    else:
        yield from review(state, round_, now, "window")


def change_grace(state: State, now: float) -> Iterator[Instruction]:
    """A new grace setting acts at once, on windows that are open, too."""
    for round_ in list(state.rounds.values()):
        if round_.stage in ("grace", "overtime"):
            yield from _wait_for_more(state, round_, now)


def grace_over(state: State, number: int, now: float) -> Iterator[Instruction]:
    round_ = state.rounds.get(number)
    if round_ is not None and round_.stage in ("grace", "overtime"):
        yield from review(state, round_, now, "window")


def deadline_over(state: State, number: int, now: float) -> Iterator[Instruction]:
    if (round_ := state.rounds.get(number)) is not None:
        yield from review(state, round_, now, "deadline")


def _close(state: State, round_: Round, how: Closed, now: float) -> Iterator[Instruction]:
    fragment = state.fragments[round_.fragment]
    missing = policies.missing(round_, state)
    offers = sorted(
        fragment.in_hand.values(), key=lambda o: (o.sender, o.message.incarnation)
    )  # a fixed order: the result must not depend on who came first
    round_.move("merging")
    round_.parts = tuple((offer, token_weight(offer.message.tokens, offer.message.steps)) for offer in offers)
    round_.closed, round_.closed_at = how, now
    waited = now - round_.opened_at
    round_.reason = f"{how} after {waited:.2f} s: {len(offers)} of {len(offers) + len(missing)}"
    if missing:
        round_.reason += ", without " + ", ".join(m.name for m in missing[:8])
    yield Merge(round_.reason, round_.number, fragment.index, round_.base, round_.parts)


def abandon(state: State, round_: Round, reason: str) -> Iterator[Instruction]:
    """Give a round up; contributions on the standing base stay in hand."""
    round_.move("abandoned")
    del state.rounds[round_.number]
    state.count("abandoned")
    told = messages.Abandoned(
        round=round_.number, fragment=round_.fragment, base=round_.base, reason=outcomes.brief(reason)
    )
    yield Tell(reason, told, "abandoned")


def merged(state: State, event: Merged, now: float) -> Iterator[Instruction]:
    """The new version is uploaded: book everything on the superseded base and commit."""
    round_ = state.rounds.get(event.round)
    if round_ is None or round_.closed is None:
        return
    if event.claim is None:
        yield from _cannot_merge(state, round_, event.reason)
        return
    fragment = state.fragments[round_.fragment]
    verdicts: list[messages.Verdict] = []
    yield from outcomes.book_all(state, fragment, round_, verdicts)
    fragment.version += 1
    fragment.digest = event.claim.digest
    round_.move("merged")
    del state.rounds[round_.number]
    state.count(round_.closed)
    state.committing.append(round_.closed_at)
    yield Commit(round_.reason, round_.number, fragment.index, fragment.version)
    told = messages.Merged(
        round=round_.number,
        fragment=fragment.index,
        timeline=state.timeline,
        version=fragment.version,
        claim=event.claim,
        closed=round_.closed,
        verdicts=verdicts,
        tokens=min(state.tokens, messages.MOST_TOKENS),
        reason=outcomes.brief(round_.reason),
    )
    weights = [
        [offer.message.incarnation, offer.message.tokens, offer.message.steps, weight]
        for offer, weight in round_.parts
    ]
    yield Tell(round_.reason, told, "merged", {"weights": weights})


def _cannot_merge(state: State, round_: Round, reason: str) -> Iterator[Instruction]:
    """No version came out. Its parts are refused, or the same would happen for ever."""
    fragment = state.fragments[round_.fragment]
    for offer, _ in round_.parts:
        incarnation = offer.message.incarnation
        if (held := fragment.in_hand.get(incarnation)) is not None and held.is_same(offer):
            del fragment.in_hand[incarnation]
            yield Drop(reason, offer.sender, offer.entry)
            yield from outcomes.refuse(state, state.members[incarnation], fragment, offer, reason)
    yield from abandon(state, round_, reason)
