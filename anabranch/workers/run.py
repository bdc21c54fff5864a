"""The worker and evaluator processes: build the run's task, join, train or measure until the run stops."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from anabranch.errors import MemberRefused, UsageError
from anabranch.loops import run_async
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec
from anabranch.workers.member.client import LEAVE_S, farewell_s, read_run_record
from anabranch.workers.member.identity import Identity, default_name
from anabranch.workers.tasks.named import SYNTHETIC, load_task

if TYPE_CHECKING:
    import torch

    from anabranch.workers.tasks.base import Task
    from anabranch.workers.trains import Trains

log = logging.getLogger("anabranch.worker")

_PLACES = ("model", "data")
SAMPLE_LENGTH = 64  # what an evaluator with a prompt shows, in the task's units
_NICENESS = 5  # an evaluator gives way to workers on the same machine


@dataclass(frozen=True)
class MemberOptions:
    """What `anabranch worker` and `anabranch evaluator` take."""

    name: str | None = None
    label: str = ""
    device: str = "auto"
    threads: int | None = None  # None: 1 on cpu
    duty: float = 1.0
    every_s: float = 5.0  # evaluator: seconds between two measurements
    task: str | None = None  # overrides the run's task: `module:Class`
    batch: str | None = None  # items per step, or `auto`; None: as the task says
    offload_base: bool = False  # keep the base on the host
    warm_start: bool = False  # take over a peer's optimizer state
    own_data: bool = False  # train on the task's own batches, not on what the run hands out
    task_options: dict[str, Any] = field(default_factory=dict)  # of this machine; they go before the run's
    prompt: str | None = None  # evaluator: text to continue after each measurement


class Ending:
    """What a signal asks for: before `joined` the process just ends (nothing is at stake yet), afterwards the worker
    finishes its step, sends its last contributions and says farewell, all within `drain_s`. A step that takes longer
    is dropped."""

    def __init__(self, drain_s: float = LEAVE_S) -> None:
        self.reason: str | None = None
        self.joined = False
        self.session: Trains | None = None  # what is left without its step when that takes too long
        self._drain_s = drain_s
        self._asked_at = 0.0

    def __call__(self) -> bool:
        return self.reason is not None

    @property
    def left_s(self) -> float:
        """What is left of the time to leave in."""
        spent_s = time.monotonic() - self._asked_at if self.reason is not None else 0.0
        return max(0.0, self._drain_s - spent_s)

    def ask(self, reason: str) -> None:
        """In the main thread, in the middle of whatever it does."""
        self._asked_at = time.monotonic()
        self.reason = reason
        if not self.joined:
            os._exit(0)
        # A thread: whatever the main one is doing, a signal handler may not take a lock that it holds.
        threading.Thread(target=self._drop_the_step, name="anabranch drain", daemon=True).start()

    def _drop_the_step(self) -> None:
        log.info("%s: finishing what is in flight, in at most %g s; again: at once", self.reason, self._drain_s)
        if (session := self.session) is None:
            return
        session.hurry()
        time.sleep(self._drain_s - farewell_s(self._drain_s))
        if session.abandon(self.reason or "", self.left_s):
            log.warning("the step was not done after %.1f s: left without it", self._drain_s)
            os._exit(0)


def run_worker(url: RunUrl, options: MemberOptions, ending: Ending) -> None:
    """Train until the run stops or `ending` is set."""
    Identity(options.name or default_name(), options.label)  # a bad name is refused before anything is waited for
    if not 0 < options.duty <= 1:
        raise UsageError(f"--duty {options.duty}: a share of time above 0 and at most 1")
    record = read_run_record(url)
    spec, other = record.spec, another_task(record.spec, options)
    if other is not None and record.layout is None:
        raise MemberRefused(
            f"run {url.run!r} has no model yet, and {other}: version 0 would be of another task, and everybody else "
            "refused. Start a worker of the run's own task first, or begin the run with this one (--set task.name=…)"
        )
    if SYNTHETIC in (options.task, spec.task.name):
        _run_synthetic(url, options, ending, can_init=other is None)
        return
    from anabranch.workers.fit import memory_needed
    from anabranch.workers.session import Session

    task, model, device = _build(spec, options)
    batch = _batch(task, model, options.batch)
    optimizer = task.build_optimizer(model)
    with Session(
        url,
        model,
        optimizer,
        name=options.name,
        label=options.label,
        device=device,
        duty=options.duty,
        offload_base=options.offload_base,
        warm_start=options.warm_start,
        can_init=other is None,
    ) as s:
        ending.session, ending.joined = s, True
        log.info("%s", memory_needed(model, spec.workers, optimizer, offload_base=options.offload_base))
        _train(s, task, model, optimizer, _source(s, task, spec.seed, batch, own=options.own_data), ending)
        s.close(ending.reason or s.stopped or "done", drain_s=ending.left_s)


def another_task(spec: RunSpec, options: MemberOptions) -> str | None:
    """How a member's own options make another task of the run's, in words; None if they do not. Where a machine keeps
    model and data is its own affair."""
    if options.task not in (None, spec.task.name):
        return f"its task is {spec.task.name!r}, this worker's {options.task!r}"
    for key, value in options.task_options.items():
        run_has = spec.task.options.get(key)
        if key not in _PLACES and (run_has or False) != (value or False):
            return f"its task.options.{key} is {run_has!r}, this worker's {value!r}"
    return None


def _batch(task: Task, model: torch.nn.Module, wish: str | None) -> int:
    """Items per step, before joining: probing must not look like a worker that is stuck."""
    from anabranch.workers.fit import choose_batch
    from anabranch.workers.tasks.base import SharedTask

    if isinstance(task, SharedTask):
        return choose_batch(task, model, wish)
    if wish is not None:
        raise UsageError(f"--batch {wish}: the task {type(task).__name__} has no shared dataset to take items from")
    return 0


def _source(session: Trains, task: Task, seed: int, batch: int, *, own: bool) -> Iterator[Any]:
    """What to train on: what the run hands out, if the task has a shared dataset."""
    from anabranch.workers.tasks.base import SharedTask

    if not own and isinstance(task, SharedTask):
        return session.batches(task.dataset(), batch)
    return session.batches(task.batches(seed, session.name))


def _train(
    session: Trains,
    task: Task,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Any],
    ending: Ending,
) -> None:
    from anabranch.workers.fit import Speedometer

    where, speed = next(model.parameters()).device, Speedometer()
    model.train()
    while not ending() and (batch := next(batches, None)) is not None:
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(session.tokens) * session.warmth
        loss = task.loss(model, batch.to(where))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        session.step(tokens=batch.tokens, loss=loss.detach())
        speed.step(batch.tokens)


def run_evaluator(url: RunUrl, options: MemberOptions, ending: Ending) -> None:
    """Measure held-out loss of the global model until the run stops or `ending` is set."""
    from anabranch.workers.evaluator import evaluate
    from anabranch.workers.session import Session

    name = options.name or default_name().replace("worker", "evaluator")
    Identity(name, options.label)
    spec = read_run_record(url).spec
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    task, model, device = _build(spec, options)
    with Session(url, model, name=name, label=options.label, role="evaluator", device=device) as session:
        ending.session, ending.joined = session, True
        show = None if options.prompt is None else partial(_show_sample, task, model, options.prompt)
        evaluate(session, task, model, every_s=options.every_s, ending=ending, on_measured=show)
        session.close(ending.reason or session.stopped or "done", drain_s=ending.left_s)


def _show_sample(task: Task, model: torch.nn.Module, prompt: str) -> None:
    from anabranch.workers.sample import continue_text

    log.info("the global model continues %r: %r", prompt, continue_text(task, model, prompt, SAMPLE_LENGTH))


def _build(spec: RunSpec, options: MemberOptions) -> tuple[Task, torch.nn.Module, str]:
    import torch

    from anabranch.workers.devices import choose_device, describe

    device = choose_device(options.device)
    if options.threads is not None or device.type == "cpu":
        torch.set_num_threads(options.threads or 1)
    task = load_task(spec.task, options.task, options.task_options)
    torch.manual_seed(spec.seed)
    return task, task.build_model(device), describe(device)


def _run_synthetic(url: RunUrl, options: MemberOptions, ending: Ending, *, can_init: bool) -> None:
    from anabranch.workers.member.synthetic import SyntheticWorker

    def joined() -> None:
        ending.joined = True

    worker = SyntheticWorker(url, options.name or default_name(), can_init=can_init)
    run_async(worker.run(ending, drain_s=lambda: ending.left_s, on_joined=joined))
