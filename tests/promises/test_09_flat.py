"""Flat: thousands of rounds and hundreds of incarnations, and nothing grows.

Measured while rounds go on and guests come and go: memory, descriptors and tasks of the process that holds the
synchronizer (and, here, the workers), entries, keys and memory of the server. After a warm-up the median of an
earlier window is compared with that of a later one: what is left behind once per round or per incarnation shows.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from anabranch.loops import run_async
from anabranch.queue.keys import Keys
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.conftest import ServerFactory
from tests.harness import Bench, bench, make_spec
from tests.promises.results import progress, write_results
from tests.wait import wait_until

RESIDENTS = 2  # workers that stay
GUESTS_AT_ONCE = 3
GUEST_STEPS = 5
FRAGMENTS = 8
ELEMENTS = 8192  # parameters per fragment: a version that is kept by mistake is 32 KiB
SAMPLES = 24  # the first third is warm-up, the medians of the other two are compared
MOST_S = 600.0  # for any one step of it, on a slow machine
SHORT, LONG = (360, 60), (10_000, 1000)  # rounds and incarnations

#: What a figure may grow by from the middle third to the last. The short form has 120 rounds and 20 incarnations
#: between the middles of the two: one thing left behind by each of them is more than this.
ALLOWED: dict[str, float] = {
    "resident_bytes": 3e6,
    "python_blocks": 2500,
    "descriptors": 12,
    "tasks": 16,
    "stream_entries": 80,
    "blob_keys": 60,
    "other_keys": 12,
    "state_fields": 12,
    "ledger_fields": 100,
    "server_bytes": 2e6,
}


def flat_spec(run: str) -> RunSpec:
    """As many rounds a second as this machine makes; everything that is kept for a while is kept briefly."""
    return make_spec(
        run,
        rounds={"fragments": FRAGMENTS, "inner_steps": 1, "in_flight": FRAGMENTS, "deadline_min_s": 1.0},
        limits={"broadcast_length": 100, "tape_length": 100, "superseded_ttl_s": 1.0, "blob_ttl_s": 5.0},
        checkpoint={"every_s": 1.0, "keep": 2},
        task={"options": {"tensors": FRAGMENTS, "size": ELEMENTS}},
    )


@pytest.fixture(autouse=True)
def _frequent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds follow reports."""
    monkeypatch.setattr("anabranch.workers.member.heart.LEAST_S", 0.02)


