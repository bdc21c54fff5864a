"""Quality at equal tokens and at equal time: held-out loss of decoupled training against synchronous training.

    python -m benchmarks.quality --all       # every configuration that is not in docs/results/quality.jsonl yet
    python -m benchmarks.quality --report    # table in docs/experiments.md and docs/quality.svg from that file

Virtual time (`benchmarks/virtual.py`): one unit is a step of the fastest worker. The learning rate falls over the
share of the run that is done, the same way for everybody. Seeds are paired: a seed decides the initial weights and
which windows of the text each worker sees, in which order.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from anabranch.spec import RunSpec, parse_spec
from anabranch.workers.evaluator import heldout_loss
from anabranch.workers.tasks.base import CosineSchedule, TokenBatch
from anabranch.workers.tasks.gpt import GPT, GPTTask
from anabranch.workers.tensors import layout_of
from anabranch.workers.torch_store import TorchStore
from benchmarks import machine
from benchmarks.levers import ForgetfulStore, LeverWorld, parse
from benchmarks.quality_plot import plot
from benchmarks.quality_report import machine_of, rewrite, table, targets
from benchmarks.virtual import World

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results" / "quality.jsonl"
STEPS = 3000  # of the fastest worker
POINTS = 20  # of a curve
AT_FIRST = "later=24,from=0.25"  # H is what the configuration says for a quarter of the run, then 24
MODEL = {"layers": 3, "width": 64, "heads": 4, "lookback": 4, "context": 64}  # 24 tensors, for P = 24
UNEQUAL = {1: (1.0,), 2: (1.0, 0.5), 4: (1.0, 0.5, 0.25, 0.25), 8: (1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125)}


@dataclass(frozen=True)
class Config:
    """One run. `speeds` are relative to the fastest worker."""

    config: str = "decoupled"
    speeds: tuple[float, ...] = UNEQUAL[4]
    H: int = 24
    P: int = 24
    K: int | str = 1
    grace: float = 0.8
    tau: int = 2
    merge: str = "radial"
    embedding: str = "radial"
    adoption: str = "overwrite"
    alpha: float = 0.5
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    codec: str = "bf16"
    inner_lr: float = 3e-3
    floor: float = 0.1  # of the learning rate at the end, as a share of its peak
    batch: int = 2  # windows of 64 bytes per step of a worker
    lever: str = ""  # trials: benchmarks/levers.py
    seed: int = 0
    steps: int = STEPS

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    def spec(self) -> RunSpec:
        return parse_spec(
            {
                "rounds": {
                    "fragments": self.P,
                    "inner_steps": self.H,
                    "in_flight": self.tau,
                    "quorum": self.K,
                    "grace_factor": self.grace,
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
                    "blend_alpha": self.alpha,
                    "codec": self.codec,
                    "heartbeat_s": 1000.0,
                },
                "seed": self.seed,
            }
        )


class Training:
    """A model, its optimizer and its data; one or several workers' batches per step."""

    def __init__(self, config: Config, names: list[str], state: dict[str, torch.Tensor]) -> None:
        self.rate_factor = 1.0
        levers = parse(config.lever)
        betas: dict[str, Any] = {name: levers[name] for name in ("beta1", "beta2") if name in levers}
        self.task = GPTTask({**MODEL, "batch": config.batch, **betas})
        self.model: GPT = self.task.build_model()
        self.model.load_state_dict(state)
        self._schedule = CosineSchedule(config.inner_lr, config.inner_lr * config.floor, 50, 1000)
        self._optimizer = self.task.build_optimizer(self.model)
        self._data: list[Iterator[TokenBatch]] = [self.task.batches(config.seed, name) for name in names]
        layout = layout_of(config.spec(), self.model, {})
        self.store = TorchStore(self.model, layout)
        if "forget" in levers:
            self.store = ForgetfulStore(self.model, layout, self._optimizer, levers["forget"])

    def step(self, share_done: float) -> tuple[int, float]:
        """One optimizer step on a batch of each worker's data; tokens and loss."""
        rate = self.rate_factor * self._schedule.at(int(1000 * share_done))
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        batches = [next(data) for data in self._data]
        whole = batches[0]
        if len(batches) > 1:
            inputs, targets = (torch.cat([getattr(b, n) for b in batches]) for n in ("inputs", "targets"))
            whole = TokenBatch(inputs, targets)
        loss = self.task.loss(self.model, whole)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return whole.tokens, float(loss.detach())


