"""One run of the quality benchmark: what is configured, and the held-out loss of it and of its baselines.

Virtual time (`benchmarks/virtual.py`): one unit is a step of the fastest worker. The learning rate falls over the
share of the run that is done, the same way for everybody. Seeds are paired: a seed decides the initial weights and
which windows of the text each worker sees, in which order. Baselines of the same tokens:

- `sync_dp`: every step the mean gradient of everybody's batch; a step lasts as long as the slowest worker's.
- `sync_balanced`: every step the mean gradient of batches in proportion to speed, so that nobody waits; with
  communication for free, a bound that nobody reaches over slow links.
- `single`: one process of the fastest worker's speed computes the combined batch itself.

And of the same time: `fastest_alone`, the fastest worker with its own batches, without the others' tokens.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from anabranch.spec import RunSpec, parse_spec
from anabranch.workers.evaluator import heldout_loss
from anabranch.workers.tasks.base import CosineSchedule, TokenBatch
from anabranch.workers.tasks.gpt import GPT, GPTConfig, GPTTask
from anabranch.workers.tensors import layout_of
from anabranch.workers.torch_store import TorchStore
from benchmarks import machine
from benchmarks.levers import ForgetfulStore, LeverWorld, parse
from benchmarks.virtual import World

STEPS = 3000  # of the fastest worker
POINTS = 10  # of a curve
HELDOUT_WINDOWS = 2048
AT_ONCE = 128  # held-out windows
SIZES: dict[str, dict[str, Any]] = {
    "small": {"layers": 3, "width": 64, "heads": 4, "lookback": 4, "context": 64},  # 24 tensors of 7 sizes
    "large": {"layers": 4, "width": 144, "heads": 4, "lookback": 4, "context": 64},  # 5 times the parameters
}
UNEQUAL = {1: (1.0,), 2: (1.0, 0.5), 4: (1.0, 0.5, 0.25, 0.25), 8: (1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125)}
SHIPPED = parse_spec({})

Curve = list[tuple[int, float, float]]  # tokens, virtual time, held-out loss
Show = Callable[[float, float], None]


@dataclass(frozen=True)
class Config:
    """One run; what is not said is as shipped. `speeds` are relative to the fastest worker."""

    config: str = "decoupled"
    speeds: tuple[float, ...] = UNEQUAL[4]
    H: int = SHIPPED.rounds.inner_steps
    H_later: int | None = SHIPPED.rounds.later_inner_steps
    H_later_from: float = 0.25  # share of the run's tokens
    P: int = SHIPPED.rounds.fragments
    K: int | str = SHIPPED.rounds.quorum
    grace: float = SHIPPED.rounds.grace_factor
    tau: int = SHIPPED.rounds.in_flight
    merge: str = SHIPPED.merge.matrix
    embedding: str = SHIPPED.merge.embedding
    adoption: str = SHIPPED.workers.adoption
    rebase_above: float = SHIPPED.workers.rebase_above
    alpha: float = SHIPPED.workers.blend_alpha
    outer_lr: float = SHIPPED.merge.outer_lr
    outer_momentum: float = SHIPPED.merge.outer_momentum
    codec: str = SHIPPED.workers.codec
    inner: str = GPTConfig.optimizer
    inner_lr: float = 3e-3
    floor: float = 0.1  # of the learning rate at the end, as a share of its peak
    batch: int = 2  # windows of 64 bytes per step of a worker
    batches: tuple[int, ...] = ()  # of each worker, where they differ
    size: str = "small"
    lever: str = ""  # trials: benchmarks/levers.py
    seed: int = 0
    steps: int = STEPS

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def windows(self) -> tuple[int, ...]:
        """Per step, worker by worker."""
        return self.batches or (self.batch,) * len(self.speeds)

    @property
    def per_unit(self) -> float:
        """Windows of everybody per unit of time."""
        return sum(speed * windows for speed, windows in zip(self.speeds, self.windows, strict=True))

    @property
    def is_shipped(self) -> bool:
        """Whether it runs with the default settings."""
        plain = Config(
            self.config, self.speeds, inner_lr=self.inner_lr, floor=self.floor, batch=self.batch, seed=self.seed,
            batches=self.batches, size=self.size, steps=self.steps,
        )  # fmt: skip
        return self == plain

    def spec(self) -> RunSpec:
        context = SIZES[self.size]["context"]
        planned = self.steps * self.per_unit * context
        later = {"later_inner_steps": self.H_later, "later_from_tokens": int(self.H_later_from * planned)}
        return parse_spec(
            {
                "rounds": {
                    "fragments": self.P,
                    "inner_steps": self.H,
                    "in_flight": self.tau,
                    "quorum": self.K,
                    "grace_factor": self.grace,
                    **(later if self.H_later else {}),
                },
                "merge": {
                    "matrix": self.merge,
                    "embedding": self.embedding,
                    "outer_lr": self.outer_lr,
                    "outer_momentum": self.outer_momentum,
                    "embedding_tensors": ["embeddings*"],
                },
                "workers": {
                    "adoption": self.adoption,
                    "rebase_above": self.rebase_above,
                    "blend_alpha": self.alpha,
                    "codec": self.codec,
                    "heartbeat_s": 1000.0,
                },
                "seed": self.seed,
            }
        )


class Training:
    """A model, its optimizer, and streams of windows that are drawn from at rates of their own."""

    def __init__(self, config: Config, rates: Mapping[str, float], state: dict[str, torch.Tensor]) -> None:
        """`rates`: windows per step from each worker's stream; a fraction comes every few steps."""
        self.rate_factor = 1.0
        levers = parse(config.lever)
        betas: dict[str, Any] = {name: levers[name] for name in ("beta1", "beta2") if name in levers}
        self.task = GPTTask({**SIZES[config.size], "batch": 1, "optimizer": config.inner, **betas})
        self.model: GPT = self.task.build_model()
        self.model.load_state_dict(state)
        self._schedule = CosineSchedule(config.inner_lr, config.inner_lr * config.floor, 50, 1000)
        self.optimizer = self.task.build_optimizer(self.model)
        for group in self.optimizer.param_groups:
            group["momentum"] = levers.get("mu", group.get("momentum"))
        self._steps = 0
        self._streams: list[tuple[float, Iterator[TokenBatch]]] = [
            (rate, self.task.batches(config.seed, name)) for name, rate in rates.items()
        ]
        layout = layout_of(config.spec(), self.model, {})
        self.store = TorchStore(self.model, layout)
        if "forget" in levers:
            self.store = ForgetfulStore(self.model, layout, self.optimizer, levers["forget"])

    def step(self, share_done: float) -> tuple[int, float]:
        """One optimizer step; tokens and loss."""
        rate = self.rate_factor * self._schedule.at(int(1000 * share_done))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        batch = self._draw()
        loss = self.task.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return batch.tokens, float(loss.detach())

    def _draw(self) -> TokenBatch:
        drawn = [
            next(stream)
            for rate, stream in self._streams
            for _ in range(int((self._steps + 1) * rate + 1e-9) - int(self._steps * rate + 1e-9))
        ]
        self._steps += 1
        inputs, targets = (torch.cat([getattr(b, n) for b in drawn]) for n in ("inputs", "targets"))
        return TokenBatch(inputs, targets)

    def judge(self, heldout: list[TokenBatch]) -> float:
        return heldout_loss(self.task, self.model, heldout)


