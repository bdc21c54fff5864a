"""Rounds: opening, arrivals, quorum and grace, closing, commit, abandonment, late work. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from anabranch.merge.weights import token_weight
from anabranch.orchestrator import policies
from anabranch.orchestrator.events import (
    Abandon,
    AskAgain,
    Book,
    Commit,
    Consume,
    Declined,
    Drop,
    Fetch,
    FetchFailed,
    Instruction,
    Merge,
    Merged,
    Note,
    Offer,
    OpenRound,
    Reject,
    SetTimer,
    Settle,
    Verdict,
)
from anabranch.orchestrator.grace import average, deadline_s, grace_s
from anabranch.orchestrator.membership import average_step, find, speaks_for_none
from anabranch.orchestrator.state import Fragment, Member, Outcome, Refusal, Round, State

# --- opening ----------------------------------------------------------------------------------------------


def open_due(state: State, now: float) -> Iterator[Instruction]:
    """Open what is due, at most τ rounds in flight and always on different fragments."""
    if not state.born or state.paused or state.stopped or state.full or state.draining:
        return
    while len(state.rounds) < state.spec.rounds.in_flight:
        pacing = policies.pacing(state, now)
        if pacing.worker is None:
            yield from _open_for_what_is_left(state, now)
            return
        if not pacing.due:
            return
        choice = policies.next_fragment(state, now)
        if choice is None:
            return
        average_step(state, pacing.worker)
        reason = f"{pacing.worker.name} made {pacing.steps:.0f} of {pacing.interval:g} steps"
        policies.restart_interval(state, pacing.worker, now)
        yield from _open(state, *choice, reason, now)


def _open_for_what_is_left(state: State, now: float) -> Iterator[Instruction]:
    """Nobody advances any more: farewell contributions, and what those without data hold, are merged at once."""
    workers = [m for m in state.members.values() if m.live and m.role == "worker" and not m.idle]
    if any(not policies.is_stuck(m, state, now) for m in workers):
        return  # it has not reported since this leader began, or has yet to adopt
    needed = 1 if state.spec.rounds.quorum == "all" else state.spec.rounds.quorum
    verifying = {fragment for _, fragment, _ in state.fetching}
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
    settings = state.spec.rounds
    round_ = Round(
        number=state.next_round,
        fragment=fragment.index,
        base=fragment.version,
        opened_at=now,
        deadline_s=deadline_s(
            state.averages,
            interval_steps=settings.interval_steps,
            intervals=settings.deadline_intervals,
            minimum_s=settings.deadline_min_s,
        ),
        called={m.incarnation for m in called},
        reason=reason,
    )
    state.next_round += 1
    state.next_fragment = (fragment.index + 1) % len(state.fragments)
    state.rounds[round_.number] = round_
    fragment.recent.append((round_.number, round_.base))
    yield OpenRound(reason, round_.number, fragment.index, state.timeline, round_.base, tuple(sorted(round_.called)))
    yield SetTimer("round deadline", "round deadline", round_.deadline_s, round_.number)
    yield from review(state, round_, now)  # contributions of an abandoned round may be in hand


# --- arrivals ---------------------------------------------------------------------------------------------


def offered(state: State, offer: Offer, now: float) -> Iterator[Instruction]:
    """A contribution's envelope was read: fetch its payload, or say why not."""
    member = find(state, offer.incarnation, offer.sender)
    if member is None:
        yield Consume("its incarnation is over", offer.sender, (offer.entry,))
        yield from speaks_for_none(state, offer.incarnation, offer.sender)
        return
    if member.role != "worker" or offer.fragment >= len(state.fragments):
        yield Consume("refused", offer.sender, (offer.entry,))
        yield _refused_note(member, offer, f"a {member.role} asked for fragment {offer.fragment}")
        return
    if offer.tokens > offer.processed:
        yield Consume("refused", offer.sender, (offer.entry,))
        yield _refused_note(member, offer, f"{offer.tokens} tokens sent, only {offer.processed} ever processed")
        return
    member.learn(offer.fragment, offer.processed, offer.discarded)
    fragment = state.fragments[offer.fragment]
    # On the standing base its bits decide, not the timeline: a roll-back that did not touch it spares work on it.
    if offer.base > fragment.version:
        yield from _unknown_base(state, member, fragment, offer)
    elif offer.base < fragment.version:
        yield from _superseded(state, member, fragment, offer)
    else:
        yield from _on_standing_base(state, member, fragment, offer)


