"""Who paces, who is called, what is due: pure functions of the state (DESIGN section 4)."""

from __future__ import annotations

from dataclasses import dataclass

from anabranch.orchestrator.state import Fragment, Member, Round, State

EXPIRY_HEARTBEATS = 2.5  # a sweep every half heartbeat then finds it within 3
STUCK_MINIMUM_HEARTBEATS = 3.0  # progress is coalesced, so less silence says nothing about steps


def is_expired(member: Member, state: State, now: float) -> bool:
    return now - member.seen_at > EXPIRY_HEARTBEATS * state.spec.workers.heartbeat_s


def advances(member: Member, state: State, now: float) -> bool:
    """A live worker whose step counter moves: it may pace and be called."""
    if not member.live or member.role != "worker" or member.idle or member.stepped_at is None:
        return False
    return now - member.stepped_at <= stuck_after_s(member, state)


def stuck_after_s(member: Member, state: State) -> float:
    settings = state.spec.workers
    return max(settings.stuck_after_steps * member.step_s, STUCK_MINIMUM_HEARTBEATS * settings.heartbeat_s)


def is_stuck(member: Member, state: State, now: float) -> bool:
    """Its heart beats but it makes no step."""
    return (
        member.live
        and member.role == "worker"
        and not member.idle
        and member.stepped_at is not None
        and now - member.stepped_at > stuck_after_s(member, state)
    )


def longest_step_s(state: State, now: float) -> float:
    """H paced steps, in seconds: a worker whose step outlasts them never holds a current base (s = 0).

    Never below H steps of the fastest worker: an average that lags must not rule out the one who paces.
    """
    steps = [m.step_s for m in state.members.values() if m.step_s > 0 and advances(m, state, now)]
    pace_s = max(state.averages.step_s or 0.0, min(steps, default=0.0))
    return state.spec.rounds.inner_steps * pace_s


@dataclass(frozen=True)
class Pacing:
    """Whether a round is due. `worker` is the pacing one: the K′-th largest number of steps since opening."""

    due: bool
    steps: float
    interval: float
    worker: Member | None


def pacing(state: State, now: float) -> Pacing:
    """A round is due when the K′-th largest number of steps made since the last opening reaches H/P."""
    interval = state.spec.rounds.interval_steps
    ranked = sorted(
        (m for m in state.members.values() if advances(m, state, now)),
        key=lambda m: (-(m.steps - m.mark), m.incarnation),
    )
    if not ranked:
        return Pacing(False, 0.0, interval, None)
    quorum = state.spec.rounds.quorum
    rank = len(ranked) if quorum == "all" else min(quorum, len(ranked))
    pacer = ranked[rank - 1]
    steps = pacer.steps - pacer.mark
    return Pacing(steps >= interval, steps, interval, pacer)


def restart_interval(state: State, pacer: Member, now: float) -> None:
    """Begin a new interval for everybody. The pacing worker's overshoot, if it is less than one interval, is
    carried over, so that coarse progress reports do not lower the rate; more is dropped: missed openings
    coalesce."""
    overshoot = pacer.steps - pacer.mark - state.spec.rounds.interval_steps
    state.interval_at = now
    for member in state.members.values():
        member.mark = float(member.steps)
    if 0 < overshoot < state.spec.rounds.interval_steps:
        pacer.mark -= overshoot


def callable_for(fragment: Fragment, state: State, now: float) -> list[Member]:
    """Live workers that advance, have adopted the base and hold tokens; not those whose step is too long for H.

    And those that have run out of data: they are at a boundary all the time.
    """
    longest_s = longest_step_s(state, now)
    return [
        m
        for m in state.members.values()
        if ((m.live and m.idle) or (advances(m, state, now) and m.step_s <= longest_s))
        and m.role == "worker"
        and len(m.adopted) > fragment.index
        and m.adopted[fragment.index] == fragment.version
        and m.held[fragment.index] > 0
    ]


def next_fragment(state: State, now: float) -> tuple[Fragment, list[Member]] | None:
    """The next fragment of the cycle that is not in flight and has somebody to call."""
    in_flight = {r.fragment for r in state.rounds.values()}
    count = len(state.fragments)
    for offset in range(count):
        fragment = state.fragments[(state.next_fragment + offset) % count]
        if fragment.index not in in_flight and (called := callable_for(fragment, state, now)):
            return fragment, called
    return None


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
