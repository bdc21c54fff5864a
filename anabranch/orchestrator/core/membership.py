"""Members: joining, leaving, expiry, and closing an incarnation's books."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.orchestrator.core import policies, ranges
from anabranch.orchestrator.core.events import Heard
from anabranch.orchestrator.core.instructions import (
    Book,
    CloseBooks,
    Consume,
    ForgetInbox,
    Instruction,
    Note,
    Tell,
)
from anabranch.orchestrator.core.ledger import COLUMNS, Account, imbalance, weighted
from anabranch.orchestrator.core.state import DEPARTED_KEPT, Departed, Member, State, keep
from anabranch.queue import messages

FULL = 0.80  # share of the server's memory above which no round opens
ROOM = 0.75  # below it they open again
BOOTSTRAPS = 8  # members that fetch the whole model at the same time: the others are there to train
BOOTSTRAP_S = 10.0
REASON_LIMIT = 900  # characters of a reason that may quote another's words
OTHER_LAYOUT = "the model's tensors differ from the run's (layout hash)"


def join(state: State, event: Heard, said: messages.Register, now: float) -> Iterator[Instruction]:
    yield Consume("registration read", said.name, (event.entry,))
    namesakes = [m for m in state.members.values() if m.name == said.name]
    again = next((m for m in namesakes if m.register.nonce == said.nonce), None)
    if again is not None:  # a repeat: the same answer
        again.seen_at = now
        yield _welcome("registered again", again)
        return
    if (refusal := _refusal(state, said, namesakes)) is not None:
        reason, retry = refusal
        yield _turn_away(reason, said, retry=retry)
        if not namesakes:
            yield ForgetInbox("nobody was let in", said.name)
        return
    if state.born and sum(_is_fetching(m, now) for m in state.members.values()) >= BOOTSTRAPS:
        return  # it asks again every heartbeat
    member = _admit(state, said, now)
    yield _welcome(f"{said.role} {said.name} joined" + (f" ({said.label})" if said.label else ""), member)
    yield from ask_for_init(state)


def _welcome(reason: str, member: Member) -> Tell:
    said = member.register
    message = messages.Welcome(name=said.name, nonce=said.nonce, incarnation=member.incarnation)
    return Tell(reason, message, "joined", {"role": said.role, "label": said.label, "device": said.device})


def _turn_away(reason: str, said: messages.Register, *, retry: bool) -> Tell:
    message = messages.Refused(name=said.name, nonce=said.nonce, reason=reason[:REASON_LIMIT], retry=retry)
    return Tell(reason, message, "turned away")


def _refusal(state: State, said: messages.Register, namesakes: list[Member]) -> tuple[str, bool] | None:
    if any(m.live for m in namesakes):
        return (
            f"the name {said.name!r} is in use by a member heard a moment ago; choose another --name",
            True,
        )
    if state.stopped:
        return "the run has stopped", False
    limit = state.spec.limits.max_members
    if sum(m.live for m in state.members.values()) >= limit:
        return f"the run is full: limits.max_members = {limit}", True
    if None not in (state.layout_hash, said.layout_hash) and state.layout_hash != said.layout_hash:
        return OTHER_LAYOUT, False
    return None


def _is_fetching(member: Member, now: float) -> bool:
    """Whether it fetches the whole model. A link so slow that this takes longer does not strain the server."""
    return member.live and min(member.adopted, default=-1) < 0 and now - member.joined_at < BOOTSTRAP_S


def _admit(state: State, said: messages.Register, now: float) -> Member:
    member = Member(state.next_incarnation, said, Account(), seen_at=now, joined_at=now)
    member.size_for(len(state.fragments))
    state.next_incarnation += 1
    state.members[member.incarnation] = member
    state.changed.add(member.incarnation)
    return member


def born(state: State) -> Iterator[Instruction]:
    """The layout is known now: whoever brought another one cannot stay."""
    for member in list(state.members.values()):
        member.size_for(len(state.fragments))
        state.changed.add(member.incarnation)
        if member.register.layout_hash not in (None, state.layout_hash):
            yield from expel(state, member, OTHER_LAYOUT)


def expel(state: State, member: Member, reason: str) -> Iterator[Instruction]:
    """Turn away a member that was let in."""
    yield _turn_away(reason, member.register, retry=False)
    yield from go(state, member, f"{member.name} was turned away: {reason}")


def dismiss_all(state: State, reason: str) -> Iterator[Instruction]:
    """Whoever is here follows another definition, and has to begin anew under this one."""
    yield Note(reason, "redefined")
    live = [member for member in state.members.values() if member.live]
    for member in live:
        member.live = False  # none of them is asked for version 0
    for member in live:
        yield from expel(state, member, f"{reason}; start it again")


def ask_for_init(state: State) -> Iterator[Instruction]:
    """Ask one member for version 0, if there is none yet and nobody who was asked is still here."""
    asked = state.members.get(state.asked_init)
    if state.born or state.stopped or state.orphaned or state.init_given or (asked is not None and asked.live):
        return
    candidate = next((m for m in state.members.values() if m.live and m.register.can_init and m.is_worker), None)
    if candidate is not None:
        state.asked_init = candidate.incarnation
        message = messages.SendInit(incarnation=candidate.incarnation)
        yield Tell(f"version 0 comes from {candidate.name}", message, "init asked")


def mismatch(state: State, member: Member, fragment: int, difference: int) -> Note:
    state.count("ledger mismatches")
    return Note(
        f"ledger of {member.name}, fragment {fragment}: {difference} of {member.processed} tokens missing",
        "ledger mismatch",
        {**who(member), "fragment": fragment, "difference": difference},
    )


def leave(state: State, event: Heard, said: messages.Farewell) -> Iterator[Instruction]:
    yield Consume("farewell read", event.sender, (event.entry,))
    member = state.speaker(said.incarnation, event.sender)
    if member is None or member.left:
        return
    if len(said.figures) == len(state.fragments):
        for index, figures in enumerate(said.figures):
            member.learn(index, figures.processed, figures.discarded)
    ranges.parted(member, said)
    member.left = True
    yield from go(state, member, f"{member.name} left" + (f": {said.reason}" if said.reason else ""))


def expire(state: State, now: float) -> Iterator[Instruction]:
    if state.full:  # the server refuses heartbeats, too
        return
    for member in list(state.members.values()):
        if member.live and policies.is_expired(member, state, now):
            yield from go(state, member, f"{member.name}: no heartbeat for {now - member.seen_at:.1f} s")


def memory_seen(state: State, share: float, now: float) -> Iterator[Instruction]:
    """Above `FULL` no round opens, until `ROOM` again: payloads that are under way still have to fit."""
    if not state.full and share >= FULL:
        state.full = True
        yield Note(
            f"the server is {share:.0%} full: no round opens until it is below {ROOM:.0%}; "
            "raise its maxmemory, or let payloads run out",
            "server full",
            {"share": share},
        )
    elif state.full and share < ROOM:
        state.full = False
        for member in state.members.values():  # their heartbeats could not be written
            member.seen_at = now
        yield Note(f"the server is {share:.0%} full: rounds open again", "server has room", {"share": share})


def go(state: State, member: Member, reason: str) -> Iterator[Instruction]:
    """Take a member off the live list. Its contributions in hand stay valid."""
    member.live = False
    state.changed.add(member.incarnation)
    for round_ in state.rounds.values():
        round_.called.discard(member.incarnation)
    yield Note(reason, "gone", {**who(member), "left": member.left})
    yield from ask_for_init(state)


def close_finished(state: State) -> Iterator[Instruction]:
    """Close incarnations that are gone and whose every contribution has an outcome."""
    for member in list(state.members.values()):
        if not member.live and not _has_open_contribution(state, member):
            yield from _close(state, member)


def _has_open_contribution(state: State, member: Member) -> bool:
    number = member.incarnation
    return bool(member.fetching) or any(number in f.in_hand or number in f.refused for f in state.fragments)


def _close(state: State, member: Member) -> Iterator[Instruction]:
    anything_lost = not member.left
    for index, (processed, discarded) in enumerate(member.known):
        lost = imbalance(member.account, index, processed=processed, discarded=discarded)
        anything_lost = anything_lost or lost > 0
        if lost > 0:
            member.account.add("lost", index, lost)
            yield Book("its incarnation ended", member.incarnation, index, "lost", lost)
        elif lost < 0:  # more was booked than it ever trained
            yield mismatch(state, member, index, lost)
    yield from ranges.give_back(state, member, lost=anything_lost)
    final = _final_books(state, member)
    keep(state.departed, final, DEPARTED_KEPT)
    account = member.account
    state.departed_books = state.departed_books or [[0, 0, 0] for _ in state.fragments]
    for index, books in enumerate(state.departed_books):
        for column, name in enumerate(COLUMNS):
            books[column] += account.column(name)[index]
    del state.members[member.incarnation]
    state.changed.discard(member.incarnation)
    state.removed.add(member.incarnation)
    shared = any(m.name == member.name for m in state.members.values())
    reason = f"{member.name}'s books are closed, {final.lost:.0f} tokens lost"
    yield CloseBooks(
        reason,
        member.incarnation,
        member.name,
        round(final.lost),
        tuple(zip(account.applied, account.rejected, account.lost, strict=True)),
        not shared,
    )
    yield Tell(reason, messages.Closed(incarnations=[member.incarnation], reason=reason))


def _final_books(state: State, member: Member) -> Departed:
    sizes, said = state.sizes, member.report
    final = Departed(
        incarnation=member.incarnation,
        name=member.name,
        role=member.role,
        processed=weighted([processed for processed, _ in member.known], sizes),
        discarded=weighted([discarded for _, discarded in member.known], sizes),
        left=member.left,
        **member.account.weighted(sizes),
    )
    if said is not None:
        final.train_s, final.rest_s, final.life_s = said.train_s, said.rest_s, said.life_s
        final.bytes_sent = said.bytes_sent
    return final


def who(member: Member) -> dict[str, object]:
    return {"incarnation": member.incarnation, "name": member.name}
