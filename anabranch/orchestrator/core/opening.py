"""Is a round due, of which fragment, and who is called (DESIGN section 4)?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anabranch.orchestrator.core import closing, policies
from anabranch.orchestrator.core.grace import average
from anabranch.orchestrator.core.instructions import Instruction, SetTimer, Tell
from anabranch.orchestrator.core.stages import OVER
from anabranch.orchestrator.core.state import ROUNDS_KEPT, Fragment, Member, Round, State, keep
from anabranch.queue import messages


def open_due(state: State, now: float) -> Iterator[Instruction]:
    """Open what is due, at most τ rounds in flight and always on different fragments.

    What is due stays due until it opens: not before enough workers can answer it, then at once.
    """
    if not state.born or state.paused or state.stopped or state.full or state.draining:
        return
    while len(state.rounds) < state.spec.rounds.in_flight:
        pacer = _pacer(state, now)
        if pacer is None:
            if not any(policies.advances(m, state, now) for m in state.members.values()):
                yield from _open_for_what_is_left(state, now)
            return
        if state.due_at is None:
            state.due_at = now
        choice = _next_fragment(state, now)
        if choice is None:
            return
        if pacer.step_s > 0:
            state.averages.step_s = average(state.averages.step_s, pacer.step_s)
        made, interval = pacer.steps - pacer.mark, state.pacing.interval_steps
        _restart_interval(state, pacer, now)
        yield from _open(state, *choice, f"{pacer.name} made {made:.0f} steps (H/P = {interval:g})", now)


def makes_due(state: State, said: messages.Message) -> bool:
    """Whether a message that was heard can make a round due: looking at everybody at each of thousands of heartbeats
    would cost too much. A contribution counts once it is verified."""
    if isinstance(said, messages.Progress):
        member = state.members.get(said.incarnation)
        if member is None or state.due_at is not None:  # then it asks itself, if it has come to be able to answer
            return False
        return member.steps - member.mark >= state.pacing.interval_steps
    return not isinstance(said, messages.Contribution)


def _pacer(state: State, now: float) -> Member | None:
    """The worker that made the K′-th largest number of steps since the last opening, once that is H/P: then a round
    is due. While one is due already, the worker that made the most.

    K′ = min(K, workers that advance). Nobody is sorted while none is due: this is asked after most events.
    """
    interval, quorum = state.pacing.interval_steps, state.spec.rounds.quorum
    members = state.members.values()
    if state.due_at is not None:
        advancing = (m for m in members if policies.advances(m, state, now))
        return max(advancing, key=lambda m: (m.steps - m.mark, -m.incarnation), default=None)
    ahead = [m for m in members if m.steps - m.mark >= interval and policies.advances(m, state, now)]
    rank = len(ahead) if quorum == "all" else min(quorum, len(ahead))
    everybody = quorum == "all" or len(ahead) < quorum
    if not ahead or (
        everybody and any(m.steps - m.mark < interval and policies.advances(m, state, now) for m in members)
    ):
        return None
    return sorted(ahead, key=lambda m: (m.mark - m.steps, m.incarnation))[rank - 1]


def _restart_interval(state: State, pacer: Member, now: float) -> None:
    """Begin a new interval for everybody. The pacing worker's overshoot, if it is less than one interval, is
    carried over, so that coarse progress reports do not lower the rate; more is dropped: missed openings
    coalesce."""
    overshoot = pacer.steps - pacer.mark - state.pacing.interval_steps
    state.interval_at, state.due_at = now, None
    for member in state.members.values():
        member.mark = float(member.steps)
    if 0 < overshoot < state.pacing.interval_steps:
        pacer.mark -= overshoot


def _next_fragment(state: State, now: float) -> tuple[Fragment, list[Member]] | None:
    """The next fragment of the cycle that is not in flight and that enough workers can answer for."""
    in_flight = {r.fragment for r in state.rounds.values()}
    count, wanted = len(state.fragments), policies.wanted(state, now)
    for offset in range(count):
        fragment = state.fragments[(state.next_fragment + offset) % count]
        if fragment.index in in_flight:
            continue
        called = policies.callable_for(fragment, state, now)
        if called and len(fragment.in_hand.keys() | {m.incarnation for m in called}) >= wanted:
            return fragment, called
    return None


def became_able(state: State, member: Member, now: float) -> Iterator[Instruction]:
    """A member may have come to hold what a round asks for: one that is open calls it, too, one that is due may open.

    Called for a member that reported another version, or its first tokens on one.
    """
    yield from call_able(state, [member], now)
    if state.due_at is not None:
        yield from open_due(state, now)


def call_able(state: State, members: Iterable[Member], now: float) -> Iterator[Instruction]:
    """Whoever of these can answer a round that is open, and is not called yet, is called."""
    for round_ in list(state.rounds.values()):
        if round_.stage not in OVER:
            yield from _call_also(state, round_, members, now)


def _call_also(state: State, round_: Round, members: Iterable[Member], now: float) -> Iterator[Instruction]:
    fragment = state.fragments[round_.fragment]
    answered = fragment.in_hand.keys() | policies.refused_in(round_, state)
    new = [m for m in members if m.incarnation not in round_.called | round_.declined | answered]
    if new := [m for m in new if policies.holds(m, fragment)]:
        able = {m.incarnation for m in policies.callable_for(fragment, state, now)}
        new = [m for m in new if m.incarnation in able]
    if new:
        round_.called |= {m.incarnation for m in new}
        reason = "can answer now: " + ", ".join(m.name for m in new[:8])
        yield Tell(reason, call_of(round_, state, new), "called")


def _open_for_what_is_left(state: State, now: float) -> Iterator[Instruction]:
    """Nobody advances any more: farewell contributions, and what those without data hold, are merged at once."""
    longest_s = policies.longest_step_s(state, now)
    for member in state.members.values():
        if member.is_worker and policies.condition(member, state, now, longest_s) == "joining":
            return  # it has not reported since this leader began, or has yet to adopt
    needed = 1 if state.spec.rounds.quorum == "all" else state.spec.rounds.quorum
    verifying = {fragment for _, fragment in state.verifying}
    for fragment in state.fragments:
        if len(state.rounds) >= state.spec.rounds.in_flight:
            return
        if fragment.index in verifying:
            continue  # others' last contributions are about to be in hand
        heard = fragment.in_hand.keys() | fragment.refused.keys()
        called = [m for m in policies.callable_for(fragment, state, now) if m.incarnation not in heard]
        if len(fragment.in_hand) + len(called) >= needed and state.round_of(fragment.index) is None:
            what = "what is left" if called else "what is in hand"
            yield from _open(state, fragment, called, f"no worker advances: {what} is merged", now)


def _open(state: State, fragment: Fragment, called: list[Member], reason: str, now: float) -> Iterator[Instruction]:
    round_ = Round(
        number=state.next_round,
        fragment=fragment.index,
        base=fragment.version,
        opened_at=now,
        deadline_s=state.averages.deadline_s(state.pacing),
        called={m.incarnation for m in called},
        reason=reason,
    )
    state.next_round += 1
    state.next_fragment = (fragment.index + 1) % len(state.fragments)
    state.rounds[round_.number] = round_
    keep(fragment.recent, (round_.number, round_.base), ROUNDS_KEPT)
    yield Tell(reason, call_of(round_, state), "opened")
    yield SetTimer("round deadline", "round deadline", round_.deadline_s, round_.number)
    yield from closing.review(state, round_, now)  # contributions of an abandoned round may be in hand


def call_of(round_: Round, state: State, only: list[Member] | None = None) -> messages.Call:
    """What its members are, or were, told of an open round. `only`: those that are called later than the others."""
    return messages.Call(
        round=round_.number,
        fragment=round_.fragment,
        timeline=state.timeline,
        base=round_.base,
        called=sorted(round_.called if only is None else {m.incarnation for m in only}),
    )