def _on_standing_base(state: State, member: Member, fragment: Fragment, offer: Offer) -> Iterator[Instruction]:
    who = offer.incarnation
    if (known := member.outcome(fragment.index, offer.base)) is not None:  # refused when the base was still unknown
        yield Consume("it has its outcome", member.name, (offer.entry,))
        yield _told_again(member, fragment, known)
        return
    round_ = state.round_of(fragment.index)
    if round_ is not None and round_.closed and any(part.incarnation == who for part, _ in round_.parts):
        yield Consume("this round merges an earlier one", member.name, (offer.entry,))
        return
    key = (who, fragment.index, offer.base)
    for earlier in (state.fetching.pop(key, None), fragment.in_hand.pop(who, None)):
        if earlier is not None:  # a newer one under its key replaces it
            yield Drop("replaced", earlier)
            yield Consume("replaced by a newer one", member.name, (earlier.entry,))
    fragment.refused.pop(who, None)
    if offer.base_digest != fragment.digest:
        yield from _refuse(state, member, fragment, offer, "its base has other bits than the run's (digest)")
        return
    state.fetching[key] = offer
    yield Fetch("verify", offer)


def fetched(state: State, offer: Offer, now: float) -> Iterator[Instruction]:
    """A payload was verified: it counts towards the quorum while its base stands."""
    if not _still_wanted(state, offer):
        yield Drop("replaced meanwhile", offer)
        return
    member = state.members[offer.incarnation]
    fragment = state.fragments[offer.fragment]
    if offer.base < fragment.version:
        yield Drop("superseded", offer)
        yield from _superseded(state, member, fragment, offer)
        return
    fragment.in_hand[offer.incarnation] = offer
    if (round_ := state.round_of(fragment.index)) is not None:
        yield from review(state, round_, now)


def fetch_failed(state: State, event: FetchFailed, now: float) -> Iterator[Instruction]:
    offer = event.offer
    if not _still_wanted(state, offer):
        return
    member = state.members[offer.incarnation]
    fragment = state.fragments[offer.fragment]
    if offer.base < fragment.version:
        yield from _superseded(state, member, fragment, offer)
    elif event.gone:
        yield Consume("its payload is gone", member.name, (offer.entry,))
        yield AskAgain(
            f"payload of {member.name} is gone: {event.reason}", offer.incarnation, offer.fragment, offer.base
        )
    else:
        yield from _refuse(state, member, fragment, offer, event.reason)
        if (round_ := state.round_of(fragment.index)) is not None:
            yield from review(state, round_, now)


def declined(state: State, event: Declined, now: float) -> Iterator[Instruction]:
    yield Consume("decline read", event.sender, (event.entry,))
    member = find(state, event.incarnation, event.sender)
    round_ = state.rounds.get(event.round)
    if member is None or round_ is None or event.incarnation not in round_.called:
        return
    round_.called.discard(event.incarnation)
    yield Note(
        f"{member.name} declined round {event.round}: {event.reason}",
        "declined",
        {
            "round": event.round,
            "fragment": event.fragment,
            "incarnation": event.incarnation,
            "name": member.name,
        },
    )
    yield from review(state, round_, now)


def _still_wanted(state: State, offer: Offer) -> bool:
    key = (offer.incarnation, offer.fragment, offer.base)
    if state.fetching.get(key) is not offer:
        return False
    del state.fetching[key]
    return offer.incarnation in state.members


# --- refusals ---------------------------------------------------------------------------------------------


def _refuse(state: State, member: Member, fragment: Fragment, offer: Offer, reason: str) -> Iterator[Instruction]:
    """Not taken. Nothing is booked while the base stands: a better one under its key may still come."""
    round_ = state.round_of(fragment.index)
    fragment.refused[offer.incarnation] = Refusal(offer.tokens, reason, round_.number if round_ is not None else 0)
    state.count("contributions refused")
    yield Consume("refused", member.name, (offer.entry,))
    yield _rejection(member, offer, reason)


def _unknown_base(state: State, member: Member, fragment: Fragment, offer: Offer) -> Iterator[Instruction]:
    reason = f"unknown base: version {offer.base} of fragment {fragment.index}, the run is at {fragment.version}"
    if offer.timeline != state.timeline:
        reason = f"unknown base: timeline {offer.timeline or '(none)'}, the run is on {state.timeline}"
    state.count("contributions refused")
    yield Consume("refused", member.name, (offer.entry,))
    yield _rejection(member, offer, reason)
    if member.outcome(fragment.index, offer.base) is None:
        yield from _book_rejected(state, member, fragment, offer, reason)


