"""What became of these tokens? Every way in which a contribution gets its outcome, and how it is booked and told.

Nothing is booked while a base stands: a better contribution under the same key may still come. The commit that
supersedes the base books each one on it; what arrives later is booked when it is read.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Literal

from anabranch.orchestrator.core.events import Offer
from anabranch.orchestrator.core.instructions import Book, Consume, Drop, Instruction, Note, Tell
from anabranch.orchestrator.core.state import Fragment, Member, Outcome, Refusal, Round, State
from anabranch.queue.messages import Closed, Verdict, Verdicts

_REASON_LIMIT = 160  # characters of a reason inside a list of verdicts


def brief(reason: str) -> str:
    return reason[:_REASON_LIMIT]


# --- refused while its base stands ------------------------------------------------------------------------


def refuse(state: State, member: Member, fragment: Fragment, offer: Offer, reason: str) -> Iterator[Instruction]:
    """Not taken. Nothing is booked yet."""
    round_ = state.round_of(fragment.index)
    number = round_.number if round_ is not None else 0
    fragment.refused[member.incarnation] = Refusal(offer.message.tokens, reason, number)
    yield from _turn_down(state, member, offer, reason, "contributions refused", "refused")


def unknown_base(state: State, member: Member, fragment: Fragment, offer: Offer) -> Iterator[Instruction]:
    said = offer.message
    reason = f"unknown base: version {said.base} of fragment {fragment.index}, the run is at {fragment.version}"
    if said.timeline != state.timeline:
        reason = f"unknown base: timeline {said.timeline or '(none)'}, the run is on {state.timeline}"
    yield from _turn_down(state, member, offer, reason, "contributions refused", "refused")
    if member.outcome(fragment.index, said.base) is None:
        yield from _book_rejected(state, member, offer, reason)


def useless(state: State, member: Member, offer: Offer, reason: str) -> Iterator[Instruction]:
    """It can be nobody's contribution: nothing to book."""
    yield Consume("refused", member.name, (offer.entry,))
    yield Note(f"contribution of {member.name} refused: {reason}", "refused", {"incarnation": member.incarnation})


# --- after its base was superseded ------------------------------------------------------------------------


def superseded(state: State, member: Member, fragment: Fragment, offer: Offer) -> Iterator[Instruction]:
    """What arrives after its base is booked when read, once; a repeat gets the same answer again."""
    said = offer.message
    known = member.outcome(fragment.index, said.base)
    if known is None and member.is_history(fragment.index, said.base):  # an older copy of the inbox came back
        known = (said.base, False, _dropped(state, said.tokens))
    if known is not None:
        yield Consume("its base is superseded", member.name, (offer.entry,))
        yield told_again(member, fragment, known)
        return
    late = (said.round, said.base) in fragment.recent
    reason = ("late" if late else "stale") + f": based on version {said.base}, the run is at {fragment.version}"
    counted = "contributions late" if late else "contributions stale"
    yield from _turn_down(state, member, offer, reason, counted, "its base is superseded")
    yield from _book_rejected(state, member, offer, reason)


def told_again(member: Member, fragment: Fragment, outcome: Outcome) -> Tell:
    base, applied, tokens = outcome
    verdict = _verdict(member, fragment.index, base, tokens, "told again", applied=applied)
    return Tell("told again", Verdicts(verdicts=[verdict]), "settled")


# --- with the commit that supersedes its base -------------------------------------------------------------


