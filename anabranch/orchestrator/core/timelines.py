"""Timelines: what happens to a run whose server came back with less than it had acknowledged.

A version is (timeline, v). When state had to be restored from something older, the same v may come to stand for
other bits, so the run goes on under a new timeline: a number and a nonce, compared for equality only. Members whose
version and digest match what is restored keep their base and their work; the others join again and overwrite.
"""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

from anabranch.orchestrator.core.closing import abandon
from anabranch.orchestrator.core.instructions import Instruction, NewTimeline, Tell
from anabranch.orchestrator.core.state import Member, State
from anabranch.queue.messages import Born, Progress

#: Numbers given out on the lost stretch must not come back for something else: counters jump over it. What was lost
#: may have been a jump itself, so those of incarnations go each leader's own way.
JUMP = 1_000_000


def begin(state: State, reason: str) -> Iterator[Instruction]:
    """Go on under a new timeline."""
    number = number_of(state.timeline) + 1
    for round_ in list(state.rounds.values()):
        yield from abandon(state, round_, "a new timeline began")
    state.timeline = f"{number}-{state.nonce}"
    state.next_round += JUMP
    state.next_incarnation += JUMP + crc32(state.nonce.encode()) % JUMP
    if state.data is not None:
        state.data.next_lease += JUMP + crc32(state.nonce.encode()) % JUMP
    for member in state.members.values():  # until they say what they hold now
        member.adopted = [-1] * len(state.fragments)
        member.held = [0] * len(state.fragments)
    yield NewTimeline(reason, state.timeline, JUMP)
    yield Tell(reason, Born(timeline=state.timeline))  # members read `state` again; the jump says so, too


def number_of(timeline: str) -> int:
    """The counting part of a timeline's name; -1 before birth."""
    return int(timeline.partition("-")[0] or "-1")


def outlast(state: State, other: State) -> None:
    """Before a copy takes the place of what is stored: no number that was given out there may come back."""
    state.timeline = max(state.timeline, other.timeline, key=number_of)
    state.next_round = max(state.next_round, other.next_round)
    state.next_incarnation = max(state.next_incarnation, other.next_incarnation)
    if state.data is not None and other.data is not None:
        state.data.next_lease = max(state.data.next_lease, other.data.next_lease)


def claim_of_newer(state: State, member: Member, said: Progress) -> str | None:
    """Why a member's report shows that acknowledged writes were lost; None if it does not.

    Each incarnation is believed once, so that a member that lies cannot keep the run from merging.
    """
    if member.claimed_newer or said.timeline != state.timeline:
        return None
    for fragment, version in zip(state.fragments, said.adopted, strict=True):
        if version > fragment.version:
            member.claimed_newer = True
            return (
                f"{member.name} holds version {version} of fragment {fragment.index}, the server only "
                f"{fragment.version}: it lost acknowledged writes"
            )
    return None
