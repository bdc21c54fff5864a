"""The synchronizer's side of the ledger: applied, rejected and lost tokens per (incarnation, fragment).

`processed = applied + rejected + discarded + lost + pending`, in whole tokens, for every fragment: every token
trains all of them. Workers report processed, discarded and pending; only the synchronizer books the other three.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

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
        self.column(column)[fragment] += tokens

    def column(self, column: Column) -> list[int]:
        figures: list[int] = getattr(self, column)
        return figures

    def weighted(self, sizes: Sequence[int]) -> dict[str, Any]:
        """Each column as one figure, in tokens."""
        return {column: weighted(self.column(column), sizes) for column in COLUMNS}

    def settled(self, fragment: int) -> int:
        """Tokens of one fragment that have their outcome."""
        return self.applied[fragment] + self.rejected[fragment] + self.lost[fragment]


def imbalance(account: Account, fragment: int, processed: int, discarded: int, pending: int = 0) -> int:
    """processed minus everything it should be made of; zero when the books agree. Of a dead incarnation: the tokens
    it took with it."""
    return processed - discarded - pending - account.settled(fragment)


def weighted(figures: Sequence[int], sizes: Sequence[int]) -> float:
    """Parameter-weighted mean over fragments: one figure per worker, in tokens."""
    total = sum(sizes)
    return sum(f * s for f, s in zip(figures, sizes, strict=True)) / total if total else 0.0
