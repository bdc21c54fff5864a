"""Version 0 comes from one place, once; a fresh random model never becomes the global one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from anabranch.model import unflatten
from anabranch.workers.member.synthetic import NumpyStore, Pace, SyntheticOptions
from tests.harness import bench, life_of, make_spec
from tests.wait import wait_until


async def test_version_0_is_the_asked_workers_model(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        first = run.add("first", Pace(steps=0), store=lambda layout: NumpyStore(layout, seed=7))
        await run.reach(0)
        assert first.store is not None
        expected = NumpyStore(life_of(first.client)._layout, seed=7)
        for p in range(2):
            np.testing.assert_array_equal(run.theta(p), expected.theta[p])


async def test_a_model_of_few_tensors_has_as_many_fragments(run_url: str, run_name: str) -> None:
    spec = make_spec(run_name, rounds={"fragments": 8}, task={"options": {"tensors": 3, "size": 8}})
    async with bench(run_url, spec) as run:
        run.add("w")
        await run.reach(2)
        assert len(run.versions()) == 3
        assert run.state.spec.rounds.fragments == 8, "the definition stays what it was"
        assert run.state.pacing.interval_steps == spec.rounds.inner_steps / 3
        [born] = run.tape("born")
        assert born["reason"].endswith("(rounds.fragments = 8, but the model has only 3 tensors)")
    async with bench(run_url, spec) as again:
        again.add("again")
        await again.reach(4)


async def test_version_0_from_a_file(run_url: str, run_name: str, tmp_path: Path) -> None:
    spec = make_spec(run_name)
    layout = SyntheticOptions.parse(spec.task.options).layout(spec)
    weights = NumpyStore(layout, seed=3)
    save_file(unflatten(layout, weights.theta), tmp_path / "weights.safetensors")
    async with bench(run_url, spec, init=tmp_path / "weights.safetensors") as run:
        await run.reach(0)
        for p in range(2):
            np.testing.assert_array_equal(run.theta(p), weights.theta[p])
        run.add("joiner", Pace(step_s=0.005), store=lambda layout: NumpyStore(layout, seed=99))
        await run.reach(1)


async def test_a_joiner_adopts_before_it_trains(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("first", Pace(step_s=0.005))
        await run.reach(1)
        run.kill("first")
        await wait_until(lambda: bool(run.state.departed), "nobody is left")
        await run.settle()
        before = [run.theta(p).copy() for p in range(2)]
        stranger = run.add("stranger", Pace(steps=0), store=lambda layout: NumpyStore(layout, seed=12345))
        await wait_until(stranger.ready.is_set, "the stranger has adopted everything")
        assert stranger.store is not None
        for p in range(2):
            np.testing.assert_array_equal(stranger.store.theta[p], before[p])
            np.testing.assert_array_equal(run.theta(p), before[p])


async def test_an_emptied_server_is_not_a_birth(run_url: str, run_name: str, tmp_path: Path) -> None:
    spec = make_spec(run_name)
    async with bench(run_url, spec, directory=tmp_path) as run:
        run.add("first", Pace(step_s=0.005))
        await run.reach(1)
        await run.command("checkpoint")
        await wait_until(
            lambda: run.synchronizer.checkpoints is not None and run.synchronizer.checkpoints.latest is not None,
            "a checkpoint is written",
        )
        await run.settle()
        tokens = run.state.tokens
    await run.forget_everything()
    async with bench(run_url, spec, directory=tmp_path) as again:
        assert again.state.born
        assert 0 < again.state.tokens <= tokens
        assert again.state.timeline.startswith("1-")