Curve = list[tuple[int, float, float]]  # tokens, virtual time, held-out loss


def initial(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: value.clone() for name, value in GPTTask(MODEL).build_model().state_dict().items()}


def synchronous(config: Config, show: Callable[[float, float], None]) -> dict[str, Any]:
    """Every step a mean gradient of all workers' batches; a step lasts as long as the slowest worker's.

    `single`: one process of the fastest worker's speed computes all batches itself, so the losses are the same and
    the time is the number of workers. `fastest_alone`: the fastest worker's own batches, for as long as the others.
    """
    count = len(config.speeds)
    names = ["w0"] if config.config == "fastest_alone" else [f"w{i}" for i in range(count)]
    step_time = {"sync_dp": 1 / min(config.speeds), "single": float(count), "fastest_alone": 1.0}[config.config]
    total = config.steps if config.config == "fastest_alone" else round(config.steps * sum(config.speeds) / count)
    training = Training(config, names, initial(config.seed))
    heldout = training.task.heldout_batches()
    curve: Curve = []
    tokens = 0
    for step in range(1, total + 1):
        tokens += training.step(step / total)[0]
        if step % max(1, total // POINTS) == 0 or step == total:
            curve.append((tokens, step * step_time, heldout_loss(training.task, training.model, heldout)))
            show(step / total, curve[-1][2])
    return {"tokens": tokens, "virtual_time": total * step_time, "curve": curve, "merged_share": 1.0}


def decoupled(config: Config, show: Callable[[float, float], None]) -> dict[str, Any]:
    """The product's core, learners and merge. What is measured is the global model."""
    state = initial(config.seed)
    trainers = [Training(config, [f"w{i}"], state) for i in range(len(config.speeds))]
    judge = Training(config, [], state)
    heldout = judge.task.heldout_batches()
    layout = layout_of(config.spec(), judge.model, {})
    curve: Curve = []

    def watch(world: World) -> None:
        for index, theta in enumerate(world.judged()):
            judge.store.load(index, theta)
        curve.append((world.processed, world.now, heldout_loss(judge.task, judge.model, heldout)))
        show(world.now / world.end, curve[-1][2])

    theta = [judge.store.initial(fragment.index) for fragment in layout.fragments]
    end = float(config.steps)
    world = (LeverWorld if config.lever else World)(config.spec(), layout, theta, end + 1e-6, watch, end / POINTS)
    levers = parse(config.lever)
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
    rounds = world.state.counts
    return {
        "tokens": world.processed,
        "virtual_time": round(world.now, 3),
        "curve": curve,
        "merged_share": world.merged_share,
        "rounds": dict(sorted(rounds.items())),
    }


def run(config: Config, show: Callable[[float, float], None] = lambda share, loss: None) -> dict[str, Any]:
    """One JSON-able record."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    result = decoupled(config, show) if config.config == "decoupled" else synchronous(config, show)
    record = {**asdict(config), "workers": len(config.speeds), **result}
    record["heldout_loss"] = record["curve"][-1][2]
    record["seconds"] = round(time.perf_counter() - began, 1)
    record |= {"processor": machine.processor(), "cores": machine.cores(), "key": config.key}
    return record


def done(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def of_twin(config: Config, records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """`single` has sync_dp's gradients (the mean over all batches), so only its time differs."""
    twin = replace(config, config="sync_dp").key
    found = next((record for record in records if record["key"] == twin), None)
    if config.config != "single" or found is None:
        return None
    factor = len(config.speeds) * min(config.speeds)
    curve = [[tokens, factor * now, loss] for tokens, now, loss in found["curve"]]
    return {
        **found,
        "config": "single",
        "curve": curve,
        "virtual_time": factor * found["virtual_time"],
        "seconds": 0.0,
        "key": config.key,
    }


def run_all(configs: list[Config], path: Path, processes: int = 1) -> None:
    """Run what is missing, `processes` at a time, and keep each as soon as it is there."""
    known = {record["key"] for record in done(path)}
    missing = [config for config in configs if config.key not in known]
    runs = [config for config in missing if not _has_twin(config, configs)]
    began = time.monotonic()
    for number, (config, record) in enumerate(_finished(runs, processes), start=1):
        _keep(record, path)
        left_s = (time.monotonic() - began) / number * (len(runs) - number)
        what = f"{json.dumps(differs(config))} {record['heldout_loss']:.4f}"
        sys.stderr.write(f"\r{number}/{len(runs)} {what}, {left_s / 60:.0f} min left\n")
    for config in missing:
        if config not in runs and (twin := of_twin(config, done(path))) is not None:
            _keep(twin, path)


def _finished(configs: list[Config], processes: int) -> Iterator[tuple[Config, dict[str, Any]]]:
    """Each run as soon as it is done."""
    if processes == 1:
        yield from ((config, run(config, _show)) for config in configs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run, config): config for config in configs}
        for finished in as_completed(waiting):
            yield waiting[finished], finished.result()


