"""Whose work counts: which share of a member's tokens was merged over the last few cycles, and why not more.

Every heartbeat may close a *span*: of one cycle of rounds at least, and of enough time for some of the member's
tokens to get their outcome. The figures are those of the last `SPANS` of these, so a worker whose steps outlast many
cycles is judged by its last steps, and a fast one by its last cycles. Nothing is known before the first span is over:
after joining, and when a new leader begins.
"""

from __future__ import annotations

from typing import Literal

from anabranch.orchestrator.core.ledger import weighted
from anabranch.orchestrator.core.state import Member, State, keep

SPANS = 8
LOW = 0.5  # less than that merged is said, and not green

Part = Literal["merged", "rejected", "discarded"]
PARTS: tuple[Part, ...] = ("merged", "rejected", "discarded")


def look(member: Member, state: State) -> None:
    """After a report that fits the run's fragments: maybe a span is over."""
    lately, merges = member.lately, state.merges
    if lately.ends and merges - lately.merges < len(state.fragments):
        return
    account, sizes = member.account, state.sizes
    figures = [weighted(tokens, sizes) for tokens in (account.applied, account.rejected, member.discarded)]
    lately.merges = merges
    if lately.ends and sum(figures) < sum(lately.ends[-1]):  # a timeline took back what had been booked
        lately.ends.clear()
    if not lately.ends or sum(figures) > sum(lately.ends[-1]):
        keep(lately.ends, figures, SPANS + 1)


def shares(member: Member) -> dict[Part, float] | None:
    """What became of the tokens that had their outcome lately; the parts add up to 1. None: not known yet."""
    ends = member.lately.ends
    if len(ends) < 2:
        return None
    gained = [max(0.0, new - old) for new, old in zip(ends[-1], ends[0], strict=True)]
    return {part: tokens / sum(gained) for part, tokens in zip(PARTS, gained, strict=True)}


def complaint(member: Member, adoption: str) -> str | None:
    """One sentence with the setting that changes it, if most of its work is in vain."""
    parts = shares(member)
    if parts is None or parts["merged"] >= LOW or not member.live:
        return None
    of = f"of {member.name}'s tokens {parts['merged']:.0%} were merged lately"
    if parts["rejected"] > parts["discarded"]:
        return (
            f"{of}: {parts['rejected']:.0%} came after their round had closed or were refused, as the tape says; "
            "a larger rounds.grace_factor waits longer"
        )
    remedy = "a smaller workers.rebase_above keeps it"
    if adoption == "overwrite":
        remedy = 'workers.adoption = "rebase" with workers.rebase_above = 0.1 keeps it'
    return f"{of}: {parts['discarded']:.0%} were discarded when a newer version took the place of that work; {remedy}"
