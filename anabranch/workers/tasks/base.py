"""What a training loop needs to know about a task: the model, its data, its loss, its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import torch

from anabranch.workers.batches import TokenBatch as TokenBatch

if TYPE_CHECKING:
    from anabranch.workers.shards import Shards


class Batch(Protocol):
    """The data of one step, whatever it is made of; `tokens` is how many predictions its loss averages over."""

    @property
    def tokens(self) -> int: ...

    def to(self, device: torch.device) -> Self: ...


class Task(Protocol):
    """One kind of training job. Every member of a run builds it from the same options in the run's spec.

    Batches are `Batch`es; only the task itself looks inside them.
    """

    def build_model(self, device: torch.device | str = "cpu") -> torch.nn.Module:
        """A freshly initialised model. The caller seeds torch; only version 0 of a run keeps these values."""

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """The inner optimizer. The loop sets each group's `lr` from `learning_rate` before every step."""

    def batches(self, seed: int, worker: str) -> Iterator[Any]:
        """Endless training batches on the CPU: repeatable for (seed, worker), different for every worker."""

    def loss(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        """Mean loss in nats per token, a scalar; `batch` is on the model's device."""

    def heldout_batches(self) -> list[Any]:
        """Fixed batches, on the CPU, of text that no worker trains on."""

    def learning_rate(self, global_tokens: int) -> float:
        """The inner learning rate once the whole run has merged this many tokens."""


@runtime_checkable
class SharedTask(Task, Protocol):
    """A task whose data every worker has a copy of: the run hands it out in ranges, each item once per epoch.

    Without `dataset` (or with `--own-data`) a worker trains on its own `batches`.
    """

    @property
    def batch(self) -> int:
        """Items per step."""
        ...

    def dataset(self) -> Shards[Any]:
        """The shared dataset; its `batch(indices, epoch)` gives what `loss` takes."""
        ...


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warm-up, then a cosine from `peak` to `floor`, then `floor`. Lengths are in global tokens."""

    peak: float
    floor: float
    warmup_tokens: int
    total_tokens: int

    def at(self, global_tokens: int) -> float:
        """The learning rate after `global_tokens`; never zero, or a run could not leave its first token."""
        if global_tokens < self.warmup_tokens:
            return self.peak * max(0.05, global_tokens / self.warmup_tokens)
        span = max(1, self.total_tokens - self.warmup_tokens)
        progress = min(1.0, (global_tokens - self.warmup_tokens) / span)
        return self.floor + (self.peak - self.floor) * 0.5 * (1 + math.cos(math.pi * progress))
