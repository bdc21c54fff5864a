"""A task whose fourth step takes minutes, `tests.promises.long_step:LongStep`; it touches `marker` then."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from tests.tiny_task import TinyBatch, TinyTask

LONG_S = 240.0
QUICK_STEPS = 3
TOKENS = TinyBatch.tokens


class LongStep(TinyTask):
    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self._marker = Path(options["marker"])
        self._steps = 0

    def loss(self, model: torch.nn.Module, batch: TinyBatch) -> torch.Tensor:
        self._steps += 1
        if self._steps > QUICK_STEPS:
            self._marker.touch()
            time.sleep(LONG_S)
        return super().loss(model, batch)