@pytest.fixture(autouse=True)
def _unlogged() -> Iterator[None]:
    """pytest keeps every log record of a test: that alone would grow."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@dataclass
class Meter:
    """Takes the figures."""

    redis: Redis
    keys: Keys
    samples: list[dict[str, float]] = field(default_factory=list)

    async def take(self) -> None:
        gc.collect()
        memory: Any = await self.redis.info("memory")
        keys = [key async for key in self.redis.scan_iter(count=1000)]
        streams = [key async for key in self.redis.scan_iter(count=1000, _type="stream")]
        blobs = sum(b":blob:" in key for key in keys)
        self.samples.append(
            {
                "resident_bytes": _resident_bytes(),
                "python_blocks": sys.getallocatedblocks(),
                "descriptors": _descriptors(),
                "tasks": len(asyncio.all_tasks()),
                "stream_entries": sum([await self.redis.xlen(stream) for stream in streams]),
                "blob_keys": blobs,
                "other_keys": len(keys) - blobs,
                "state_fields": await self._fields(self.keys.state),
                "ledger_fields": await self._fields(self.keys.ledger),
                "server_bytes": memory["used_memory"],
            }
        )

    async def _fields(self, key: str) -> int:
        count: Any = await self.redis.hlen(key)
        return int(count)

    def medians(self) -> dict[str, dict[str, float]]:
        """Of the middle and of the last third of the samples."""
        third = len(self.samples) // 3
        earlier, later = self.samples[third : 2 * third], self.samples[2 * third :]
        return {
            name: {
                "earlier": statistics.median(sample[name] for sample in earlier),
                "later": statistics.median(sample[name] for sample in later),
            }
            for name in ALLOWED
        }


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # not Linux
        return 0


def _descriptors() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return 0


class Guests:
    """Incarnations that come, contribute and go, spread over the rounds; some go without a word."""

    def __init__(self, run: Bench, rounds: int, incarnations: int) -> None:
        self.gone = 0
        self._run = run
        self._every = rounds / incarnations
        self._numbers = iter(range(incarnations))

    async def host(self) -> None:
        """One guest after the other until the last has gone."""
        for number in self._numbers:
            await wait_until(partial(self._is_due, number), f"guest {number} is due", MOST_S)
            # A name of its own, or one that comes again and again.
            await self._visit(f"guest-{number}" if number % 4 else "regular", farewell=number % 8 not in {1, 2, 3})
            self.gone += 1

    def _is_due(self, number: int) -> bool:
        return sum(self._run.versions()) >= number * self._every

    async def _visit(self, name: str, *, farewell: bool) -> None:
        worker = SyntheticWorker(self._run.url, name, Pace(step_s=0.01))
        task = asyncio.create_task(worker.run(lambda: farewell and worker.step >= GUEST_STEPS), name=name)
        try:
            if farewell:
                await task
            else:
                await wait_until(lambda: task.done() or worker.step >= GUEST_STEPS, f"{name} has trained")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def busy(url: str, directory: Path, rounds: int, incarnations: int) -> Meter:
    """Residents at work, guests coming and going, and samples at even distances."""
    async with bench(url, flat_spec(RunUrl.parse(url).run), directory=directory, look_back=False) as run:
        for number in range(RESIDENTS):
            run.add(f"resident-{number}", Pace(step_s=0.005))
        guests, meter = Guests(run, rounds, incarnations), Meter(run.redis, run.keys)
        async with asyncio.TaskGroup() as group:
            for number in range(GUESTS_AT_ONCE):
                group.create_task(guests.host(), name=f"host {number}")
            for sample in range(1, SAMPLES + 1):
                done = partial(_is_done, run, guests, rounds * sample / SAMPLES, incarnations * sample / SAMPLES - 4)
                await wait_until(done, f"sample {sample} of {SAMPLES}", MOST_S)
                await meter.take()
                _show(run, guests, meter)
        await wait_until(lambda: len(run.state.members) == RESIDENTS, "every guest's books are closed")
        assert run.state.counts.get("ledger mismatches", 0) == 0
    return meter


def _is_done(run: Bench, guests: Guests, rounds: float, incarnations: float) -> bool:
    return sum(run.versions()) >= rounds and guests.gone >= incarnations


def _show(run: Bench, guests: Guests, meter: Meter) -> None:
    figures = "  ".join(f"{name} {value:,.0f}" for name, value in meter.samples[-1].items())
    progress(f"{sum(run.versions()):6} rounds {guests.gone:5} gone  {figures}")


def check_flat(meter: Meter) -> None:
    grown = [
        f"{name}: {medians['earlier']:,.0f} -> {medians['later']:,.0f}, allowed is {ALLOWED[name]:,.0f} more"
        for name, medians in meter.medians().items()
        if medians["later"] - medians["earlier"] > ALLOWED[name]
    ]
    assert not grown, "; ".join(grown)


def test_hundreds_of_rounds_and_dozens_of_incarnations_leave_nothing_behind(
    server_factory: ServerFactory, run_name: str, tmp_path: Path
) -> None:
    url = f"{server_factory().url}?run={run_name}"
    check_flat(run_async(busy(url, tmp_path, *SHORT)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_ten_thousand_rounds_and_a_thousand_incarnations_leave_nothing_behind(
    server_factory: ServerFactory, run_name: str, tmp_path: Path, seed: int
) -> None:
    url, started = f"{server_factory().url}?run={run_name}", time.monotonic()
    meter = run_async(busy(url, tmp_path, *LONG))
    rounds, incarnations = LONG
    figures = {"rounds": rounds, "incarnations": incarnations, "seconds": round(time.monotonic() - started)}
    write_results("flat", seed, {**figures, "allowed_growth": ALLOWED, "medians": meter.medians()})
    check_flat(meter)
