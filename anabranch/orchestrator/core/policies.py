"""Who may pace, who may be called, and why not: pure functions of the state, which they never change.

A rule of the kind "do not call this worker now" is a line in `condition`: pacing, calling, the page and the command
line all ask it.
"""

from __future__ import annotations

import math

from anabranch.orchestrator.core.state import Fragment, Member, Round, State

EXPIRY_HEARTBEATS = 2.5  # a sweep every half heartbeat then finds it within 3
STUCK_MINIMUM_HEARTBEATS = 3.0  # progress is coalesced, so less silence says nothing about steps

CALLABLE = frozenset({"live", "out of data"})  # the latter is at a boundary all the time


def condition(member: Member, state: State, now: float, longest_s: float) -> str:
    """How a member is, in the words people read. `longest_s` is `longest_step_s`."""
    if not member.live:
        return "left" if member.left else "gone"
    if not member.is_worker:
        return "live"
    if member.idle:
        return "out of data"
    if member.stepped_at is None:
        return "joining"  # or it has not reported since this leader began
    if now - member.stepped_at > stuck_after_s(member, state):
        return "stuck"
    return "live" if member.step_s <= longest_s else "step too long for H"


def is_expired(member: Member, state: State, now: float) -> bool:
    return now - member.seen_at > EXPIRY_HEARTBEATS * state.spec.workers.heartbeat_s


def advances(member: Member, state: State, now: float) -> bool:
    """A live worker whose step counter moves: it may pace."""
    if not member.live or not member.is_worker or member.stepped_at is None or member.idle:
        return False
    return now - member.stepped_at <= stuck_after_s(member, state)


def stuck_after_s(member: Member, state: State) -> float:
    settings = state.spec.workers
    return max(settings.stuck_after_steps * member.step_s, STUCK_MINIMUM_HEARTBEATS * settings.heartbeat_s)


def longest_step_s(state: State, now: float) -> float:
    """H paced steps, in seconds: a worker whose step outlasts them never holds work on a current base, unless it
    carries work over to the next.

    Never below H steps of the fastest worker: an average that lags must not rule out the one who paces.
    """
    if state.spec.workers.adoption != "overwrite":
        return math.inf
    steps = [m.step_s for m in state.members.values() if m.step_s > 0 and advances(m, state, now)]
    pace_s = max(state.averages.step_s or 0.0, min(steps, default=0.0))
    return state.spec.rounds.inner_steps * pace_s


def callable_for(fragment: Fragment, state: State, now: float) -> list[Member]:
    """Workers whose condition allows it, that have adopted the base and hold tokens."""
    longest_s = longest_step_s(state, now)
    return [
        m for m in state.members.values() if holds(m, fragment) and condition(m, state, now, longest_s) in CALLABLE
    ]


def able_for(fragment: Fragment, state: State, now: float) -> set[int]:
    """Incarnations that have answered for its version, or can."""
    return fragment.in_hand.keys() | {m.incarnation for m in callable_for(fragment, state, now)}


def holds(member: Member, fragment: Fragment) -> bool:
    """Whether it could send something for a round on this fragment's version."""
    index = fragment.index
    return member.is_worker and member.adopted[index] == fragment.version and member.held[index] > 0


def wanted(state: State, now: float) -> int:
    """How many have to be able to answer for a round to open: K, or everybody who advances. Whoever then still
    cannot when a round would have run into its deadline is not waited for any more."""
    rounds = state.spec.rounds
    if rounds.quorum != "all":
        return rounds.quorum
    if state.due_at is not None and now - state.due_at >= state.averages.deadline_s(state.pacing):
        return 1
    longest_s = longest_step_s(state, now)
    return sum(m.is_worker and condition(m, state, now, longest_s) == "live" for m in state.members.values())


def quorum_of(round_: Round, state: State) -> int:
    """K in force for a round: the current setting, or what is in hand and everyone who is still waited for."""
    quorum = state.spec.rounds.quorum
    if quorum != "all":
        return quorum
    return max(1, len(state.fragments[round_.fragment].in_hand) + len(missing(round_, state)))


def refused_in(round_: Round, state: State) -> set[int]:
    """Who answered this round with something that cannot be used."""
    refused = state.fragments[round_.fragment].refused
    return {incarnation for incarnation, refusal in refused.items() if refusal.round == round_.number}


def missing(round_: Round, state: State) -> list[Member]:
    """Called, still here, and not heard of: what a grace window waits for."""
    heard = state.fragments[round_.fragment].in_hand.keys() | refused_in(round_, state)
    return [state.members[i] for i in sorted(round_.called - heard) if i in state.members and state.members[i].live]
