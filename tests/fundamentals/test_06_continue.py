"""Stopped and started again, a run continues with the same bits; its tape is in the run directory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from anabranch.orchestrator.tape import FILE_NAME
from anabranch.workers.member.synthetic import Pace
from tests.harness import bench, make_spec
from tests.wait import wait_until


async def test_a_second_synchronizer_continues(run_url: str, run_name: str, tmp_path: Path) -> None:
    spec = make_spec(run_name)
    async with bench(run_url, spec, directory=tmp_path) as run:
        run.add("first", Pace(step_s=0.003))
        await run.reach(2)
        await run.settle()
        thetas = [run.theta(p) for p in range(2)]
        versions, tokens = run.versions(), run.state.tokens
    async with bench(run_url, spec, directory=tmp_path) as again:
        assert again.versions() == versions
        assert again.state.tokens == tokens
        for p in range(2):
            np.testing.assert_array_equal(again.theta(p), thetas[p])
        await again.command("resume")
        again.add("second", Pace(step_s=0.003))
        await again.reach(max(versions) + 2)
        await wait_until(lambda: any(d.name == "first" for d in again.state.departed), "first's books are closed")
        assert again.state.counts.get("ledger mismatches", 0) == 0
        await again.settle()
    lines = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    merged = [(line["fragment"], line["version"]) for line in lines if line["kind"] == "merged"]
    assert len(merged) == len(set(merged)) == sum(again.versions()), "every version once, over both lives"


async def test_a_stopped_run_goes_on_when_it_is_started_again(run_url: str, run_name: str, tmp_path: Path) -> None:
    spec = make_spec(run_name)
    async with bench(run_url, spec, directory=tmp_path) as run:
        run.add("first", Pace(step_s=0.003))
        await run.reach(1)
        await run.command("stop")
        await wait_until(run.synchronizer.stopped.is_set, "the run has stopped")
        await wait_until(run.tasks["first"].done, "the worker has left by itself")
        versions = run.versions()
    async with bench(run_url, spec, directory=tmp_path) as again:
        again.add("first", Pace(step_s=0.003))
        await again.reach(max(versions) + 1)
