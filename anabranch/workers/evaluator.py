"""The evaluator: follows the global model, never contributes, measures held-out loss."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from anabranch.errors import UsageError
from anabranch.workers.checked import whole
from anabranch.workers.session import Session
from anabranch.workers.tasks.base import Batch, Task

POLL_S = 0.1


@torch.no_grad()
def heldout_loss(task: Task, model: torch.nn.Module, batches: Sequence[Batch]) -> float:
    """Mean loss over `batches`, weighted by tokens, in nats per token. `UsageError` if there are none, or one whose
    `tokens` is no whole number of at least 1."""
    if not batches:
        raise UsageError(f"{type(task).__name__}.heldout_batches() gave no batch: there is nothing to measure on")
    model.eval()
    where = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    total, tokens = 0.0, 0
    for batch in batches:
        if where.type != "cpu":
            batch = batch.to(where)
        count = whole("tokens of a held-out batch", batch.tokens)
        total += float(task.loss(model, batch)) * count
        tokens += count
    model.train()
    return total / tokens


def evaluate(
    session: Session,
    task: Task,
    model: torch.nn.Module,
    *,
    every_s: float,
    ending: Callable[[], bool],
    on_measured: Callable[[], object] | None = None,
) -> None:
    """Measure, and then call `on_measured`, when versions changed: at most every `every_s`, at once in a pause."""
    batches = task.heldout_batches()
    measured: list[int] | None = None
    measured_at = -every_s
    while not session.stopped and not ending():
        session.poll(POLL_S)
        versions = session.versions()
        due = session.paused or time.monotonic() - measured_at >= every_s
        if versions != measured and min(versions) >= 0 and due:
            tokens = session.tokens
            session.report_heldout(heldout_loss(task, model, batches), tokens)
            if on_measured is not None:
                on_measured()
            measured, measured_at = versions, time.monotonic()
