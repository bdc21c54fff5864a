"""Members: joining, heartbeats, leaving, expiry, and closing an incarnation's books. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.orchestrator import policies, ranges
from anabranch.orchestrator.events import (
    AskInit,
    Book,
    Close,
    Consume,
    Gone,
    Instruction,
    Joined,
    Left,
    Note,
    Progressed,
    TellClosed,
    TurnAway,
    Welcome,
)
from anabranch.orchestrator.grace import average
from anabranch.orchestrator.ledger import Account, imbalance, left_over, weighted
from anabranch.orchestrator.state import HELDOUT_KEPT, Departed, Member, State

FULL = 0.80  # share of the server's memory above which no round opens
ROOM = 0.75  # below it they open again
CREDIBLE_FACTOR = 4.0  # between a claimed step time and the observed one: reports are coalesced, averages lag
BOOTSTRAPS = 8  # members that fetch the whole model at the same time: the others are there to train
BOOTSTRAP_S = 10.0
OTHER_LAYOUT = "the model's tensors differ from the run's (layout hash)"


def find(state: State, incarnation: int, sender: str) -> Member | None:
    """The member, if the incarnation exists and speaks through its own inbox."""
    member = state.members.get(incarnation)
    return member if member is not None and member.name == sender else None


def speaks_for_none(state: State, incarnation: int, sender: str) -> Iterator[Instruction]:
    """`sender` is not this incarnation: it is over, or somebody else's, who must not be sent away by that."""
    if (owner := state.members.get(incarnation)) is None:
        yield TellClosed(f"{sender} speaks for incarnation {incarnation}, which is over", incarnation)
        return
    state.count("messages refused")
    yield Note(f"message of {sender} refused: incarnation {incarnation} is {owner.name}", "refused", {"name": sender})


def join(state: State, event: Joined, now: float) -> Iterator[Instruction]:
    yield Consume("registration read", event.name, (event.entry,))
    namesakes = [m for m in state.members.values() if m.name == event.name]
    again = next((m for m in namesakes if m.nonce == event.nonce), None)
    if again is not None:  # a repeat: the same answer
        again.seen_at = now
        yield Welcome("registered again", again.name, again.nonce, again.incarnation, again.role)
        return
    if (refusal := _refusal(state, event, namesakes)) is not None:
        reason, retry = refusal
        yield TurnAway(reason, event.name, event.nonce, retry, shared=bool(namesakes))
        return
    if state.born and sum(_is_fetching(m, now) for m in state.members.values()) >= BOOTSTRAPS:
        return  # it asks again every heartbeat
    member = _admit(state, event, now)
    yield Welcome(
        f"{event.role} {event.name} joined" + (f" ({event.label})" if event.label else ""),
        event.name,
        event.nonce,
        member.incarnation,
        event.role,
        event.label,
        event.device,
    )
    yield from ask_for_init(state)


def _refusal(state: State, event: Joined, namesakes: list[Member]) -> tuple[str, bool] | None:
    if any(m.live for m in namesakes):
        return f"the name {event.name!r} is in use by a live member; choose another --name", True
    if state.stopped:
        return "the run has stopped", False
    limit = state.spec.limits.max_members
    if sum(m.live for m in state.members.values()) >= limit:
        return f"the run is full: limits.max_members = {limit}", True
    if None not in (state.layout_hash, event.layout_hash) and state.layout_hash != event.layout_hash:
        return OTHER_LAYOUT, False
    return None


def _is_fetching(member: Member, now: float) -> bool:
    """Whether it fetches the whole model. A link so slow that this takes longer does not strain the server."""
    return member.live and min(member.adopted, default=-1) < 0 and now - member.joined_at < BOOTSTRAP_S


def _admit(state: State, event: Joined, now: float) -> Member:
    count = len(state.fragments)
    member = Member(
        incarnation=state.next_incarnation,
        name=event.name,
        nonce=event.nonce,
        role=event.role,
        label=event.label,
        device=event.device,
        can_init=event.can_init,
        layout_hash=event.layout_hash,
        account=Account.empty(count),
        seen_at=now,
        joined_at=now,
    )
    _size_lists(member, count)
    state.next_incarnation += 1
    state.members[member.incarnation] = member
    state.dirty.add(member.incarnation)
    return member


def _size_lists(member: Member, fragments: int) -> None:
    member.account = Account.empty(fragments)
    member.adopted = [-1] * fragments
    member.held = [0] * fragments
    member.discarded = [0] * fragments
    member.pending = [0] * fragments
    member.known = [(0, 0)] * fragments


