"""A joiner's inner optimizer state from a peer (`--warm-start`). Nothing of this is stored.

The joiner asks, a peer is asked, its answer goes to the joiner: one answer to one request. Whatever is lost on the
way, with a synchronizer for example, is asked for again by the joiner, who also says who could not help.
"""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.orchestrator.core import outcomes, policies
from anabranch.orchestrator.core.events import Heard
from anabranch.orchestrator.core.instructions import Consume, Instruction, Note, Tell
from anabranch.orchestrator.core.state import Member, State
from anabranch.queue.messages import PeerState, SendState, StateOffer, StateRequest

WARM_STEPS = 20  # a peer's optimizer has averages worth having after this many


def asked(state: State, event: Heard, said: StateRequest, now: float) -> Iterator[Instruction]:
    """Ask the peer that has made the most steps, if there is one."""
    yield Consume("request for a peer's state read", event.sender, (event.entry,))
    joiner = yield from outcomes.speaker(state, said.incarnation, event.sender)
    if joiner is None or not joiner.is_worker or not joiner.live:
        return
    peers = [m for m in state.members.values() if m is not joiner and m.incarnation not in said.not_from]
    longest_s = policies.longest_step_s(state, now)
    peers = [m for m in peers if _can_give(m, policies.condition(m, state, now, longest_s))]
    if state.full or not peers:
        reason = "the server is full" if state.full else "no other worker has a warm optimizer"
        yield Tell(reason, PeerState(to=joiner.incarnation, incarnation=0, reason=reason), "state given")
        return
    peer = max(peers, key=lambda m: (m.steps, -m.incarnation))
    joiner.state_from = peer.incarnation
    request = SendState(incarnation=peer.incarnation, to=joiner.incarnation)
    yield Tell(f"{joiner.name} starts with the optimizer state of {peer.name}", request, "state asked")


def _can_give(member: Member, condition: str) -> bool:
    healthy = condition in ("live", "joining", "step too long for H")
    return healthy and member.is_worker and member.steps >= WARM_STEPS


def given(state: State, event: Heard, said: StateOffer) -> Iterator[Instruction]:
    """Pass a peer's answer on, if it was asked and the joiner is still there."""
    yield Consume("a peer's state read", event.sender, (event.entry,))
    peer = yield from outcomes.speaker(state, said.incarnation, event.sender)
    joiner = state.members.get(said.to)
    if peer is None or joiner is None or not joiner.live or joiner.state_from != peer.incarnation:
        return
    joiner.state_from = 0
    if said.claim is not None and said.claim.owner != peer.name:
        state.count("messages refused")
        reason = f"optimizer state of {peer.name} refused: the payload is {said.claim.owner}'s"
        yield Note(reason, "refused", {"name": peer.name})
        return
    reason, short = f"optimizer state of {peer.name} for {joiner.name}", ""
    if said.claim is None:
        reason = f"{peer.name} has no optimizer state for {joiner.name}: {said.reason}"
        short = outcomes.brief(reason)
    message = PeerState(to=joiner.incarnation, incarnation=peer.incarnation, claim=said.claim, reason=short)
    yield Tell(reason, message, "state given")
