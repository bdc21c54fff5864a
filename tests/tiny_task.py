"""A training task of one's own, as small as one can be: named to workers by its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class TinyBatch:
    tokens = 4

    def to(self, device: torch.device) -> TinyBatch:
        return self


class TinyTask:
    """A task of one's own: a few numbers that shrink."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def build_model(self, device: torch.device | str = "cpu") -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def batches(self, seed: int, worker: str) -> Iterator[TinyBatch]:
        while True:
            yield TinyBatch()

    def loss(self, model: torch.nn.Module, batch: TinyBatch) -> torch.Tensor:
        result: torch.Tensor = model(torch.ones(2, 3)).square().mean()
        return result

    def heldout_batches(self) -> list[TinyBatch]:
        return [TinyBatch()]

    def learning_rate(self, global_tokens: int) -> float:
        return 0.01