def _superseded(state: State, member: Member, fragment: Fragment, offer: Offer) -> Iterator[Instruction]:
    """What arrives after its base is booked when read, once; a repeat gets the same answer again."""
    yield Consume("its base is superseded", member.name, (offer.entry,))
    known = member.outcome(fragment.index, offer.base)
    if known is None and member.is_history(fragment.index, offer.base):  # an older copy of the inbox came back
        known = (offer.base, False, _dropped(state, offer.tokens))
    if known is not None:
        yield _told_again(member, fragment, known)
        return
    late = (offer.round, offer.base) in fragment.recent
    reason = ("late" if late else "stale") + f": based on version {offer.base}, the run is at {fragment.version}"
    state.count("contributions late" if late else "contributions stale")
    yield _rejection(member, offer, reason)
    yield from _book_rejected(state, member, fragment, offer, reason)


def _told_again(member: Member, fragment: Fragment, outcome: Outcome) -> Settle:
    base, applied, tokens = outcome
    return Settle("told again", (Verdict(member.incarnation, fragment.index, base, applied, tokens, "told again"),))


def _book_rejected(
    state: State, member: Member, fragment: Fragment, offer: Offer, reason: str
) -> Iterator[Instruction]:
    tokens = _dropped(state, offer.tokens)
    yield settle_tokens(state, member, fragment.index, offer.base, tokens, "rejected", reason)
    yield Settle(reason, (Verdict(member.incarnation, fragment.index, offer.base, False, tokens, reason),))


def _dropped(state: State, tokens: int) -> int:
    """Of a refused contribution, the tokens whose work is really lost: none, if its sender keeps it."""
    return tokens if state.spec.workers.adoption == "overwrite" else 0


