"""Any machine at any time: joining within a cycle, staying live while busy, stuck, slow lines, many at once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anabranch
from anabranch.operate import status
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.fundamentals.slow_link import slow_line
from tests.harness import Bench, bench, make_spec
from tests.wait import wait_until

LONG_STEP = 4  # heartbeats: expiry comes after three
# Three heartbeats are the longest any process of these tests may be kept waiting by a busy machine.
HEARTBEAT_S = 1.5
PATIENT_S = 10.0  # heartbeat of workers of whom there are too many for this machine


def rounds_merged(run: Bench) -> int:
    return sum(run.versions())


def takes_part(run: Bench, name: str) -> bool:
    return any(m.name == name and m.last_round for m in run.state.members.values())


async def condition(run: Bench, name: str) -> str | None:
    members: list[dict[str, Any]] = (await status(run.url)).get("members", [])
    return next((m["condition"] for m in members if m["name"] == name), None)


async def test_a_joiner_takes_part_within_one_cycle(run_url: str, run_name: str) -> None:
    """H inner steps of the pacing worker after it has adopted, every fragment was merged with it."""
    spec = make_spec(run_name, rounds={"fragments": 4, "inner_steps": 40})
    async with bench(run_url, spec) as run:
        run.add("old", Pace(step_s=0.02))
        await run.reach(1)
        joiner = run.add("new", Pace(step_s=0.02))
        await wait_until(joiner.ready.is_set, "it has adopted")
        begun = run.workers["old"].step

        def merged_with_it() -> set[int]:
            mine = joiner.client.incarnation
            return {e["fragment"] for e in run.tape("merged") if any(weight[0] == mine for weight in e["weights"])}

        await wait_until(lambda: len(merged_with_it()) == 4, "every fragment was merged with the joiner")
        # One cycle, and another for rounds that were open when it came and for a loaded machine.
        assert run.workers["old"].step - begun <= 2 * 40


class Loop:
    """A training loop in a thread of its own that does what it is told."""

    def __init__(self, run: Bench, name: str) -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        self.session = anabranch.join(run.url, model, name=name)
        self._work: Callable[[], object] = lambda: time.sleep(0.01)
        self._over = threading.Event()
        self.released = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        while not self._over.is_set():
            self._work()
            self.session.step(4, loss=1.0)

    def do(self, work: Callable[[], object]) -> None:
        self._work = work

    def end(self) -> None:
        self._over.set()
        self.released.set()
        self._thread.join(20.0)
        self.session.close()


def plain(run: str) -> Any:
    return make_spec(run, task={"name": "x:Y", "options": {}}, workers={"heartbeat_s": HEARTBEAT_S})


async def test_a_worker_busy_in_one_long_step_stays_live(run_url: str, run_name: str) -> None:
    """A step of Python code that lasts many heartbeats and never lets go by itself."""
    done = threading.Event()

    def compute() -> None:
        deadline = time.monotonic() + LONG_STEP * HEARTBEAT_S
        while time.monotonic() < deadline:
            sum(range(1000))
        done.set()

    async with bench(run_url, plain(run_name)) as run:
        loop = await asyncio.to_thread(Loop, run, "busy")
        try:
            await run.reach(1)
            loop.do(compute)
            await wait_until(done.is_set, "the long step is over")
            assert not run.tape("gone")
            loop.do(lambda: time.sleep(0.01))
            await run.reach(max(run.versions()) + 1)
        finally:
            await asyncio.to_thread(loop.end)


async def test_a_worker_that_hangs_is_shown_as_stuck_and_not_waited_for(run_url: str, run_name: str) -> None:
    async with bench(run_url, plain(run_name)) as run:
        other, hung = await asyncio.to_thread(Loop, run, "other"), await asyncio.to_thread(Loop, run, "hung")
        try:
            await wait_until(lambda: takes_part(run, "hung") and takes_part(run, "other"), "both take part")
            hung.do(lambda: hung.released.wait(60.0))

            async def is_stuck() -> bool:
                return await condition(run, "hung") == "stuck"

            await wait_until(is_stuck, "it is shown as stuck")
            before, number = rounds_merged(run), max(e["round"] for e in run.tape("opened"))
            await wait_until(lambda: rounds_merged(run) >= before + 4, "rounds go on")
            opened = [e for e in run.tape("opened") if e["round"] > number]
            mine = next(m.incarnation for m in run.state.members.values() if m.name == "hung")
            assert all(mine not in e["called"] for e in opened)
            assert not run.tape("gone")
        finally:
            await asyncio.to_thread(hung.end)
            await asyncio.to_thread(other.end)


@pytest.mark.slow
async def test_a_line_of_ten_megabits_keeps_its_worker_live(run_url: str, run_name: str) -> None:
    """2 MB per contribution and as much per version: 1.7 s each, while three heartbeats are 1.8 s."""
    spec = make_spec(
        run_name,
        rounds={"fragments": 2, "inner_steps": 160},
        workers={"heartbeat_s": 0.6},
        task={"name": "synthetic", "options": {"tensors": 4, "size": 256 * 1024}},
    )
    async with bench(run_url, spec) as run, slow_line(run_url, 10e6) as (slow_url, line):
        run.add("near", Pace(step_s=0.04))
        await run.reach(1)
        far = SyntheticWorker(RunUrl.parse(slow_url), "far", Pace(step_s=0.04))
        task = asyncio.create_task(far.run())
        try:
            await wait_until(lambda: far.client.bytes_sent >= 4_000_000, "it has sent two contributions")
            assert line.carried > 10_000_000
            assert not run.tape("gone")
            assert far.client.incarnation in {m.incarnation for m in run.state.members.values() if m.live}
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.slow
async def test_fifty_who_join_in_the_same_second_do_not_hurt_those_at_work(run_url: str, run_name: str) -> None:
    """All in one process, so it is the protocol that is tried, not this machine."""
    spec = make_spec(
        run_name,
        rounds={"fragments": 2, "inner_steps": 20},
        workers={"heartbeat_s": PATIENT_S},
        task={"name": "synthetic", "options": {"tensors": 4, "size": 4 * 1024}},
    )
    async with bench(run_url, spec) as run:
        for name in ("a", "b"):
            run.add(name, Pace(step_s=0.02))
        await run.reach(2)
        old = {m.incarnation for m in run.state.members.values()}
        began, merged = time.monotonic(), rounds_merged(run)
        for i in range(50):
            run.add(f"crowd{i}", Pace(step_s=0.2))
        await wait_until(
            lambda: all(worker.ready.is_set() for worker in run.workers.values()), "everybody has adopted"
        )
        took = time.monotonic() - began
        assert {m.incarnation for m in run.state.members.values() if m.live} >= old
        assert not run.tape("gone")
        assert rounds_merged(run) > merged, f"nothing was merged in {took:.1f} s"
        await wait_until(lambda: sum(takes_part(run, f"crowd{i}") for i in range(50)) >= 45, "the crowd takes part")
        assert run.state.counts.get("ledger mismatches", 0) == 0
