"""A joiner's inner optimizer state from a peer (`--warm-start`). Pure, and nothing is stored.

The joiner asks, a peer is asked, its answer goes to the joiner: one answer to one request. Whatever is lost on the
way, with a synchronizer for example, is asked for again by the joiner, who also says who could not help.
"""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.orchestrator import membership, policies
from anabranch.orchestrator.events import AskState, Consume, GiveState, Instruction, Note, StateAsked, StateGiven
from anabranch.orchestrator.state import Member, State

WARM_STEPS = 20  # a peer's optimizer has averages worth having after this many


def asked(state: State, event: StateAsked, now: float) -> Iterator[Instruction]:
    """Ask the peer that has made the most steps, if there is one."""
    yield Consume("request for a peer's state read", event.sender, (event.entry,))
    joiner = membership.find(state, event.incarnation, event.sender)
    if joiner is None:
        yield from membership.speaks_for_none(state, event.incarnation, event.sender)
        return
    if joiner.role != "worker" or not joiner.live:
        return
    peers = [m for m in state.members.values() if m is not joiner and m.incarnation not in event.not_from]
    peers = [m for m in peers if _can_give(m, state, now)]
    if state.full or not peers:
        reason = "the server is full" if state.full else "no other worker has a warm optimizer"
        yield GiveState(reason, 0, joiner.incarnation)
        return
    peer = max(peers, key=lambda m: (m.steps, -m.incarnation))
    joiner.state_from = peer.incarnation
    yield AskState(
        f"{joiner.name} starts with the optimizer state of {peer.name}", peer.incarnation, joiner.incarnation
    )


def _can_give(member: Member, state: State, now: float) -> bool:
    healthy = member.live and not member.idle and not policies.is_stuck(member, state, now)
    return healthy and member.role == "worker" and member.steps >= WARM_STEPS


def given(state: State, event: StateGiven) -> Iterator[Instruction]:
    """Pass a peer's answer on, if it was asked and the joiner is still there."""
    yield Consume("a peer's state read", event.sender, (event.entry,))
    peer = membership.find(state, event.incarnation, event.sender)
    if peer is None:
        yield from membership.speaks_for_none(state, event.incarnation, event.sender)
        return
    joiner = state.members.get(event.to)
    if joiner is None or not joiner.live or joiner.state_from != peer.incarnation:
        return
    joiner.state_from = 0
    if event.claim is not None and event.claim.owner != peer.name:
        state.count("messages refused")
        reason = f"optimizer state of {peer.name} refused: the payload is {event.claim.owner}'s"
        yield Note(reason, "refused", {"name": peer.name})
        return
    reason = f"optimizer state of {peer.name} for {joiner.name}"
    if event.claim is None:
        reason = f"{peer.name} has no optimizer state for {joiner.name}: {event.reason}"
    yield GiveState(reason, peer.incarnation, joiner.incarnation, event.claim)
