"""What a training loop needs to know about a task: the model, its data, its loss, its learning rate."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import torch

from anabranch.workers.batches import TokenBatch as TokenBatch
from anabranch.workers.muon import Muon
from anabranch.workers.shards import Shards
from anabranch.workers.tasks.options import require


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

    def dataset(self) -> Shards[Any]:
        """The shared dataset; its `batch(indices, epoch)` gives what `loss` takes."""


def generator_of(seed: int, worker: str) -> np.random.Generator:
    """For a worker's own batches: repeatable for (seed, worker), different for every worker."""
    digest = hashlib.sha256(f"{seed}:{worker}".encode()).digest()
    return np.random.default_rng(np.frombuffer(digest, dtype=np.uint32))


def continued(
    logits: Callable[[list[int]], torch.Tensor], tokens: list[int], length: int, temperature: float, seed: int
) -> list[int]:
    """`length` tokens after `tokens`. `logits` gives those of the next one, [vocabulary], for all tokens so far.

    The same seed gives the same ones on one machine. At temperature 0 the likeliest is always taken.
    """
    generator = torch.Generator().manual_seed(seed)
    text = list(tokens)
    for _ in range(length):
        scores = logits(text).float().cpu()
        if temperature <= 0:
            text.append(int(scores.argmax()))
        else:
            chances = torch.softmax(scores / temperature, dim=0)
            text.append(int(torch.multinomial(chances, 1, generator=generator)))
    return text[len(tokens) :]


OPTIMIZERS = ("adamw", "muon")


@dataclass(frozen=True)
class Recipe:
    """Options that the built-in tasks share: the optimizer, a cosine schedule over the tokens the run has merged."""

    optimizer: str  # `muon`: hidden matrices by Muon, the rest by AdamW
    learning_rate: float
    final_learning_rate: float
    warmup_tokens: int
    total_tokens: int  # merged by the whole run, when the schedule reaches its end
    beta1: float
    beta2: float
    weight_decay: float

    def __post_init__(self) -> None:
        require(self.optimizer in OPTIMIZERS, "optimizer", self.optimizer, f"one of {', '.join(OPTIMIZERS)}")
        for name in ("learning_rate", "final_learning_rate"):
            require(0 < getattr(self, name) <= 1, name, getattr(self, name), "above 0, at most 1")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0, below 1")
        for name in ("warmup_tokens", "weight_decay"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")

    def rate(self, global_tokens: int) -> float:
        """The learning rate once the run has merged so many tokens."""
        lengths = self.warmup_tokens, self.total_tokens
        return CosineSchedule(self.learning_rate, self.final_learning_rate, *lengths).at(global_tokens)

    def build_optimizer(self, model: torch.nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
        """The one chosen, over what is trained; biases and norms' gains are not decayed. `fused` is AdamW's."""
        rate, betas = self.rate(0), (self.beta1, self.beta2)
        if self.optimizer == "muon":
            return Muon.of(model, rate, weight_decay=self.weight_decay, betas=betas)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused)


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