def born(state: State) -> Iterator[Instruction]:
    """The layout is known now: whoever brought another one cannot stay."""
    for member in list(state.members.values()):
        _size_lists(member, len(state.fragments))
        state.dirty.add(member.incarnation)
        if member.layout_hash not in (None, state.layout_hash):
            yield from expel(state, member, OTHER_LAYOUT)


def expel(state: State, member: Member, reason: str) -> Iterator[Instruction]:
    """Turn away a member that was let in."""
    yield TurnAway(reason, member.name, member.nonce, retry=False, shared=True)
    yield from go(state, member, f"{member.name} was turned away: {reason}")


def ask_for_init(state: State) -> Iterator[Instruction]:
    """Ask one member for version 0, if there is none yet and nobody who was asked is still here."""
    asked = state.members.get(state.asked_init)
    if state.born or state.stopped or state.orphaned or state.init_given or (asked is not None and asked.live):
        return
    candidate = next((m for m in state.members.values() if m.live and m.can_init and m.role == "worker"), None)
    if candidate is not None:
        state.asked_init = candidate.incarnation
        yield AskInit(f"version 0 comes from {candidate.name}", candidate.incarnation)


def progress(state: State, event: Progressed, now: float) -> Iterator[Instruction]:
    member = find(state, event.incarnation, event.sender)
    if member is None:
        yield from speaks_for_none(state, event.incarnation, event.sender)
        return
    before, member.seen_at = member.seen_at, now
    if not member.live and not member.left:
        member.live = True
        state.dirty.add(member.incarnation)
        yield Note(f"{member.name} is back: its heartbeat resumed before its books were closed", "back", _who(member))
    _take_steps(state, member, event, before, now)
    member.loss, member.read = event.loss, event.read
    member.train_s, member.rest_s, member.life_s = event.train_s, event.rest_s, event.life_s
    member.bytes_sent, member.idle = event.bytes_sent, event.idle
    count = len(state.fragments)
    if not count and not state.orphaned and any(version >= 0 for version in event.adopted):
        state.orphaned = True
        yield Note(
            f"{member.name} holds versions of this run, but the server holds none: it was emptied. "
            "No new model is begun; continue from a checkpoint",
            "orphaned",
            _who(member),
        )
    figures = (event.adopted, event.held, event.discarded, event.pending)
    if count and all(len(f) == count for f in figures):
        known = speaks_of_this(state, event)
        if known:
            member.adopted, member.held = list(event.adopted), list(event.held)
        member.processed = event.processed
        member.discarded, member.pending = list(event.discarded), list(event.pending)
        for index, discarded in enumerate(event.discarded):
            member.learn(index, event.processed, discarded)
        if known:  # else it may have been told outcomes, and been leased ranges, that are lost here
            yield from check_books(state, member)
            yield from ranges.reported(state, member, event.leased, event.leases)
    if event.heldout_loss is not None and member.role == "evaluator":
        _take_heldout(state, member, event)


def speaks_of_this(state: State, event: Progressed) -> bool:
    """Whether a report's versions and outcomes are those of the current timeline (schema 1 does not say)."""
    return event.timeline == state.timeline or (not event.timeline and state.timeline.startswith("0-"))


def _take_steps(state: State, member: Member, event: Progressed, before: float, now: float) -> None:
    """Count steps since the report `before`, but no more than time allows: a claimed counter may not pace the run
    by itself. If an interval began between the two reports, it gets its share of them; otherwise everybody's
    report would open a round of its own for the same steps.
    """
    if event.steps > member.steps:
        if member.stepped_at is None:
            member.mark = float(event.steps)
            member.steps = event.steps
        else:
            elapsed = max(0.0, now - before)
            gained = min(event.steps - member.steps, 1 + int(elapsed / state.spec.workers.min_step_s))
            member.steps += gained
            _observe(member, gained, now)
            if before < state.interval_at:
                member.mark += gained * (state.interval_at - before) / elapsed
        member.stepped_at = now
    member.step_s = event.step_s if member.observed_s is None else _credible(event.step_s, member.observed_s)


def _credible(claimed: float, observed: float) -> float:
    """A step time drives grace and deadline, so a claim counts only near to what the step counter shows."""
    return min(max(claimed, observed / CREDIBLE_FACTOR), observed * CREDIBLE_FACTOR)


def _observe(member: Member, gained: int, now: float) -> None:
    """Average time per step as the counter shows it; one long pause (a laptop asleep) counts as ten steps at most."""
    assert member.stepped_at is not None
    sample = (now - member.stepped_at) / gained
    if sample > 0:
        old = member.observed_s
        member.observed_s = average(old, sample if old is None else min(sample, 10 * old))