def settle_tokens(
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
    state.dirty.add(member.incarnation)
    return Book(reason, member.incarnation, fragment, column, tokens)


def _rejection(member: Member, offer: Offer, reason: str) -> Reject:
    return Reject(reason, member.incarnation, member.name, offer.fragment, offer.base, offer.tokens)


def _refused_note(member: Member, offer: Offer, reason: str) -> Note:
    return Note(f"contribution of {member.name} refused: {reason}", "refused", {"incarnation": member.incarnation})


# --- quorum, grace, closing -------------------------------------------------------------------------------


def review(state: State, round_: Round, now: float) -> Iterator[Instruction]:
    """Decide what a round does next: wait, start its grace window, or close."""
    if round_.closed or round_.number not in state.rounds:
        return
    fragment = state.fragments[round_.fragment]
    arrived = len(fragment.in_hand)
    missing = policies.missing(round_, state)
    quorum = policies.quorum_of(round_, state)
    if arrived < quorum:
        if not arrived and not missing and not round_.called - policies.refused_in(round_, state):
            yield from abandon(state, round_, "nobody left who was called")
        elif round_.overdue:
            yield from abandon(state, round_, f"quorum {arrived}/{quorum}")
        return
    if round_.quorum_at is None:
        round_.quorum_at = now
        state.averages.quorum_s = average(state.averages.quorum_s, now - round_.opened_at)
    if not missing:
        yield from _close(state, round_, "all arrived", now)
    elif round_.grace_ended:  # before a quorum that was lost (replaced, or raised) came back
        yield from _close(state, round_, "grace expired", now)
    elif round_.grace_s is None:
        yield from _wait_for_more(state, round_, round_.quorum_at, now)


def _wait_for_more(state: State, round_: Round, quorum_at: float, now: float) -> Iterator[Instruction]:
    """The grace window, from the quorum on."""
    settings = state.spec.rounds
    round_.grace_s = grace_s(
        state.averages,
        in_flight=settings.in_flight,
        interval_steps=settings.interval_steps,
        factor=settings.grace_factor,
        cap_s=settings.grace_cap_s,
    )
    left = round_.grace_s - (now - quorum_at)
    if left > 0:
        yield SetTimer("grace", "grace", left, round_.number)
    else:
        yield from grace_over(state, round_.number, now)


def review_all(state: State, now: float) -> Iterator[Instruction]:
    """After somebody left or a setting changed."""
    for round_ in list(state.rounds.values()):
        yield from review(state, round_, now)


def change_grace(state: State, now: float) -> Iterator[Instruction]:
    """A new grace setting acts at once, on windows that are open, too."""
    for round_ in list(state.rounds.values()):
        waiting = round_.grace_s is not None and not round_.grace_ended and not round_.closed
        if waiting and round_.quorum_at is not None:
            yield from _wait_for_more(state, round_, round_.quorum_at, now)


def grace_over(state: State, number: int, now: float) -> Iterator[Instruction]:
    round_ = state.rounds.get(number)
    if round_ is not None and round_.grace_s is not None:
        round_.grace_ended = True
        yield from review(state, round_, now)


def deadline_over(state: State, number: int, now: float) -> Iterator[Instruction]:
    round_ = state.rounds.get(number)
    if round_ is not None:
        round_.overdue = True
        yield from review(state, round_, now)


def _close(
    state: State, round_: Round, how: Literal["all arrived", "grace expired"], now: float
) -> Iterator[Instruction]:
    fragment = state.fragments[round_.fragment]
    missing = policies.missing(round_, state)
    offers = sorted(
        fragment.in_hand.values(), key=lambda o: (state.members[o.incarnation].name, o.incarnation)
    )  # a fixed order: the result must not depend on who came first
    round_.parts = tuple((offer, token_weight(offer.tokens, offer.steps)) for offer in offers)
    round_.closed, round_.closed_at = how, now
    waited = now - round_.opened_at
    round_.reason = f"{how} after {waited:.2f} s: {len(offers)} of {len(offers) + len(missing)}"
    if missing:
        round_.reason += ", without " + ", ".join(m.name for m in missing[:8])
    yield Merge(round_.reason, round_.number, fragment.index, round_.base, round_.parts)


def abandon(state: State, round_: Round, reason: str) -> Iterator[Instruction]:
    """Give a round up; contributions on the standing base stay in hand."""
    del state.rounds[round_.number]
    state.count("abandoned")
    yield Abandon(reason, round_.number, round_.fragment, round_.base)


# --- commit -----------------------------------------------------------------------------------------------


def merged(state: State, event: Merged, now: float) -> Iterator[Instruction]:
    """The new version is uploaded: book everything on the superseded base and commit."""
    round_ = state.rounds.get(event.round)
    if round_ is None or round_.closed is None:
        return
    if event.digest is None:
        yield from _cannot_merge(state, round_, event.reason)
        return
    fragment = state.fragments[round_.fragment]
    verdicts: list[Verdict] = []
    applied = {offer.incarnation for offer, _ in round_.parts}
    weights = []
    for offer, weight in round_.parts:
        member = state.members[offer.incarnation]
        member.last_round = round_.number
        state.applied_parameter_tokens += offer.tokens * fragment.size
        weights.append((offer.incarnation, offer.tokens, offer.steps, weight))
        verdicts.append(Verdict(offer.incarnation, fragment.index, round_.base, True, offer.tokens))
        yield settle_tokens(state, member, fragment.index, round_.base, offer.tokens, "applied", round_.reason)
        yield Consume("merged", member.name, (offer.entry,))
    for offer in sorted(fragment.in_hand.values(), key=lambda o: o.incarnation):
        if offer.incarnation not in applied:
            yield from _book_unmerged(
                state, fragment, offer.incarnation, offer.tokens, "late: the round had closed", verdicts
            )
            yield Consume("late", offer.sender, (offer.entry,))
            yield Drop("late", offer)
    for incarnation, refusal in sorted(fragment.refused.items()):
        if incarnation in state.members and incarnation not in applied:
            yield from _book_unmerged(state, fragment, incarnation, refusal.tokens, refusal.reason, verdicts)
    fragment.in_hand.clear()
    fragment.refused.clear()
    fragment.version += 1
    fragment.digest = event.digest
    del state.rounds[round_.number]
    state.count(round_.closed)
    state.committing.append(round_.closed_at)
    yield Commit(
        round_.reason,
        round_.number,
        fragment.index,
        state.timeline,
        fragment.version,
        round_.closed,
        tuple(verdicts),
        tuple(weights),
        state.tokens,
    )


def _cannot_merge(state: State, round_: Round, reason: str) -> Iterator[Instruction]:
    """No version came out. Its parts are refused, or the same would happen for ever."""
    fragment = state.fragments[round_.fragment]
    for offer, _ in round_.parts:
        if fragment.in_hand.get(offer.incarnation) is offer:
            del fragment.in_hand[offer.incarnation]
            yield Drop(reason, offer)
            yield from _refuse(state, state.members[offer.incarnation], fragment, offer, reason)
    yield from abandon(state, round_, reason)


def _book_unmerged(
    state: State, fragment: Fragment, incarnation: int, tokens: int, reason: str, verdicts: list[Verdict]
) -> Iterator[Instruction]:
    member, tokens = state.members[incarnation], _dropped(state, tokens)
    verdicts.append(Verdict(incarnation, fragment.index, fragment.version, False, tokens, reason))
    yield settle_tokens(state, member, fragment.index, fragment.version, tokens, "rejected", reason)
