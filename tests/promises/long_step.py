"""A task whose fourth step takes a minute, `tests.promises.long_step:LongStep`; it touches `marker` then."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

LONG_S = 60.0
QUICK_STEPS = 3
TOKENS = 4


class Four:
    """A batch of four tokens."""

    tokens = TOKENS

    def to(self, device: torch.device) -> Four:
        return self


class LongStep:
    def __init__(self, options: dict[str, Any]) -> None:
        self._marker = Path(options["marker"])
        self._steps = 0

    def build_model(self, device: torch.device | str = "cpu") -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def batches(self, seed: int, worker: str) -> Iterator[Four]:
        while True:
            yield Four()

    def loss(self, model: torch.nn.Module, batch: Four) -> torch.Tensor:
        self._steps += 1
        if self._steps > QUICK_STEPS:
            self._marker.touch()
            time.sleep(LONG_S)
        result: torch.Tensor = model(torch.ones(2, 3)).square().mean()
        return result

    def heldout_batches(self) -> list[Four]:
        return [Four()]

    def learning_rate(self, global_tokens: int) -> float:
        return 0.01