def _take_heldout(state: State, member: Member, event: Progressed) -> None:
    loss = event.heldout_loss
    assert loss is not None
    member.heldout_loss = loss
    if (event.measured_tokens, loss) in state.heldout:  # heartbeats repeat it, and there may be several evaluators
        return
    state.heldout.append((event.measured_tokens, loss))
    if len(state.heldout) > HELDOUT_KEPT:  # keep the first and thin the older half
        half = HELDOUT_KEPT // 2
        state.heldout[1:half] = state.heldout[1:half:2]


def check_books(state: State, member: Member) -> Iterator[Instruction]:
    """A fragment's equation holds once the member has read past its last outcome (so it can fail)."""
    for index in range(len(state.fragments)):
        if member.read < member.outcome_read.get(index, 0) or (member.incarnation, index) in state.unmarked:
            continue
        difference = imbalance(
            member.account,
            index,
            processed=member.processed,
            discarded=member.discarded[index],
            pending=member.pending[index],
        )
        noted = member.imbalances.get(index, 0)
        member.imbalances[index] = difference
        if difference and difference != noted:
            yield _mismatch(state, member, index, difference)


def _mismatch(state: State, member: Member, fragment: int, difference: int) -> Note:
    state.count("ledger mismatches")
    return Note(
        f"ledger of {member.name}, fragment {fragment}: {difference} of {member.processed} tokens missing",
        "ledger mismatch",
        {**_who(member), "fragment": fragment, "difference": difference},
    )


def leave(state: State, event: Left) -> Iterator[Instruction]:
    yield Consume("farewell read", event.sender, (event.entry,))
    member = find(state, event.incarnation, event.sender)
    if member is None or member.left:
        return
    if len(event.figures) == len(state.fragments):
        for index, (processed, discarded) in enumerate(event.figures):
            member.learn(index, processed, discarded)
    ranges.parted(member, event)
    member.left = True
    yield from go(state, member, f"{member.name} left" + (f": {event.reason}" if event.reason else ""))


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
    state.dirty.add(member.incarnation)
    for round_ in state.rounds.values():
        round_.called.discard(member.incarnation)
    yield Gone(reason, member.incarnation, member.name, member.left)
    yield from ask_for_init(state)


def close_finished(state: State) -> Iterator[Instruction]:
    """Close incarnations that are gone and whose every contribution has an outcome."""
    for member in list(state.members.values()):
        if not member.live and not _has_open_contribution(state, member.incarnation):
            yield from _close(state, member)


def _has_open_contribution(state: State, incarnation: int) -> bool:
    return any(key[0] == incarnation for key in state.fetching) or any(
        incarnation in f.in_hand or incarnation in f.refused for f in state.fragments
    )


def _close(state: State, member: Member) -> Iterator[Instruction]:
    anything_lost = not member.left
    for index, (processed, discarded) in enumerate(member.known):
        lost = left_over(member.account, index, processed=processed, discarded=discarded)
        anything_lost = anything_lost or lost > 0
        if lost > 0:
            member.account.add("lost", index, lost)
            yield Book("its incarnation ended", member.incarnation, index, "lost", lost)
        elif lost < 0:  # more was booked than it ever trained
            yield _mismatch(state, member, index, lost)
    yield from ranges.give_back(state, member, lost=anything_lost)
    sizes = state.sizes
    account = member.account
    final = Departed(
        incarnation=member.incarnation,
        name=member.name,
        role=member.role,
        processed=weighted([processed for processed, _ in member.known], sizes),
        applied=weighted(account.applied, sizes),
        rejected=weighted(account.rejected, sizes),
        discarded=weighted([discarded for _, discarded in member.known], sizes),
        lost=weighted(account.lost, sizes),
        left=member.left,
        train_s=member.train_s,
        rest_s=member.rest_s,
        life_s=member.life_s,
        bytes_sent=member.bytes_sent,
    )
    state.departed.append(final)
    state.departed_books = state.departed_books or [[0, 0, 0] for _ in sizes]
    for index, books in enumerate(state.departed_books):
        for column, booked in enumerate((account.applied[index], account.rejected[index], account.lost[index])):
            books[column] += booked
    del state.members[member.incarnation]
    state.dirty.discard(member.incarnation)
    state.removed.add(member.incarnation)
    shared = any(m.name == member.name for m in state.members.values())
    yield Close(
        f"{member.name}'s books are closed, {final.lost:.0f} tokens lost",
        member.incarnation,
        member.name,
        round(final.lost),
        tuple(zip(account.applied, account.rejected, account.lost, strict=True)),
        not shared,
    )


def average_step(state: State, member: Member) -> None:
    """The pacing worker's step time enters ξ_step."""
    if member.step_s > 0:
        state.averages.step_s = average(state.averages.step_s, member.step_s)


def _who(member: Member) -> dict[str, object]:
    return {"incarnation": member.incarnation, "name": member.name}
