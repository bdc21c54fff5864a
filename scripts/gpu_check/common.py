"""What all checks share: their sizes, how they fail, and how time is taken on a device that works ahead."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Figures = dict[str, Any]


class CheckFailed(Exception):
    """A check that ran and did not find what it should; `figures` are what it measured all the same."""

    def __init__(self, reason: str, figures: Figures | None = None) -> None:
        super().__init__(reason)
        self.figures = figures or {}


@dataclass(frozen=True)
class Scale:
    """How large the checks are."""

    live: Mapping[str, Any]  # options of the task `gpt` in the live runs
    fragments: int
    inner_steps: int
    rounds: int  # merged before a live run has shown enough
    train_s: float  # at least
    window_s: float  # over which tokens/s are taken
    sizes: Mapping[str, Mapping[str, Any]]  # options of the task `gpt` by the name of the size
    repeats: int
    elements: int  # of the vector that codecs are measured with


# Batches of 4,096 tokens: small for a large GPU, so what the boundaries cost is not hidden by long steps.
_FULL = {"context": 256, "batch": 16, "learning_rate": 1e-3, "warmup_tokens": 200_000}
FULL = Scale(
    live={**_FULL, "layers": 7, "width": 384, "heads": 6},
    fragments=8,
    inner_steps=96,
    rounds=24,
    train_s=15.0,
    window_s=8.0,
    sizes={
        "1M": _FULL,
        "30M": {**_FULL, "layers": 10, "width": 512, "heads": 8},
        "124M": {**_FULL, "layers": 15, "width": 832, "heads": 13},
    },
    repeats=15,
    elements=1 << 24,
)

_TINY = {"context": 32, "batch": 4, "layers": 1, "width": 32, "heads": 2, "lookback": 2, "warmup_tokens": 1000}
QUICK = Scale(
    live=_TINY,
    fragments=4,
    inner_steps=48,
    rounds=4,
    train_s=1.0,
    window_s=1.5,
    sizes={"tiny": _TINY},
    repeats=3,
    elements=1 << 18,
)


@dataclass(frozen=True)
class Bench:
    """Where and how large; checks begin nothing new after `deadline` (monotonic)."""

    device: torch.device
    scale: Scale
    deadline: float

    @property
    def left_s(self) -> float:
        return max(0.0, self.deadline - time.monotonic())

    def wait(self) -> None:
        """Until the device has done what it was given: a GPU works behind the thread that feeds it."""
        if self.device.type == "mps":
            torch.mps.synchronize()
        elif self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize(self.device)

    def seconds(self, work: Callable[[], object]) -> float:
        """How long `work` takes on an idle device, until the device is idle again."""
        self.wait()
        began = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - began

    def median_s(self, work: Callable[[], object]) -> float:
        """Of `repeats` runs, after one that does not count: allocations and compilation are in it."""
        self.seconds(work)
        return statistics.median(self.seconds(work) for _ in range(self.scale.repeats))


def ratio(above: float, below: float) -> float:
    return round(above / max(below, 1e-12), 4)
