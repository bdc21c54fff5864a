"""Whether a run fits on a device: memory by use, training speed, and the batch that makes the most of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from anabranch.errors import UsageError
from anabranch.spec import WorkersSpec
from anabranch.workers.muon import Muon
from anabranch.workers.tasks.base import SharedTask
from anabranch.workers.tensors import trainable

log = logging.getLogger("anabranch.worker")

BASE_BYTES = 4  # per parameter, whatever the policy: float32
STATE_BYTES = 8  # per parameter: two float32 averages of Adam and its relatives
PROBE_S = 0.5  # per batch size
LONGEST_S = 60.0  # for all of them
GAIN = 1.05  # a batch twice as large is worth it only if it is so much faster
_MEASURED_STEPS = 20
_OUT_OF_MEMORY = (MemoryError, torch.OutOfMemoryError)


def memory_needed(
    model: torch.nn.Module,
    settings: WorkersSpec,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    offload_base: bool = False,
) -> str:
    """One line: the model's device memory in MB by use, and what taking part adds to it per trained parameter.

    Activations are not in it: they depend on the batch. Optimizer state is Muon's, if it is one, else that of Adam.
    """
    trained = sum(parameter.numel() for _, parameter in trainable(model))
    held = sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])
    gradients = sum(parameter.numel() * parameter.element_size() for _, parameter in trainable(model))
    state = optimizer.state_bytes if isinstance(optimizer, Muon) else STATE_BYTES * trained
    extra = 0 if offload_base else BASE_BYTES
    where = "on the host" if offload_base else "on the device"
    kept = ""
    if settings.adoption == "rebase":
        sent = {"fp32": 4, "bf16": 2}[settings.codec]
        kept = f", and {sent} on the host for what is in flight"
    return (
        f"{trained:,} parameters are trained together: model {_mb(held)}, gradients {_mb(gradients)}, optimizer "
        f"about {_mb(state)}; taking part adds {extra} bytes per parameter "
        f"({_mb(extra * trained)}): the base of adoption {settings.adoption!r} is {where}{kept}"
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:,.1f} MB"


class Speedometer:
    """Says once how fast training goes."""

    def __init__(self) -> None:
        self._steps = self._tokens = 0
        self._began = 0.0

    def step(self, tokens: int) -> None:
        """After a step; the first one (compilation, warm-up) does not count."""
        self._steps += 1
        if self._steps == 1:
            self._began = time.monotonic()
        elif self._steps <= _MEASURED_STEPS + 1:
            self._tokens += tokens
            if self._steps == _MEASURED_STEPS + 1:
                spent_s = time.monotonic() - self._began
                log.info("training at %s tokens/s", f"{self._tokens / max(spent_s, 1e-9):,.0f}")


def choose_batch(task: SharedTask, model: torch.nn.Module, wish: str | None) -> int:
    """Items per step: what the task says, a number, or `auto`: the size with the most tokens/s of those that fit.

    Probing leaves the model as it was. `UsageError` for anything else.
    """
    if wish is None:
        return task.batch
    if wish.isdecimal() and int(wish) > 0:
        return int(wish)
    if wish != "auto":
        raise UsageError(f"--batch {wish!r}: a number of items per step, or auto")
    kept = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    with torch.random.fork_rng():
        best, speed = _best(_speeds(task, model))
    model.load_state_dict(kept)
    model.zero_grad(set_to_none=True)
    log.info("--batch auto: %d items per step, %s tokens/s", best, f"{speed:,.0f}")
    return best


def _best(speeds: Iterator[tuple[int, float]]) -> tuple[int, float]:
    """A larger batch only if it is clearly faster: at the same speed a smaller one learns more per token."""
    best: tuple[int, float] | None = None
    for batch, speed in speeds:
        if best is None or speed > GAIN * best[1]:
            best = batch, speed
        elif batch >= 4 * best[0]:
            break
    if best is None:
        raise UsageError("--batch auto: not even one item fits into this device's memory")
    return best


def _speeds(task: SharedTask, model: torch.nn.Module) -> Iterator[tuple[int, float]]:
    """(items, tokens/s) for 1, 2, 4 … items, until something does not fit."""
    optimizer = task.build_optimizer(model)
    shards = task.dataset()
    device = next(model.parameters()).device
    deadline = time.monotonic() + LONGEST_S
    items = 1
    while items <= len(shards) and time.monotonic() < deadline:
        try:
            batch = shards.batch(np.arange(items), 0).to(device)
            _step(task, model, optimizer, batch)  # warm-up
            began, steps = time.monotonic(), 0
            while steps == 0 or time.monotonic() - began < PROBE_S:
                _step(task, model, optimizer, batch)
                steps += 1
            yield items, steps * batch.tokens / (time.monotonic() - began)
        except _OUT_OF_MEMORY:
            log.info("--batch auto: %d items do not fit", items)
            model.zero_grad(set_to_none=True)
            return
        items *= 2


def _step(task: SharedTask, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    loss = task.loss(model, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    float(loss.detach())  # waits for the device
