"""What members read of the run: messages made of the state, in the words of `queue/messages.py`."""

from __future__ import annotations

from anabranch.orchestrator.core import opening, ranges
from anabranch.orchestrator.core.state import Member, State
from anabranch.queue.messages import MOST_TOKENS, Head, Own, Verdict


def head(state: State) -> Head:
    """Where the run stands."""
    return Head(
        timeline=state.timeline,
        tokens=min(state.tokens, MOST_TOKENS),
        paused=state.paused,
        stopped=state.stopped,
        asked_init=state.asked_init,
        calls=[opening.call_of(round_, state) for _, round_ in sorted(state.rounds.items())],
    )


def own(member: Member, state: State) -> Own:
    """What became of one incarnation's contributions, and the data ranges it holds."""
    verdicts = [
        Verdict(incarnation=member.incarnation, fragment=fragment, base=base, applied=applied, tokens=tokens)
        for fragment, outcomes in sorted(member.outcomes.items())
        for base, applied, tokens in outcomes
    ]
    data = state.data
    leases = [ranges.to_message(lease, data) for lease in member.leases.values()] if data is not None else []
    return Own(nonce=member.register.nonce, outcomes=verdicts, leases=leases)
