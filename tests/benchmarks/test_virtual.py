"""The engine of `benchmarks.quality`: the product's core, learners and merge on a heap of events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from anabranch.merge.fragments import TensorSpec, plan_layout
from anabranch.model import Float32
from anabranch.orchestrator.core.events import TimerFired
from anabranch.orchestrator.core.instructions import Note
from anabranch.spec import RunSpec, parse_spec
from anabranch.workers.member.synthetic import NumpyStore
from benchmarks.virtual import World

TOKENS = 10  # per step
UNEQUAL = (1.0, 0.5, 0.25, 0.25)
END = 300.0  # steps of the fastest worker
MERGED = ("all arrived", "grace expired")


@dataclass
class Shrinking:
    """A worker whose every step pulls θ a little towards its own target."""

    store: NumpyStore
    target: float
    steps: int = 0

    def step(self, share_done: float) -> tuple[int, float]:
        assert 0 < share_done <= 1
        self.steps += 1
        for theta in self.store.theta:
            theta += np.float32(0.01) * (np.float32(self.target) - theta)
        return TOKENS, 1.0


def make_spec(**changes: Any) -> RunSpec:
    workers = {"codec": "fp32", "heartbeat_s": 1000.0, "adoption": changes.pop("adoption", "overwrite")}
    workers["rebase_above"] = changes.pop("rebase_above", 0.0)
    merge = {"matrix": "average", "outer_lr": 1.0, "outer_momentum": 0.0}
    return parse_spec({"rounds": {"fragments": 4, "inner_steps": 24, **changes}, "merge": merge, "workers": workers})


def run(spec: RunSpec, speeds: Sequence[float] = UNEQUAL) -> tuple[World, list[Shrinking]]:
    """A whole run with its farewell; worker i pulls towards 1 + i."""
    layout = plan_layout([TensorSpec(f"t{i}", (5,)) for i in range(8)], spec.rounds.fragments)
    world = World(spec, layout, [NumpyStore(layout).initial(i) for i in range(len(layout.fragments))], END + 1e-6)
    trainers = [Shrinking(NumpyStore(layout), 1.0 + i) for i in range(len(speeds))]
    for index, (speed, trainer) in enumerate(zip(speeds, trainers, strict=True)):
        world.add(f"w{index}", 1 / speed, trainer)
    world.run()
    world.finish()
    return world, trainers


@pytest.mark.parametrize("adoption", ["overwrite", "blend", "rebase"])
@pytest.mark.parametrize(
    "rounds", [{}, {"grace_factor": 0.0}, {"quorum": "all"}, {"fragments": 1}, {"in_flight": 1, "inner_steps": 100}]
)
def test_the_books_add_up(adoption: str, rounds: dict[str, Any]) -> None:
    world, _ = run(make_spec(adoption=adoption, **rounds))
    share = world.merged_share
    assert world.notes == []  # no ledger mismatch, nothing refused, nothing left over
    assert not world.state.verifying
    closing = world.engine.feed(TimerFired("sweep"))
    assert not [i for i in closing if isinstance(i, Note) and i.what == "ledger mismatch"]
    assert len(world.state.departed) == len(UNEQUAL)
    for books in world.state.departed:
        assert min(books.applied, books.rejected, books.discarded, books.lost) >= 0
        assert books.processed == pytest.approx(books.applied + books.rejected + books.discarded + books.lost)
    if adoption != "overwrite" and not rounds:
        assert share > 0.95  # what was not merged at first is merged later


def test_everybody_makes_the_steps_of_its_speed_and_the_model_follows() -> None:
    world, trainers = run(make_spec())
    assert [trainer.steps for trainer in trainers] == [300, 150, 75, 75]
    assert world.processed == 600 * TOKENS
    assert sum(world.state.counts.get(how, 0) for how in MERGED) >= 45  # one in 6 steps of the fastest
    mean = float(np.mean(np.concatenate(world.theta)))
    assert 1 < mean < 4  # among the targets: it began at 0


def test_the_same_run_has_the_same_bits() -> None:
    first, second = (run(make_spec(adoption="rebase"))[0] for _ in range(2))
    assert [theta.tobytes() for theta in first.theta] == [theta.tobytes() for theta in second.theta]
    assert first.state.counts == second.state.counts


@pytest.mark.parametrize("quorum", [1, "all"])
def test_one_worker_that_rebases_is_plain_training(quorum: int | str) -> None:
    """With an outer step of 1 the run adds nothing and takes nothing away: each step ends up in the model once."""
    world, [trainer] = run(make_spec(adoption="rebase", quorum=quorum), speeds=(1.0,))
    alone = Shrinking(NumpyStore(world.layout), 1.0)
    for step in range(trainer.steps):
        alone.step((step + 1) / trainer.steps)
    assert trainer.steps == 300
    for theta, expected in zip(world.theta, alone.store.theta, strict=True):
        np.testing.assert_allclose(theta, expected, rtol=1e-4, atol=1e-5)
    assert world.merged_share == 1.0


def test_a_version_is_adopted_by_everybody() -> None:
    world, trainers = run(make_spec(quorum="all"), speeds=(1.0, 1.0))
    versions = [fragment.version for fragment in world.state.fragments]
    assert min(versions) >= 10
    bases: list[list[Float32]] = [trainer.store.base for trainer in trainers]
    for left, right in zip(*bases, strict=True):
        np.testing.assert_array_equal(left, right)
