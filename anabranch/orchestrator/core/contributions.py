"""Contributions on their way in: their envelope, their payload, or why there is none."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.orchestrator.core import closing, outcomes
from anabranch.orchestrator.core.events import Fetched, FetchFailed, Heard, Offer
from anabranch.orchestrator.core.instructions import Consume, Drop, Fetch, Instruction, Note, Tell
from anabranch.orchestrator.core.state import Fragment, Member, State
from anabranch.queue.messages import Contribution, Decline, Resend


def offered(state: State, event: Heard, said: Contribution) -> Iterator[Instruction]:
    """A contribution's envelope was read: fetch its payload, or say why not."""
    offer = Offer(event.sender, event.entry, said)
    member = state.speaker(said.incarnation, event.sender)
    if member is None:
        yield Consume("its incarnation is over", event.sender, (event.entry,))
        yield from outcomes.speaks_for_none(state, said.incarnation, event.sender)
        return
    if not member.is_worker or said.fragment >= len(state.fragments):
        reason = f"a {member.role} asked for fragment {said.fragment}"
        yield from outcomes.useless(state, member, offer, reason)
        return
    if said.tokens > said.figures.processed:
        reason = f"{said.tokens} tokens sent, only {said.figures.processed} ever processed"
        yield from outcomes.useless(state, member, offer, reason)
        return
    member.learn(said.fragment, said.figures.processed, said.figures.discarded)
    fragment = state.fragments[said.fragment]
    # On the standing base its bits decide, not the timeline: a roll-back that did not touch it spares work on it.
    if said.base > fragment.version:
        yield from outcomes.unknown_base(state, member, fragment, offer)
    elif said.base < fragment.version:
        yield from outcomes.superseded(state, member, fragment, offer)
    else:
        yield from _on_standing_base(state, member, fragment, offer)


def _on_standing_base(state: State, member: Member, fragment: Fragment, offer: Offer) -> Iterator[Instruction]:
    who, base = member.incarnation, offer.message.base
    if (known := member.outcome(fragment.index, base)) is not None:  # refused when the base was still unknown
        yield Consume("it has its outcome", member.name, (offer.entry,))
        yield outcomes.told_again(member, fragment, known)
        return
    round_ = state.round_of(fragment.index)
    if round_ is not None and any(part.message.incarnation == who for part, _ in round_.parts):
        yield Consume("this round merges an earlier one", member.name, (offer.entry,))
        return
    earlier = [o for o in member.fetching.values() if (o.message.fragment, o.message.base) == (fragment.index, base)]
    earlier += [o for o in [fragment.in_hand.pop(who, None)] if o is not None]
    for replaced in earlier:  # a newer one takes its place
        member.fetching.pop(replaced.entry, None)
        yield Drop("replaced", member.name, replaced.entry)
        yield Consume("replaced by a newer one", member.name, (replaced.entry,))
    fragment.refused.pop(who, None)
    if offer.message.base_digest != fragment.digest:
        yield from outcomes.refuse(state, member, fragment, offer, "its base has other bits than the run's (digest)")
        return
    member.fetching[offer.entry] = offer
    yield Fetch("verify", offer)


def fetched(state: State, event: Fetched, now: float) -> Iterator[Instruction]:
    """A payload was verified: it counts towards the quorum while its base stands."""
    member, offer = _still_wanted(state, event)
    if member is None or offer is None:
        yield Drop("replaced meanwhile", event.sender, event.entry)
        return
    fragment = state.fragments[offer.message.fragment]
    if offer.message.base < fragment.version:
        yield Drop("superseded", offer.sender, offer.entry)
        yield from outcomes.superseded(state, member, fragment, offer)
        return
    fragment.in_hand[member.incarnation] = offer
    if (round_ := state.round_of(fragment.index)) is not None:
        yield from closing.review(state, round_, now)


def fetch_failed(state: State, event: FetchFailed, now: float) -> Iterator[Instruction]:
    member, offer = _still_wanted(state, event)
    if member is None or offer is None:
        return
    said, fragment = offer.message, state.fragments[offer.message.fragment]
    if said.base < fragment.version:
        yield from outcomes.superseded(state, member, fragment, offer)
    elif event.gone:
        yield Consume("its payload is gone", member.name, (offer.entry,))
        resend = Resend(incarnation=member.incarnation, fragment=said.fragment, base=said.base)
        yield Tell(f"payload of {member.name} is gone: {event.reason}", resend, "resend")
    else:
        yield from outcomes.refuse(state, member, fragment, offer, event.reason)
        if (round_ := state.round_of(fragment.index)) is not None:
            yield from closing.review(state, round_, now)


def _still_wanted(state: State, event: Fetched | FetchFailed) -> tuple[Member | None, Offer | None]:
    member = state.members.get(event.incarnation)
    return member, member.fetching.pop(event.entry, None) if member is not None else None


def declined(state: State, event: Heard, said: Decline, now: float) -> Iterator[Instruction]:
    yield Consume("decline read", event.sender, (event.entry,))
    member = state.speaker(said.incarnation, event.sender)
    round_ = state.rounds.get(said.round)
    if member is None or round_ is None or said.incarnation not in round_.called:
        return
    round_.called.discard(said.incarnation)
    round_.declined.add(said.incarnation)
    details = {"round": said.round, "fragment": said.fragment}
    yield Note(
        f"{member.name} declined round {said.round}: {said.reason}",
        "declined",
        {**details, "incarnation": said.incarnation, "name": member.name},
    )
    yield from closing.review(state, round_, now)
