"""Work that is carried over to a newer base gives the same bits as a plain loop: a fast worker, and one at a tenth of
its speed whose steps seldom begin on the base that they are sent on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from anabranch.merge.average import MergeRules, merge_fragment
from anabranch.merge.fragments import Layout
from anabranch.merge.outer import OuterOptimizer
from anabranch.merge.weights import token_weight
from anabranch.model import Float32
from anabranch.spec import RunSpec
from anabranch.workers.member.synthetic import NumpyStore, Pace, SyntheticOptions
from tests.harness import bench, make_spec, same_bits

ROUNDS = 20
WORKERS = {"fast": 0.003, "slow": 0.03}  # seconds per step
TOKENS = 64


class Logged(NumpyStore):
    """A store that keeps what happened to it, in order."""

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, seed=1)
        self.log: list[tuple[str, int, bytes]] = []

    def step(self, number: int, worker: int) -> None:
        for fragment, theta in enumerate(self.theta):
            theta -= pull(worker, fragment, number, theta.size)
        self.log.append(("step", number, b""))

    def delta(self, fragment: int) -> Float32:
        self.log.append(("delta", fragment, b""))
        return super().delta(fragment)

    def load(self, fragment: int, theta: Float32) -> None:
        self.log.append(("load", fragment, theta.tobytes()))
        super().load(fragment, theta)

    def rebase(self, fragment: int, theta: Float32, applied: Float32 | None) -> bool:
        self.log.append(("rebase", fragment, theta.tobytes()))
        return super().rebase(fragment, theta, applied)


def pull(worker: int, fragment: int, step: int, size: int) -> Float32:
    """What one step subtracts from the parameters, wherever they are."""
    return (np.random.default_rng([worker, fragment, step]).standard_normal(size) * 0.1).astype(np.float32)


@dataclass
class PlainFragment:
    """One worker's fragment: what it holds, and what it offered of it on its base."""

    theta: Float32
    base: Float32
    version: int = 0
    tokens: int = 0  # since the base, with those that were carried to it
    carried: int = 0  # those
    offered: dict[tuple[int, int], Float32] = field(default_factory=dict)  # by base and tokens


class PlainRun:
    """The whole algorithm in one loop: what workers did in their order, and what the tape says was merged."""

    def __init__(self, layout: Layout, start: list[Float32], spec: RunSpec) -> None:
        self.layout, self.spec = layout, spec
        self.versions = [[theta] for theta in start]
        self.buffers: list[Float32 | None] = [None] * len(start)
        self.merged: dict[tuple[int, int, str], int] = {}  # tokens, by fragment, version and worker
        self.carried: set[tuple[int, int, str]] = set()  # fragment, base and worker, of offers with carried work
        self.held = {name: [PlainFragment(t.copy(), t) for t in start] for name in WORKERS}

    def step(self, name: str, number: int) -> None:
        for index, held in enumerate(self.held[name]):
            held.theta = held.theta - pull([*WORKERS].index(name), index, number, held.theta.size)
            held.tokens += TOKENS

    def offer(self, name: str, index: int) -> None:
        held = self.held[name][index]
        held.offered[held.version, held.tokens] = held.base - held.theta
        if held.carried:
            self.carried.add((index, held.version, name))

    def adopt(self, name: str, index: int, theta: bytes, keep: bool) -> bool:
        """False if no version of these bits was merged so far."""
        held = self.held[name][index]
        found = [v for v, t in enumerate(self.versions[index]) if t.tobytes() == theta]
        if not found:
            return False
        [version] = found
        new = self.versions[index][version]
        taken = self.merged.get((index, held.version + 1, name), 0)
        if keep:
            held.theta = held.theta - held.base + new
            if taken:
                held.theta = held.theta + held.offered[held.version, taken]
        else:
            held.theta = new.copy()
        held.carried = held.tokens - taken if keep else 0
        held.base, held.version, held.tokens = new, version, held.carried
        return True

    def merge(self, index: int, version: int, parts: list[tuple[str, int, int]]) -> bool:
        """False while something is missing that was merged."""
        offers = [self.held[name][index].offered.get((version - 1, tokens)) for name, tokens, _ in parts]
        if len(self.versions[index]) != version or any(offer is None for offer in offers):
            return False
        weights = [token_weight(tokens, steps) for _, tokens, steps in parts]
        deltas = [offer for offer in offers if offer is not None]
        gradient = merge_fragment(self.layout.fragments[index], deltas, weights, MergeRules())
        assert gradient is not None
        outer = OuterOptimizer(self.spec.merge.outer_lr, self.spec.merge.outer_momentum)
        theta, self.buffers[index] = outer.step(self.versions[index][-1], self.buffers[index], gradient)
        self.versions[index].append(theta)
        for name, tokens, _ in parts:
            self.merged[index, version, name] = tokens
        return True

    def replay(self, logs: dict[str, list[tuple[str, int, bytes]]], merges: list[tuple[int, int, Any]]) -> None:
        """Everything in an order that gives each what it needs; what was never merged may be left over."""
        left = {name: list(reversed(log)) for name, log in logs.items()}
        merges = sorted(merges, reverse=True)
        moved = True
        while moved:
            moved = False
            for name, log in left.items():
                while log and self._do(name, *log[-1]):
                    log.pop()
                    moved = True
            for item in list(merges):
                if self.merge(*item):
                    merges.remove(item)
                    moved = True
        assert not merges, f"never came to {merges[-1]}"

    def _do(self, name: str, what: str, number: int, theta: bytes) -> bool:
        if what == "step":
            self.step(name, number)
        elif what == "delta":
            self.offer(name, number)
        else:
            return self.adopt(name, number, theta, what == "rebase")
        return True


@pytest.mark.parametrize("above", [0.0, 0.1], ids=["all of it", "by default"])
async def test_bits_equal_a_plain_loop(run_url: str, run_name: str, above: float) -> None:
    spec = make_spec(run_name, workers={"adoption": "rebase", "rebase_above": above})
    layout = SyntheticOptions.parse(spec.task.options).layout(spec)
    stores: dict[str, Logged] = {}

    def store(name: str, lay: Layout) -> Logged:
        stores[name] = Logged(lay)
        return stores[name]

    async with bench(run_url, spec) as run:
        for worker, (name, step_s) in enumerate(WORKERS.items()):
            pace = Pace(step_s=step_s, tokens=TOKENS)
            run.add(name, pace, store=partial(store, name), train=partial(Logged.step, worker=worker))
        await run.reach(0)
        start = [run.theta(p).copy() for p in range(2)]
        await run.reach(ROUNDS)
        await run.settle()
        names = {m.incarnation: m.name for m in run.state.members.values()}
        merges = [
            (m["fragment"], m["version"], sorted((names[i], tokens, steps) for i, tokens, steps, _ in m["weights"]))
            for m in run.tape("merged")
        ]
        plain = PlainRun(layout, start, spec)
        plain.replay({name: list(own.log) for name, own in stores.items()}, merges)
        for index, version in enumerate(run.versions()):
            await same_bits(run, index, plain.versions[index][version], plain.buffers[index])
        parts = [(index, version - 1, name) for index, version, found in merges for name, *_ in found]
        assert any(part in plain.carried and part[2] == "slow" for part in parts), "carried work was merged"
        assert run.state.counts.get("ledger mismatches", 0) == 0
