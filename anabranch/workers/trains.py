"""What a training loop sees of its part in a run, whether it trains alone or as one of many ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Protocol, Self, SupportsInt, TypeVar

import torch

from anabranch.workers.member.client import LEAVE_S
from anabranch.workers.shards import Shards

T = TypeVar("T")


class Trains(Protocol):
    """`Session` and `Island`, which say more about each."""

    def start(self) -> Self: ...

    def close(self, reason: str = "done", *, drain_s: float = LEAVE_S, contribute: bool = True) -> None: ...

    def abandon(self, reason: str, drain_s: float) -> bool: ...

    def hurry(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def batches(self, source: Shards[T] | Iterable[T], batch: int = 1) -> Iterator[T]: ...

    def step(self, tokens: SupportsInt, loss: torch.Tensor | float | None = None) -> None: ...

    def versions(self) -> list[int]: ...

    @property
    def stopped(self) -> str | None: ...

    @property
    def paused(self) -> bool: ...

    @property
    def tokens(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def warmth(self) -> float: ...