def book_all(state: State, fragment: Fragment, round_: Round, verdicts: list[Verdict]) -> Iterator[Instruction]:
    """Everything on the base that a commit supersedes, the verdicts into the list given."""
    applied = {offer.message.incarnation for offer, _ in round_.parts}
    for offer, _ in round_.parts:
        member, tokens = state.members[offer.message.incarnation], offer.message.tokens
        member.last_round = round_.number
        state.applied_parameter_tokens += tokens * fragment.size
        verdicts.append(_verdict(member, fragment.index, round_.base, tokens, "", applied=True))
        yield _settle(state, member, fragment.index, round_.base, tokens, "applied", round_.reason)
        yield Consume("merged", member.name, (offer.entry,))
    for incarnation, offer in sorted(fragment.in_hand.items()):
        if incarnation not in applied:
            reason, tokens = "late: the round had closed", _dropped(state, offer.message.tokens)
            yield _book_unmerged(state, fragment, incarnation, tokens, reason, verdicts)
            yield Consume("late", offer.sender, (offer.entry,))
            yield Drop("late", offer.sender, offer.entry)
    for incarnation, refusal in sorted(fragment.refused.items()):
        if incarnation in state.members and incarnation not in applied:
            yield _book_unmerged(state, fragment, incarnation, refusal.tokens, refusal.reason, verdicts)
    fragment.in_hand.clear()
    fragment.refused.clear()


def _book_unmerged(
    state: State, fragment: Fragment, incarnation: int, tokens: int, reason: str, verdicts: list[Verdict]
) -> Book:
    member = state.members[incarnation]
    verdicts.append(_verdict(member, fragment.index, fragment.version, tokens, reason, applied=False))
    return _settle(state, member, fragment.index, fragment.version, tokens, "rejected", reason)


# --- whose sender is nobody any more ----------------------------------------------------------------------


def speaker(state: State, incarnation: int, sender: str) -> Generator[Instruction, None, Member | None]:
    """The member that speaks, for `yield from`; None, and who sent it is told why, if it is nobody."""
    member = state.speaker(incarnation, sender)
    if member is None:
        yield from speaks_for_none(state, incarnation, sender)
    return member


def speaks_for_none(state: State, incarnation: int, sender: str) -> Iterator[Instruction]:
    """`sender` is not this incarnation: it is over, or somebody else's, who must not be sent away by that."""
    if (owner := state.members.get(incarnation)) is None:
        reason = f"{sender} speaks for incarnation {incarnation}, which is over"
        yield Tell(reason, Closed(incarnations=[incarnation], reason=reason), "told closed")
        return
    state.count("messages refused")
    yield Note(f"message of {sender} refused: incarnation {incarnation} is {owner.name}", "refused", {"name": sender})


# --- the same for all -------------------------------------------------------------------------------------


def _turn_down(
    state: State, member: Member, offer: Offer, reason: str, counted: str, why_consumed: str
) -> Iterator[Instruction]:
    said = offer.message
    state.count(counted)
    yield Consume(why_consumed, member.name, (offer.entry,))
    details = {"incarnation": member.incarnation, "name": member.name, "fragment": said.fragment, "base": said.base}
    yield Note(reason, "rejected", {**details, "tokens": said.tokens})


def _book_rejected(state: State, member: Member, offer: Offer, reason: str) -> Iterator[Instruction]:
    said = offer.message
    tokens = _dropped(state, said.tokens)
    yield _settle(state, member, said.fragment, said.base, tokens, "rejected", reason)
    verdict = _verdict(member, said.fragment, said.base, tokens, reason, applied=False)
    yield Tell(reason, Verdicts(verdicts=[verdict]), "settled")


def _dropped(state: State, tokens: int) -> int:
    """Of a contribution that came late, the tokens whose work is lost: none, if its sender carries it over. What is
    refused for what it is, and not for when it came, is lost to everybody: its sender drops it, too."""
    return tokens if state.spec.workers.adoption == "overwrite" else 0


def _settle(
    state: State,
    member: Member,
    fragment: int,
    base: int,
    tokens: int,
    column: Literal["applied", "rejected"],
    reason: str,
) -> Book:
    """Give one contribution its outcome in the books."""
    member.account.add(column, fragment, tokens)
    member.remember(fragment, (base, column == "applied", tokens))
    state.unmarked.append((member.incarnation, fragment))
    state.changed.add(member.incarnation)
    return Book(reason, member.incarnation, fragment, column, tokens)


def _verdict(member: Member, fragment: int, base: int, tokens: int, reason: str, *, applied: bool) -> Verdict:
    return Verdict(
        incarnation=member.incarnation,
        fragment=fragment,
        base=base,
        applied=applied,
        tokens=tokens,
        reason=brief(reason),
    )
