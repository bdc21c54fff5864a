"""Version 0: who is asked for it, and when it becomes the run's."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.orchestrator.core import membership
from anabranch.orchestrator.core.events import Heard, InitFailed, InitReady
from anabranch.orchestrator.core.instructions import Birth, Consume, FetchInit, Instruction, Note, Tell
from anabranch.orchestrator.core.state import Fragment, State
from anabranch.queue.messages import Born, Init


def offered(state: State, event: Heard, said: Init) -> Iterator[Instruction]:
    """A worker sent version 0."""
    asked = state.speaker(said.incarnation, event.sender)
    if state.born or asked is None or said.incarnation != state.asked_init:
        yield Consume("nobody asked for it", event.sender, (event.entry,))
        yield Note(f"initial weights of {event.sender} refused: nobody asked for them", "refused")
    elif state.init_reading:
        yield Consume("a repeat", event.sender, (event.entry,))
    else:
        state.init_reading = True
        yield FetchInit("verify version 0", said.incarnation, event.entry, said)


def failed(state: State, event: InitFailed) -> Iterator[Instruction]:
    yield from _read(state, event.incarnation, event.entry)
    if state.born or state.orphaned:
        return
    giver = state.members.get(event.incarnation)
    name = giver.name if giver is not None else ""
    if event.incarnation == state.asked_init:
        state.asked_init = 0
    yield Note(f"initial weights of {name} refused: {event.reason}", "refused", {"name": name})
    if giver is not None:
        yield from membership.expel(state, giver, f"its initial weights cannot be used: {event.reason}")
    yield from membership.ask_for_init(state)


def ready(state: State, event: InitReady) -> Iterator[Instruction]:
    yield from _read(state, event.incarnation, event.entry)
    if state.born or state.orphaned:
        return
    state.layout_hash, state.timeline = event.layout_hash, f"0-{state.nonce}"
    state.fragments = [
        Fragment(index, size, digest)
        for index, (size, digest) in enumerate(zip(event.sizes, event.digests, strict=True))
    ]
    reason = f"version 0 of {len(state.fragments)} fragments, {sum(event.sizes):,} parameters"
    if (wished := state.spec.rounds.fragments) > len(state.fragments):
        reason += f" (rounds.fragments = {wished}, but the model has only {len(state.fragments)} tensors)"
    yield Birth(reason, state.timeline)
    yield from membership.born(state)  # first: who cannot stay must not fetch what it cannot read
    yield Tell(reason, Born(timeline=state.timeline))


def _read(state: State, incarnation: int, entry: bytes | None) -> Iterator[Instruction]:
    state.init_reading = False
    giver = state.members.get(incarnation)
    if entry is not None and giver is not None:
        yield Consume("version 0 read", giver.name, (entry,))
