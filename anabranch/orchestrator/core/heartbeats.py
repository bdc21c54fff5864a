"""What a heartbeat changes: steps that count, what a member holds, its half of the ledger, held-out losses."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.orchestrator.core import lately, membership, opening, outcomes, policies, ranges, timelines
from anabranch.orchestrator.core.grace import average
from anabranch.orchestrator.core.instructions import Instruction, Note
from anabranch.orchestrator.core.ledger import imbalance
from anabranch.orchestrator.core.state import HELDOUT_KEPT, Member, State
from anabranch.queue.messages import Progress

CREDIBLE_FACTOR = 4.0  # between a claimed step time and the observed one: reports are coalesced, averages lag


def progressed(state: State, sender: str, said: Progress, now: float) -> Iterator[Instruction]:
    member = yield from outcomes.speaker(state, said.incarnation, sender)
    if member is None:
        return
    fits = _fits(state, said)
    if fits and (reason := timelines.claim_of_newer(state, member, said)) is not None:
        yield from timelines.begin(state, reason)
    before, member.seen_at = member.seen_at, now
    if not member.live and not member.left:
        member.live = True
        state.changed.add(member.incarnation)
        why = f"{member.name} is back: its heartbeat resumed before its books were closed"
        yield Note(why, "back", membership.who(member))
    could = _able(member, state, now)
    _take_steps(state, member, said, before, now)
    if not state.born:
        yield from _look_for_a_lost_run(state, member, said)
    if fits:
        yield from _take_figures(state, member, said)
        if _able(member, state, now) != could:
            yield from opening.became_able(state, member, now)
    if said.heldout_loss is not None and not member.is_worker:
        _take_heldout(state, said.heldout_loss, said.measured_tokens)


def _able(member: Member, state: State, now: float) -> tuple[bool, list[int], list[bool]]:
    """What a round asks of a member; whatever changes of it may let one open."""
    return policies.advances(member, state, now), member.adopted, [tokens > 0 for tokens in member.held]


def _fits(state: State, said: Progress) -> bool:
    """Whether it speaks of as many fragments as there are."""
    count = len(state.fragments)
    return len(said.adopted) == len(said.held) == len(said.discarded) == len(said.pending) == count


def _look_for_a_lost_run(state: State, member: Member, said: Progress) -> Iterator[Instruction]:
    if not state.orphaned and any(version >= 0 for version in said.adopted):
        state.orphaned = True
        yield Note(
            f"{member.name} holds versions of this run, but the server holds none: it was emptied. "
            "No new model is begun; continue from a checkpoint",
            "orphaned",
            membership.who(member),
        )


def _take_figures(state: State, member: Member, said: Progress) -> Iterator[Instruction]:
    member.report = said
    for index, discarded in enumerate(said.discarded):
        member.learn(index, said.processed, discarded)
    if said.timeline == state.timeline:  # else it was told outcomes, and leased ranges, that are lost here
        member.adopted, member.held = said.adopted, said.held
        lately.look(member, state)
        yield from check_books(state, member)
        yield from ranges.reported(state, member, said.leased, said.leases)


def _take_steps(state: State, member: Member, said: Progress, before: float, now: float) -> None:
    """Count steps since the report `before`, but no more than time allows: a claimed counter may not pace the run
    by itself. If an interval began between the two reports, it gets its share of them; otherwise everybody's
    report would open a round of its own for the same steps.
    """
    if said.steps > member.steps:
        if member.stepped_at is None:
            member.mark = float(said.steps)
            member.steps = said.steps
        else:
            elapsed = max(0.0, now - before)
            gained = min(said.steps - member.steps, 1 + int(elapsed / state.spec.workers.min_step_s))
            member.steps += gained
            _observe(member, (now - member.stepped_at) / gained)
            if before < state.interval_at:
                member.mark += gained * (state.interval_at - before) / elapsed
        member.stepped_at = now
    member.step_s = said.step_s if member.observed_s is None else _credible(said.step_s, member.observed_s)


def _credible(claimed: float, observed: float) -> float:
    """A step time drives grace and deadline, so a claim counts only near to what the step counter shows."""
    return min(max(claimed, observed / CREDIBLE_FACTOR), observed * CREDIBLE_FACTOR)


def _observe(member: Member, sample: float) -> None:
    """Average time per step as the counter shows it; one long pause (a laptop asleep) counts as ten steps at most."""
    if sample > 0:
        old = member.observed_s
        member.observed_s = average(old, sample if old is None else min(sample, 10 * old))


def _take_heldout(state: State, loss: float, tokens: int) -> None:
    if (tokens, loss) in state.heldout:  # heartbeats repeat it, and there may be several evaluators
        return
    state.heldout.append((tokens, loss))
    if len(state.heldout) > HELDOUT_KEPT:  # keep the first and thin the older half
        half = HELDOUT_KEPT // 2
        state.heldout[1:half] = state.heldout[1:half:2]


def check_books(state: State, member: Member) -> Iterator[Instruction]:
    """A fragment's equation holds once the member has read past its last outcome (so it can fail)."""
    said = member.report
    assert said is not None
    for index in range(len(state.fragments)):
        if said.read < member.outcome_read.get(index, 0) or (member.incarnation, index) in state.unmarked:
            continue
        difference = imbalance(member.account, index, said.processed, said.discarded[index], said.pending[index])
        noted = member.imbalances.get(index, 0)
        if difference != noted:
            member.imbalances[index] = difference
            if difference:
                yield membership.mismatch(state, member, index, difference)
