"""The data queue, from outside: every item of an epoch is delivered once, or its range is listed as redone.

Real workers are killed with SIGKILL and join again under new names, the synchronizer is killed and started again;
what each worker was given is in its own file, written before it trained on it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import UsageError
from anabranch.orchestrator.core.state import DataQueue
from anabranch.queue.records import read_tape
from anabranch.queue.url import RunUrl
from anabranch.shuffle import Indices, item_order
from anabranch.spec import RunSpec
from anabranch.workers.member.synthetic import Pace, SharedItems, SyntheticWorker
from tests.harness import Bench, bench, forget_run, make_spec, process
from tests.promises.lives import ROOT, Stored, stored_run
from tests.wait import PATIENCE_S, wait_until

ITEMS, LENGTH, BATCH = 2_400, 60, 4
AT_WORK = 3
KILLS = 6


@contextmanager
def eater(url: str, name: str, folder: Path, batch: int = BATCH) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tests.promises.eater", url, name, str(ITEMS), str(batch), str(folder)]
    with (folder / f"{name}.log").open("wb") as log:
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()


def spec_of(run: str) -> RunSpec:
    return make_spec(
        run,
        rounds={"fragments": 2, "inner_steps": 8, "deadline_min_s": 5.0},
        data={"range_items": LENGTH, "epochs": 1},
        leader={"lease_s": 0.5},
    )


def delivered(folder: Path) -> list[tuple[int, int]]:
    """(epoch, item) of every delivery. A line that a kill cut short was not trained on."""
    found = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                epoch, indices = json.loads(line)
            except ValueError:
                continue
            found += [(epoch, index) for index in indices]
    return found


def delivered_by(folder: Path, name: str) -> bool:
    path = folder / f"{name}.jsonl"
    return path.exists() and path.stat().st_size > 0


async def tape_of(stored: Stored, kind: str) -> list[dict[str, Any]]:
    return [event for event in await read_tape(stored.redis, stored.keys, 0) if event["kind"] == kind]


async def stopped(stored: Stored) -> bool:
    core = await stored.core()
    return core is not None and core["stopped"]


def check_every_item(times: Counter[tuple[int, int]], redone: list[dict[str, Any]], seed: int) -> None:
    """No item is skipped; one that was delivered again lies in a range that was redone from before it."""
    positions = {}
    for range_ in range(-(-ITEMS // LENGTH)):
        length = min(LENGTH, ITEMS - range_ * LENGTH)
        for position, item in enumerate(item_order(length, seed, 0, range_)):
            positions[range_ * LENGTH + int(item)] = (range_, position)
    listed = Counter[int]()
    for item, (range_, position) in positions.items():
        count = times[0, item]
        assert count >= 1, f"item {item} was skipped"
        listed[item] = sum(r["range"] == range_ and r["from"] <= position for r in redone)
        assert count <= 1 + listed[item], f"item {item} was delivered {count} times, redone {listed[item]} times"
    assert set(times) == {(0, item) for item in range(ITEMS)}, "nothing else"


@pytest.mark.slow
async def test_a_storm_of_killing_and_joining_over_one_epoch(
    run_url: str, run_name: str, tmp_path: Path, seed: int
) -> None:
    dice = random.Random(seed)
    spec, url = spec_of(run_name), RunUrl.parse(run_url)
    (tmp_path / "run.toml").write_text(spec.to_toml())
    lead = (
        "orchestrator",
        run_url,
        "--spec",
        str(tmp_path / "run.toml"),
        "--dir",
        str(tmp_path / "run"),
        "--no-page",
    )
    with ExitStack() as stack:
        leader = stack.enter_context(process(*lead))
        alive: dict[str, subprocess.Popen[bytes]] = {}
        born = 0

        def join() -> None:
            nonlocal born
            born += 1
            alive[f"w{born}"] = stack.enter_context(eater(run_url, f"w{born}", tmp_path))

        for _ in range(AT_WORK):
            join()
        async with stored_run(url) as stored:
            for kill in range(KILLS):
                goal = (kill + 1) * ITEMS // (KILLS + 2)
                await wait_until(lambda: len(delivered(tmp_path)) >= goal, f"{goal} items")  # noqa: B023
                victim = alive.pop(dice.choice(sorted(alive)))
                victim.send_signal(signal.SIGTERM if kill == KILLS - 1 else signal.SIGKILL)
                if kill == KILLS // 2:
                    leader.kill()
                    leader = stack.enter_context(process(*lead))
                join()
            await wait_until(lambda: leader.poll() is not None, "the epoch is done and the run stops")
            assert await stopped(stored)
            times = Counter(delivered(tmp_path))
            check_every_item(times, await tape_of(stored, "redone"), spec.seed)
            core = await stored.core()
            assert core is not None
            data = core["data"]
            assert (data["done"], data["left"], data["returned"]) == (-(-ITEMS // LENGTH), {}, [])
            assert len(await tape_of(stored, "epoch")) == 1
            assert await stored.count("ledger mismatches") == 0
            # Whoever came too late to take part waits for somebody who leads, as it should: that is not waited for.
            took_part = [child for name, child in alive.items() if delivered_by(tmp_path, name)]
            assert took_part
            await asyncio.to_thread(wait_all, took_part)


def wait_all(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        assert child.wait(PATIENCE_S) == 0, "it leaves by itself when the run stops"


def test_the_check_above_can_fail() -> None:
    whole = Counter({(0, item): 1 for item in range(ITEMS)})
    check_every_item(whole, [], 0)
    with pytest.raises(AssertionError, match="skipped"):
        check_every_item(whole - Counter({(0, 5): 1}), [], 0)
    with pytest.raises(AssertionError, match="delivered 2 times, redone 0 times"):
        check_every_item(whole + Counter({(0, 5): 1}), [], 0)
    check_every_item(whole + Counter({(0, 5): 1}), [{"range": 5 // LENGTH, "from": 0}], 0)


# --- stopping, resuming, restoring ------------------------------------------------------------------------


class Plate:
    """What one in-process worker was given."""

    def __init__(self) -> None:
        self.times = Counter[tuple[int, int]]()

    def data(self) -> SharedItems:
        return SharedItems(ITEMS, BATCH, self.took)

    def took(self, epoch: int, indices: Indices) -> None:
        self.times.update((epoch, int(index)) for index in indices)


def queue_of(run: Bench) -> DataQueue:
    assert run.state.data is not None
    return run.state.data


async def test_who_is_stopped_and_started_again_goes_on_where_it_was(run_url: str, run_name: str) -> None:
    spec, plate, quick = spec_of(run_name), Plate(), Pace(step_s=0.001)
    for name in ("first", "second"):
        async with bench(run_url, spec) as run:
            worker = SyntheticWorker(RunUrl.parse(run_url), name, quick, data=plate.data())
            half = (1 if name == "first" else 2) * ITEMS // 2
            done = asyncio.create_task(worker.run(lambda: plate.times.total() >= half))  # noqa: B023
            await wait_until(done.done, "it trains and leaves in order")
            await done
            await wait_until(lambda: not run.state.members, "its books are closed")
            assert not run.tape("redone")
    assert set(plate.times.values()) == {1}
    assert plate.times.total() == ITEMS


async def test_a_restored_run_trains_again_on_what_the_model_has_lost(
    run_url: str, run_name: str, tmp_path: Path
) -> None:
    """Positions are in the checkpoint: what was settled after it was made is not in the model it restores."""
    spec, plate = spec_of(run_name), Plate()
    async with bench(run_url, spec, directory=tmp_path) as run:
        run.add("w", Pace(step_s=0.002), data=plate.data())
        await wait_until(lambda: run.state.data is not None and queue_of(run).done >= 5, "some ranges are done")
        await run.command("checkpoint")
        await wait_until(lambda: any((tmp_path / "checkpoints").glob("*/manifest.json")), "it is written")
        at_checkpoint = set(plate.times)
        await wait_until(lambda: queue_of(run).done >= 15, "more are done")
        run.kill("w")
        run.synchronizer._memory = None
    await forget_run(run_url)
    async with bench(run_url, spec, directory=tmp_path) as again:
        assert queue_of(again).done < 15
        rest = Plate()
        again.add("v", Pace(step_s=0.001), data=rest.data())
        await wait_until(again.synchronizer.stopped.is_set, "the epoch ends")
        everything = {(0, item) for item in range(ITEMS)}
        assert set(rest.times) | at_checkpoint == everything, "nothing that the model has not seen is left out"
        assert set(rest.times.values()) == {1}


async def test_fast_workers_take_more(run_url: str, run_name: str) -> None:
    spec, fast, slow = spec_of(run_name), Plate(), Plate()
    async with bench(run_url, spec) as run:
        run.add("slow", Pace(step_s=0.1), data=slow.data())
        run.add("fast", Pace(step_s=0.005), data=fast.data())
        await wait_until(run.synchronizer.stopped.is_set, "the epoch ends")
    assert fast.times.total() > 2 * slow.times.total() > 0
    assert fast.times.total() + slow.times.total() == ITEMS


async def test_another_dataset_is_refused(run_url: str, run_name: str) -> None:
    async with bench(run_url, spec_of(run_name)) as run:
        run.add("one", Pace(step_s=0.005), data=Plate().data())
        await wait_until(lambda: run.state.data is not None, "it has asked")
        other = dataclasses.replace(Plate().data(), items=ITEMS + 1)
        worker = SyntheticWorker(RunUrl.parse(run_url), "other", data=other)
        with pytest.raises(UsageError, match="every worker needs the same copy"):
            await worker.run()
