"""Promise 2: one writer. Another synchronizer stands by; a stalled leader writes nothing any more, whatever it is."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import Fenced
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.port import Batch
from anabranch.orchestrator.scribe import Scribe
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.queue import messages as msg
from anabranch.queue.connection import connect
from anabranch.queue.scripts import FencedWriter
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace
from tests.harness import Bench, bench, make_spec
from tests.promises import lives
from tests.promises.lives import Life, Script, Stored, Zygote, scripted_spec, scripted_workers, stored_run, zygote
from tests.wait import wait_until

LEASE_S = 0.5
STALLED_S = 4.0  # far beyond the lease and three heartbeats
HEARTBEAT_S = 0.5


async def test_a_stalled_leader_is_replaced_within_its_lease_and_stands_by(
    run_url: str, run_name: str, tmp_path: Path
) -> None:
    workers = {"heartbeat_s": HEARTBEAT_S, "adoption": "overwrite"}
    spec = scripted_spec(run_name, leader={"lease_s": LEASE_S}, workers=workers)
    url, script = RunUrl.parse(run_url), Script()
    first_dir, second_dir = tmp_path / "first", tmp_path / "second"
    for directory in (first_dir, second_dir):
        directory.mkdir()
    with zygote() as mother:
        async with stored_run(url) as stored, scripted_workers(url, script):
            first = mother.begin(url, spec, first_dir)
            await stored.reach(1)
            second = mother.begin(url, spec, second_dir)
            await said(second_dir, f"standby: run {run_name} is led by")
            loaded_s = 2.0 + 10 * await two_versions(stored)  # this machine's share in all of it
            took_s = await stalled(first, stored, mother)
            assert took_s <= LEASE_S + 1.0 + loaded_s, "within lease + 1 s"
            await mother.signal(first, signal.SIGCONT)
            await said(first_dir, "no longer leading: epoch 1 is over")
            await said(first_dir, f"standby: run {run_name} is led by")
            took_s = await stalled(second, stored, mother)
            assert took_s <= LEASE_S + 1.0 + loaded_s
            await mother.signal(second, signal.SIGCONT)
            await said(second_dir, "no longer leading")
            merged = [event for event in await stored.tape() if event["kind"] == "merged"]
            lives.check_versions(merged)
            kinds = {event["kind"] for event in await stored.tape()}
            assert not kinds & {"gone", "rejected", "refused", "ledger mismatch", "timeline"}, "nobody noticed"
            for life in (first, second):
                await mother.kill(life)


async def stalled(life: Life, stored: Stored, mother: Zygote) -> float:
    """SIGSTOP a leader; seconds until the next version is committed by another: one more may be under way."""
    await mother.signal(life, signal.SIGSTOP)
    return await two_versions(stored)


async def two_versions(stored: Stored) -> float:
    """Seconds until so many more are committed."""
    before, began = sum(await stored.versions()), time.monotonic()

    async def committed() -> bool:
        return sum(await stored.versions()) >= before + 2

    await wait_until(committed, "two more versions are committed")
    return time.monotonic() - began


async def said(directory: Path, words: str) -> None:
    """Wait for a line in the log of the lives in a directory."""
    await wait_until(lambda: words in lives.last_words(directory), f"it says {words!r}")


async def test_nobody_is_thought_dead_after_a_stall_without_a_standby(
    run_url: str, run_name: str, tmp_path: Path
) -> None:
    """It drains what arrived before any timer fires, and its clock stood still."""
    spec = make_spec(run_name, workers={"heartbeat_s": HEARTBEAT_S, "adoption": "overwrite"})
    url = RunUrl.parse(run_url)
    with zygote() as mother:
        async with stored_run(url) as stored:
            script = Script()
            async with scripted_workers(url, script):
                life = mother.begin(url, scripted_spec(run_name, workers=spec.workers.model_dump()), tmp_path)
                await stored.reach(1)
                await mother.signal(life, signal.SIGSTOP)
                stopped_at = time.monotonic()
                await wait_until(lambda: time.monotonic() - stopped_at > STALLED_S, "it was away for long")
                await mother.signal(life, signal.SIGCONT)
                await stored.reach(max(await stored.versions()) + 3)
                kinds = {event["kind"] for event in await stored.tape()}
                assert not kinds & {"gone", "back", "rejected", "ledger mismatch"}
                await mother.kill(life)


def every_write(run: Bench) -> dict[str, list[do.Instruction]]:
    """One batch of each kind that a leader stores."""
    state = run.state
    member = next(iter(state.members.values()))
    base = state.fragments[0].version
    call = msg.Call(round=99, fragment=0, timeline=state.timeline, base=base, called=[member.incarnation])
    return {
        "call": [do.Tell("due", call)],
        "reject": [
            do.Consume("refused", member.name, (b"1-1",)),
            do.Note("stale", "rejected"),
            do.Book("stale", member.incarnation, 0, "rejected", 64),
        ],
        "abandon": [do.Tell("quorum 0/1", msg.Abandoned(round=99, fragment=0, base=0, reason="quorum 0/1"))],
        "clean-up": [do.CloseBooks("closed", member.incarnation, member.name, 0, ((0, 0, 0), (0, 0, 0)), True)],
        "welcome": [do.Tell("joined", msg.Welcome(name="x", nonce=bytes(16), incarnation=77), "joined")],
        "setting": [do.Tell("rounds.quorum = 9", msg.Setting(key="rounds.quorum", value=9), "set")],
        "timeline": [do.NewTimeline("lost", "9-x", 1_000_000)],
        "stop": [do.Tell("stopped", msg.Stop(reason="stopped"))],
        "commit": [do.Commit("all arrived", 99, 0, 1)],
        "nothing but figures": [],
    }


async def test_every_write_of_an_old_epoch_is_refused_inside_redis(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", Pace(step_s=0.003))
        await run.reach(1)
        await run.settle()
        leading = run.synchronizer.leading
        assert leading is not None
        vault, context = leading.vault, leading._context
        vault.prepared[99] = await vault.upload(vault.versions[0].theta, vault.versions[0].momentum)
        scribe = Scribe(run.keys, leading.core, vault, run.synchronizer.tape, leading._scribe._run)
        old = FencedWriter(run.redis, run.keys, run.synchronizer.owner)
        old.epoch, old._number = context.writer.epoch, context.writer._number
        redis = connect(RunUrl.parse(run_url), name="usurper")
        await redis.delete(run.keys.lease)
        await FencedWriter(redis, run.keys, "usurper").acquire(60.0)
        before = await everything(redis, run)
        for what, instructions in every_write(run).items():
            transaction, _ = scribe.describe(Batch(1, tuple(instructions), True, True), 0.0)
            assert transaction, what
            with pytest.raises(Fenced, match="held by 2:usurper"):
                await old.write(transaction)
        assert await everything(redis, run) == before
        await redis.delete(run.keys.lease)
        await redis.aclose()


async def everything(redis: Any, run: Bench) -> dict[str, Any]:
    """Every key of the run that a leader writes."""
    keys = run.keys
    found: dict[str, Any] = {name: await redis.hgetall(name) for name in (keys.state, keys.ledger)}
    return {**found, keys.broadcast: await redis.xrange(keys.broadcast), keys.spec: await redis.get(keys.spec)}


async def test_a_stop_is_meant_for_the_standby_too(run_url: str, run_name: str) -> None:
    """It takes over, finds the run stopped and ends; only somebody who starts a synchronizer makes it go on."""
    spec = make_spec(run_name)
    async with bench(run_url, spec) as run:
        run.add("w", Pace(step_s=0.003))
        await run.reach(1)
        standby = Synchronizer(RunUrl.parse(run_url), spec)
        task = asyncio.create_task(standby.run(), name="standby")
        await wait_until(lambda: standby.standby_for is not None, "it stands by")
        await run.settle()  # a round that is under way is merged after a stop, too
        versions = run.versions()
        await run.command("stop")
        await run.synchronizer.stopped.wait()
    await wait_until(standby.stopped.is_set, "the standby took over and says that the run is stopped")
    assert standby.core is not None
    assert standby.core.state.stopped
    assert [fragment.version for fragment in standby.core.state.fragments] == versions
    standby.end()
    await task