def _has_twin(config: Config, configs: list[Config]) -> bool:
    return config.config == "single" and replace(config, config="sync_dp") in configs


def _keep(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _show(share: float, loss: float) -> None:
    sys.stderr.write(f"\r{share:4.0%}: {loss:.4f}")


def official() -> list[Config]:
    """The runs of docs/experiments.md, what matters most first: one factor at a time around the base, ≤ 60."""
    base = Config()

    def seeds(count: int, **changes: Any) -> list[Config]:
        return [replace(base, **changes, seed=seed) for seed in range(count)]

    def pair(count: int, speeds: tuple[float, ...]) -> list[Config]:
        return [c for name in ("sync_dp", "decoupled") for c in seeds(count, config=name, speeds=speeds)]

    return [
        *(replace(c, config=name) for c in seeds(3) for name in ("sync_dp", "decoupled", "fastest_alone", "single")),
        *seeds(3, steps=STEPS * 12 // 10),  # 0.6 of sync_dp's time
        *(c for quorum in ("all", 1) for c in seeds(3, K=quorum, grace=0.0)),
        *seeds(3, H=8, P=8, lever=AT_FIRST),
        *seeds(3, H=8, P=8, lever=AT_FIRST, steps=STEPS * 12 // 10),
        *seeds(3, adoption="rebase"),
        *seeds(2, adoption="blend"),
        *seeds(2, merge="average", embedding="average"),
        *seeds(2, embedding="average"),
        *seeds(2, outer_lr=0.7, outer_momentum=0.5),
        *seeds(2, H=8, P=8),  # with P = 24 no fragment could keep its turn
        *seeds(2, H=100),
        *(c for fragments in (1, 8) for c in seeds(2, P=fragments)),
        *pair(1, UNEQUAL[8]),
        *pair(1, UNEQUAL[2]),
        *(c for count in (4, 8, 2) for c in pair(1, (1.0,) * count)),
        *(
            c
            for lr, momentum in ((0.7, 0.0), (1.0, 0.3), (0.7, 0.9))
            for c in seeds(1, outer_lr=lr, outer_momentum=momentum)
        ),
        *seeds(1, tau=1),
    ]


def report(path: Path) -> None:
    """The table and the plot."""
    base = json.loads(Config().key)
    place = {config.key: number for number, config in enumerate(official())}
    records = sorted(
        (record for record in done(path) if record["key"] in place), key=lambda record: place[record["key"]]
    )
    if not records:
        raise SystemExit(f"no official run in {path} yet: start them with --all")
    text = "\n\n".join([machine_of(records), targets(records, base), table(records, base)])
    rewrite(DOCS / "experiments.md", text)
    (DOCS / "quality.svg").write_text(plot(records, base))
    sys.stdout.write(text + "\n")


def differs(config: Config) -> dict[str, Any]:
    """What is not as in the base configuration."""
    base = asdict(Config())
    return {key: value for key, value in asdict(config).items() if value != base[key]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="tried", action="append", default=[], metavar="KEY=VALUE,...")
    parser.add_argument("--all", action="store_true", help="the official runs that are missing")
    parser.add_argument("--report", action="store_true", help="table and plot from what is there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    tried = [replace(Config(), **_pairs(item)) for item in options.tried]
    configs = tried + (official() if options.all else [])
    run_all(configs, options.out, options.processes)
    if options.report:
        report(options.out)


def _pairs(text: str) -> dict[str, Any]:
    pairs = dict(item.split("=", 1) for item in text.split(";") if item)
    values = {key: json.loads(value) if value[:1] in '0123456789["' else value for key, value in pairs.items()}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


if __name__ == "__main__":
    main()