def initial(seed: int, size: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in GPTTask(SIZES[size]).build_model().state_dict().items()}


def judged_on(task: GPTTask) -> list[TokenBatch]:
    """More windows than the task's own: two runs' losses then differ by chance by 0.08 %, instead of 0.4."""
    windows = task._corpus().heldout_windows(HELDOUT_WINDOWS, task.config.context)
    return [TokenBatch.of(windows[at : at + AT_ONCE]) for at in range(0, HELDOUT_WINDOWS, AT_ONCE)]


def synchronous(config: Config, show: Show) -> dict[str, Any]:
    """One model, one batch of all workers' windows per step."""
    names, windows = [f"w{i}" for i in range(len(config.speeds))], config.windows
    rates = dict(zip(names, map(float, windows), strict=True))
    step_time = {"sync_dp": 1 / min(config.speeds), "single": sum(windows) / windows[0]}.get(config.config, 1.0)
    total = round(config.steps * config.per_unit / sum(windows))
    if config.config == "sync_balanced":
        rates = {n: s * w for n, s, w in zip(names, config.speeds, windows, strict=True)}
        total = config.steps
    if config.config == "fastest_alone":
        rates, total = {names[0]: float(windows[0])}, config.steps
    training = Training(config, rates, initial(config.seed, config.size))
    heldout = judged_on(training.task)
    curve: Curve = []
    tokens = 0
    for step in range(1, total + 1):
        tokens += training.step(step / total)[0]
        if step % max(1, total // POINTS) == 0 or step == total:
            curve.append((tokens, step * step_time, training.judge(heldout)))
            show(step / total, curve[-1][2])
    return {"tokens": tokens, "virtual_time": total * step_time, "curve": curve, "merged_share": 1.0}


def decoupled(config: Config, show: Show) -> dict[str, Any]:
    """The product's core, learners and merge. What is measured is the global model."""
    state, levers = initial(config.seed, config.size), parse(config.lever)
    trainers = [Training(config, {f"w{i}": windows}, state) for i, windows in enumerate(config.windows)]
    judge = Training(config, {}, state)
    heldout = judged_on(judge.task)
    layout = layout_of(config.spec(), judge.model, {})
    curve: Curve = []

    def watch(world: World) -> None:
        for index, theta in enumerate(world.judged()):
            judge.store.load(index, theta)
        curve.append((world.processed, world.now, judge.judge(heldout)))
        show(world.now / world.end, curve[-1][2])

    theta = [judge.store.initial(fragment.index) for fragment in layout.fragments]
    end = float(config.steps)
    world = (LeverWorld if config.lever else World)(config.spec(), layout, theta, end + 1e-6, watch, end / POINTS)
    if isinstance(world, LeverWorld):
        world.levers = levers
    for index, (speed, trainer) in enumerate(zip(config.speeds, trainers, strict=True)):
        trainer.rate_factor = speed ** -levers.get("slow", 0.0)
        world.add(f"w{index}", 1 / speed, trainer)
    world.run()
    world.finish()
    watch(world)
    if world.notes:
        raise AssertionError(f"the books do not add up: {world.notes[:3]}")
    return {
        "tokens": world.processed,
        "virtual_time": round(world.now, 3),
        "curve": curve,
        "merged_share": world.merged_share,
        "merged_shares": [round(world.share_of(worker), 4) for worker in world.workers],
        "rounds": dict(sorted(world.state.counts.items())),
    }


def run(config: Config, show: Show = lambda share, loss: None) -> dict[str, Any]:
    """One JSON-able record."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    result = decoupled(config, show) if config.config == "decoupled" else synchronous(config, show)
    record = {**asdict(config), "workers": len(config.speeds), **result, "default": config.is_shipped}
    record |= {"staleness": 0, "heldout_windows": HELDOUT_WINDOWS, "heldout_loss": record["curve"][-1][2]}
    record["seconds"] = round(time.perf_counter() - began, 1)
    record |= {"processor": machine.processor(), "cores": machine.cores(), "key": config.key}
    return record


def twin_of(config: Config) -> Config | None:
    """Another configuration with the same gradients: `single` computes the mean over all batches, too, so only its
    time differs from sync_dp's; where nobody is slower, `sync_balanced` is `sync_dp`; the fastest worker alone has no
    use of the others' speeds."""
    twin = config
    if config.config == "single" or (config.config == "sync_balanced" and set(config.speeds) == {1.0}):
        twin = replace(config, config="sync_dp")
    elif config.config == "fastest_alone":
        twin = replace(config, speeds=Config.speeds, batches=(), batch=config.windows[0])
    return None if twin == config else twin


def of_twin(config: Config, records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Its record from the one of its twin, if that is there."""
    if (twin := twin_of(config)) is None:
        return None
    if (found := next((record for record in records if record["key"] == twin.key), None)) is None:
        return None
    factor = sum(config.windows) / config.windows[0] * min(config.speeds) if config.config == "single" else 1.0
    return {
        **found,
        **asdict(config),
        "workers": len(config.speeds),
        "default": config.is_shipped,
        "curve": [[tokens, factor * now, loss] for tokens, now, loss in found["curve"]],
        "virtual_time": factor * found["virtual_time"],
        "seconds": 0.0,
        "key": config.key,
    }
