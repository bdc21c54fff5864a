"""The evaluator: measures the global model whenever it changed, and never contributes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from anabranch.errors import UsageError
from anabranch.workers.evaluator import evaluate, heldout_loss


@dataclass(frozen=True)
class Part:
    tokens: int
    loss: float


class Model(torch.nn.Module):
    def forward(self) -> None:
        raise NotImplementedError


class Losses:
    """A task whose batches know their loss."""

    def __init__(self, *parts: Part) -> None:
        self.parts = list(parts)
        self.modes: list[tuple[bool, bool]] = []

    def heldout_batches(self) -> list[Part]:
        return self.parts

    def loss(self, model: torch.nn.Module, batch: Part) -> torch.Tensor:
        self.modes.append((model.training, torch.is_grad_enabled()))
        return torch.tensor(batch.loss)


@dataclass
class FakeSession:
    """Versions as a script; `stopped` once it is played."""

    script: list[list[int]]
    paused: bool = False
    tokens: int = 7
    reports: list[tuple[float, list[int], int]] = field(default_factory=list)
    at: int = -1

    @property
    def stopped(self) -> str | None:
        return "done" if self.at >= len(self.script) - 1 else None

    def poll(self, timeout_s: float) -> list[int]:
        self.at += 1
        return []

    def versions(self) -> list[int]:
        return self.script[self.at]

    def report_heldout(self, loss: float, tokens: int) -> None:
        self.reports.append((loss, self.versions(), tokens))


def play(session: Any, every_s: float = 0.0) -> list[list[int]]:
    task: Any = Losses(Part(1, 2.0))
    evaluate(session, task, Model(), every_s=every_s, ending=lambda: False)
    return [versions for _, versions, _ in session.reports]


def test_the_mean_is_weighted_by_tokens() -> None:
    task: Any = Losses(Part(10, 1.0), Part(30, 2.0))
    assert heldout_loss(task, Model(), task.parts) == pytest.approx(1.75)


def test_batches_that_cannot_be_weighed_are_refused() -> None:
    task: Any = Losses(Part(0, 1.0))
    with pytest.raises(UsageError, match=r"heldout_batches\(\) gave no batch"):
        heldout_loss(task, Model(), [])
    with pytest.raises(UsageError, match="tokens of a held-out batch = 0: allowed is a whole number, at least 1"):
        heldout_loss(task, Model(), task.parts)


def test_it_measures_without_gradients_and_in_evaluation_mode() -> None:
    task: Any = Losses(Part(1, 1.0))
    model = Model()
    heldout_loss(task, model, task.parts)
    assert task.modes == [(False, False)]
    assert model.training


def test_it_measures_when_versions_changed() -> None:
    assert play(FakeSession([[0, 0], [0, 0], [1, 0], [1, 0], [1, 1]])) == [[0, 0], [1, 0], [1, 1]]


def test_it_does_not_measure_before_everything_is_adopted() -> None:
    assert play(FakeSession([[-1, -1], [0, -1], [0, 0]])) == [[0, 0]]


def test_it_measures_at_most_so_often() -> None:
    assert play(FakeSession([[0], [1], [2], [3]]), every_s=3600.0) == [[0]]


def test_in_a_pause_it_measures_at_once() -> None:
    """What a pause leaves standing is what somebody waits to see measured."""
    assert play(FakeSession([[0], [1], [2]], paused=True), every_s=3600.0) == [[0], [1], [2]]


def test_it_ends_when_asked_to() -> None:
    session: Any = FakeSession([[0]] * 5)
    task: Any = Losses(Part(1, 2.0))
    evaluate(session, task, Model(), every_s=0.0, ending=lambda: True)
    assert session.reports == []
