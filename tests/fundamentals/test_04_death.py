"""A worker process dies by SIGKILL: rounds go on, it leaves the live list, its unmerged tokens are lost."""

from __future__ import annotations

import os
import signal
import time

from anabranch.workers.synthetic import Pace
from tests.harness import bench, make_spec, process
from tests.wait import wait_until

HEARTBEAT_S = 0.5


async def test_kill_minus_nine(run_url: str, run_name: str) -> None:
    spec = make_spec(run_name, workers={"heartbeat_s": HEARTBEAT_S, "codec": "fp32"})
    async with bench(run_url, spec) as run:
        run.add("survivor", Pace(step_s=0.01))
        await run.reach(1)
        with process("worker", run_url, "--name", "victim") as victim:
            await wait_until(
                lambda: any(m.name == "victim" and m.last_round for m in run.state.members.values()),
                "the victim takes part",
                timeout_s=20,
            )
            os.kill(victim.pid, signal.SIGKILL)
            killed_at, merged = time.monotonic(), sum(run.versions())
            await wait_until(lambda: bool(run.tape("gone")), "the victim is gone")
            assert time.monotonic() - killed_at <= 3 * HEARTBEAT_S + 1.0  # 1.0: a loaded test machine
        await wait_until(lambda: bool(run.state.departed), "its books are closed")
        books = run.state.departed[0]
        assert books.name == "victim"
        assert books.lost > 0
        assert books.processed == books.applied + books.rejected + books.discarded + books.lost
        await wait_until(lambda: sum(run.versions()) > merged + 4, "rounds go on")
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_restarted_under_its_name_it_takes_part_again(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("steady")
        run.add("flaky")
        await wait_until(
            lambda: any(m.name == "flaky" and m.last_round for m in run.state.members.values()), "flaky takes part"
        )
        run.kill("flaky")
        await wait_until(lambda: any(d.name == "flaky" for d in run.state.departed), "flaky's books are closed")
        run.add("flaky")
        await wait_until(
            lambda: any(m.name == "flaky" and m.last_round for m in run.state.members.values()),
            "flaky takes part again",
        )
