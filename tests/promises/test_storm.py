"""All promises at once: a storm of faults drawn from a seed (ANABRANCH_SEED repeats it), and what storms found."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from anabranch.orchestrator.core.state import OUTCOMES_KEPT
from anabranch.queue.messages import Contribution, Message
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.conftest import ServerFactory
from tests.harness import bench, change_line, make_spec
from tests.promises.lives import at_work, last_words, stored_run, zygote
from tests.promises.plans import Plan
from tests.promises.results import progress, write_results
from tests.promises.storm import Storm, quiet_workers, storm
from tests.promises.watch import orphans
from tests.wait import wait_until

FAULTS = int(os.environ.get("ANABRANCH_STORM", "6"))
USUAL_SEED = 7
SOAK_STORMS, SOAK_FAULTS = 5, 45


async def weather(plan: Plan, server_factory: ServerFactory, run: str, folder: Path) -> Storm:
    with quiet_workers(folder / "workers.log"), zygote() as mother:
        async with storm(plan, server_factory(), run, folder, mother) as made:
            await made.blow()
            await made.settle()
        return made


async def test_a_short_storm(server_factory: ServerFactory, run_name: str, tmp_path: Path, seed: int) -> None:
    """Always the same plan unless ANABRANCH_SEED names another: new ones are the long form's business."""
    chosen = seed if "ANABRANCH_SEED" in os.environ else USUAL_SEED
    made = await weather(Plan.drawn(chosen, FAULTS), server_factory, run_name, tmp_path)
    if "ANABRANCH_STORM" in os.environ:
        progress(made.report())


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_long_storms(server_factory: ServerFactory, run_name: str, tmp_path: Path, seed: int) -> None:
    faults, versions, timelines = Counter[str](), 0, 0
    for number in range(SOAK_STORMS):
        folder = tmp_path / f"storm-{number}"
        folder.mkdir()
        made = await weather(Plan.drawn(seed + number, SOAK_FAULTS), server_factory, f"{run_name}-{number}", folder)
        faults += made.struck
        versions, timelines = versions + len(made.watch.merged), timelines + len(made.watch.timelines)
        progress(f"storm {number}: {SOAK_FAULTS} faults, {len(made.watch.merged)} versions, no promise broken")
    figures = {"storms": SOAK_STORMS, "faults": faults.total(), "by_kind": dict(sorted(faults.items()))}
    write_results("storm", seed, {**figures, "versions": versions, "timelines": timelines, "broken": 0})


# --- what storms found, one by one ------------------------------------------------------------------------


async def test_a_standby_without_a_copy_begins_no_new_model(
    server_factory: ServerFactory, run_name: str, tmp_path: Path
) -> None:
    """The server is emptied while the leader is stalled: the standby ends, and the leader puts back what it holds."""
    url, spec = RunUrl.parse(f"{server_factory().url}?run={run_name}"), make_spec(run_name, leader={"lease_s": 0.4})
    first_dir, second_dir = tmp_path / "first", tmp_path / "second"
    for directory in (first_dir, second_dir):
        directory.mkdir()
    with zygote() as mother:
        async with at_work({"w": SyntheticWorker(url, "w", Pace(step_s=0.005))}), stored_run(url) as stored:
            first = mother.begin(url, spec, first_dir)
            await stored.reach(2)
            second = mother.begin(url, spec, second_dir)
            await wait_until(lambda: "standby: run" in last_words(second_dir), "it stands by")
            await mother.signal(first, signal.SIGSTOP)
            before = await stored.versions()
            await stored.redis.flushall()
            async with at_work({"fresh": SyntheticWorker(url, "fresh", Pace(step_s=0.005))}):
                assert await mother.end(second, "the standby ends") == 1
                assert "no new model is begun" in last_words(second_dir)
                await mother.signal(first, signal.SIGCONT)
                await stored.reach(max(before) + 2)
            born = [event for event in await stored.tape() if event["kind"] == "born"]
            assert not born, "the tape begins with the restored run"
            await mother.kill(first)


async def test_entries_that_an_older_copy_brings_back_are_not_booked_again(run_url: str, run_name: str) -> None:
    """The leader restores a newer state than the inboxes are of: their contributions had outcomes long ago."""
    async with bench(run_url, make_spec(run_name)) as run:
        client, sent = run.add("w", Pace(step_s=0.003)).client, list[Message]()
        post = client.line.post

        async def noted(message: Message, schema: int) -> None:
            sent.append(message)
            await post(message, schema)

        change_line(client, "post", noted)
        await run.reach(OUTCOMES_KEPT + 3)
        old = [m for m in sent if isinstance(m, Contribution) and m.base < 2]
        assert len(old) >= 4, "of two versions of two fragments"
        for message in old:
            await run.post("w", message)
        await wait_until(lambda: _told_again(run.tape("settled")) >= len(old), "they are read")
        await run.reach(max(run.versions()) + 2)
        assert run.state.counts.get("ledger mismatches", 0) == 0


def _told_again(settled: list[dict[str, Any]]) -> int:
    return sum(event["reason"] == "told again" for event in settled)


async def test_what_a_copy_takes_the_place_of_is_gone(run_url: str, run_name: str) -> None:
    """The server went back a little: the leader's copy replaces what is there, whose tensors must not stay."""
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", Pace(step_s=0.003))
        await run.reach(2)
        await run.redis.set(run.keys.epoch, "0:nobody")  # as if the server had lost all since
        await run.redis.hincrby(run.keys.state, "broadcast", -5)
        await wait_until(lambda: run.tape("timeline"), "a new timeline began")
        assert "restored from this synchronizer's memory" in run.tape("timeline")[-1]["reason"]
        await run.reach(max(run.versions(), default=2) + 2)
        assert not await orphans(run.redis, run.keys)
