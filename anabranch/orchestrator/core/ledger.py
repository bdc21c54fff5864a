"""The synchronizer's side of the ledger: applied, rejected and lost tokens per (incarnation, fragment).

`processed = applied + rejected + discarded + lost + pending`, in whole tokens, for every fragment: every token
trains all of them. Workers report processed, discarded and pending; only the synchronizer books the other three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Column = Literal["applied", "rejected", "lost"]
COLUMNS: tuple[Column, ...] = ("applied", "rejected", "lost")


@dataclass
class Account:
    """One incarnation's booked tokens, one item per fragment."""

    applied: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    @classmethod
    def empty(cls, fragments: int) -> Account:
        return cls([0] * fragments, [0] * fragments, [0] * fragments)

    def add(self, column: Column, fragment: int, tokens: int) -> None:
        column_of(self, column)[fragment] += tokens

    def settled(self, fragment: int) -> int:
        """Tokens of one fragment that have their outcome."""
        return self.applied[fragment] + self.rejected[fragment] + self.lost[fragment]


def column_of(account: Account, column: Column) -> list[int]:
    if column == "applied":
        return account.applied
    return account.rejected if column == "rejected" else account.lost


def imbalance(account: Account, fragment: int, *, processed: int, discarded: int, pending: int) -> int:
    """processed minus everything it should be made of; zero when the books agree."""
    return processed - discarded - pending - account.settled(fragment)


def left_over(account: Account, fragment: int, *, processed: int, discarded: int) -> int:
    """Tokens a dead incarnation took with it: trained, not discarded, without an outcome."""
    return processed - discarded - account.settled(fragment)


def weighted(figures: Sequence[int], sizes: Sequence[int]) -> float:
    """Parameter-weighted mean over fragments: one figure per worker, in tokens."""
    total = sum(sizes)
    return sum(f * s for f, s in zip(figures, sizes, strict=True)) / total if total else 0.0
