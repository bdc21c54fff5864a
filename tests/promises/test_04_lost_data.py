"""Promise 4: Redis loses its data. The run goes on from the newest copy, loudly, or stands still and says why."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from redis.asyncio import Redis

from anabranch.errors import CheckpointError, UsageError
from anabranch.orchestrator.restore import restore
from anabranch.queue.connection import connect
from anabranch.queue.control import send_command
from anabranch.queue.embedded import EmbeddedServer
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace
from tests.conftest import ServerFactory
from tests.harness import Bench, bench, make_spec
from tests.wait import wait_until

QUICK = Pace(step_s=0.003)


def on(server: EmbeddedServer, run: str) -> str:
    return f"{server.url}?run={run}"


async def rolled_back(run: Bench) -> str:
    """Wait for the note that a new timeline began; its reason."""
    await wait_until(lambda: run.tape("timeline"), "a new timeline began")
    return str(run.tape("timeline")[-1]["reason"])


async def take_part(run: Bench, *names: str) -> None:
    """Wait until a worker of each name is merged under the current timeline."""

    def merged() -> bool:
        core = run.synchronizer.core
        if core is None:
            return False
        newest = {m.name: m for m in core.state.members.values()}
        return all(name in newest and newest[name].last_round for name in names)

    await wait_until(merged, f"{', '.join(names)} take part")


async def test_a_leader_that_lives_puts_back_what_it_holds(
    server_factory: ServerFactory, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """FLUSHALL under a running synchronizer, without any checkpoint: nothing merged is lost."""
    caplog.set_level(logging.INFO, logger="anabranch")
    async with bench(on(server_factory(), run_name), make_spec(run_name)) as run:
        for name in ("a", "b"):
            run.add(name, QUICK)
        await run.reach(3)
        await run.settle()
        versions, tokens, thetas = run.versions(), run.state.tokens, [run.theta(p).copy() for p in range(2)]
        await run.redis.flushall()
        reason = await rolled_back(run)
        assert "restored from this synchronizer's memory" in reason
        assert "timeline" in caplog.text
        await wait_until(lambda: run.versions() == versions, "it leads again")
        assert run.state.timeline.startswith("1-")
        assert run.state.tokens == tokens
        for p in range(2):
            np.testing.assert_array_equal(run.theta(p), thetas[p])
        await run.command("resume")
        await run.reach(max(versions) + 2)
        assert run.state.counts.get("ledger mismatches", 0) == 0
        assert len(run.tape("joined")) == 2, "whoever holds the same bits keeps base and work"


async def test_a_new_synchronizer_goes_on_from_the_newest_checkpoint(
    server_factory: ServerFactory, run_name: str, tmp_path: Path
) -> None:
    url, spec, directory = on(server_factory(), run_name), make_spec(run_name), tmp_path / "run"
    directory.mkdir()
    async with bench(url, spec, directory=directory) as run:
        run.add("w", QUICK)
        await run.reach(2)
        await run.settle()
        kept, thetas = run.versions(), [run.theta(p).copy() for p in range(2)]
        await checkpointed(run)
        await run.command("resume")
        await run.reach(max(kept) + 2)
    await emptied(url)
    async with bench(url, spec, directory=directory) as again:
        assert again.versions() == kept
        for p in range(2):
            np.testing.assert_array_equal(again.theta(p), thetas[p])
        reason = await rolled_back(again)
        assert "the server holds nothing of this run any more: restored from" in reason
        again.add("w", QUICK)
        await again.command("resume")
        await again.reach(max(kept) + 2)
        await wait_until(lambda: any(d.name == "w" for d in again.state.departed), "its former life is closed")
        assert again.state.counts.get("ledger mismatches", 0) == 0


async def checkpointed(run: Bench) -> None:
    """A checkpoint of this moment, on command."""
    checkpoints = run.synchronizer.checkpoints
    assert checkpoints is not None
    before = checkpoints.latest
    await send_command(run.redis, run.keys, "checkpoint")
    await wait_until(lambda: checkpoints.latest != before, "a checkpoint is written")


async def emptied(url: str) -> None:
    redis = await opened(url)
    await redis.flushall()
    await redis.aclose()


async def test_workers_that_live_through_it_adopt_again(
    server_factory: ServerFactory, run_name: str, tmp_path: Path
) -> None:
    """They hold versions that the checkpoint does not have: they join again and overwrite; nobody merges the past."""
    server, spec, directory = server_factory(), make_spec(run_name), tmp_path / "run"
    directory.mkdir()
    url = on(server, run_name)
    async with bench(url, spec, directory=directory) as run:
        worker = run.add("w", QUICK)
        await run.reach(2)
        await checkpointed(run)
        await run.reach(max(run.versions()) + 3)
        run.synchronizer._memory = None
        first = run.synchronizer
        first.end()  # the leader is gone, its workers are not
        await wait_until(lambda: first.core is None or first._ending.is_set(), "it ends")
        await emptied(url)
        async with bench(url, spec, directory=directory) as again:
            await rolled_back(again)
            await wait_until(
                lambda: worker.client.incarnation > 1_000_000, "it joins again under a number of its own"
            )
            await take_part(again, "w")
            await again.reach(max(again.versions()) + 2)
            assert again.state.counts.get("ledger mismatches", 0) == 0
            assert again.state.tokens > 0


async def test_an_older_copy_of_the_data_is_noticed(
    server_factory: ServerFactory, run_name: str, tmp_path: Path
) -> None:
    """A replica that lagged is promoted: here, the server's files of a while ago."""
    server = server_factory(appendfsync="always")
    url, spec = on(server, run_name), make_spec(run_name)
    data = server.options.directory
    async with bench(url, spec) as run:
        worker = run.add("w", QUICK)
        await run.reach(2)
        await asyncio.to_thread(server.kill)
        shutil.copytree(data, tmp_path / "older")
        await asyncio.to_thread(server.start)
        await run.reach(max(run.versions() or [2]) + 3)
        await run.settle()
        newest = run.versions()
    await asyncio.to_thread(server.kill)
    shutil.rmtree(data)
    shutil.move(tmp_path / "older", data)
    await asyncio.to_thread(server.start)
    async with bench(url, spec) as again:
        assert "may be lost" in await rolled_back(again)
        assert max(again.versions()) < max(newest)
        again.add("w", QUICK)
        await again.reach(max(newest) + 1)
        assert again.state.counts.get("ledger mismatches", 0) == 0
    assert worker.client.incarnation < 1_000_000


async def test_without_any_copy_it_stands_still_and_says_why(server_factory: ServerFactory, run_name: str) -> None:
    """The stored model is damaged and there is no checkpoint: no write is made."""
    url, spec = on(server_factory(), run_name), make_spec(run_name)
    async with bench(url, spec) as run:
        run.add("w", QUICK)
        await run.reach(1)
        await run.settle()
        blobs = [key async for key in run.redis.scan_iter(match="*blob:_:*")]
        keys = run.keys
    redis = await opened(url)
    await redis.delete(*blobs)
    before = await redis.hgetall(keys.state)
    with pytest.raises(CheckpointError, match=r"stored model is damaged .* no checkpoint to go on from"):
        async with bench(url, spec):
            pass
    after = await redis.hgetall(keys.state)
    assert {k: v for k, v in after.items() if k != b"epoch"} == {k: v for k, v in before.items() if k != b"epoch"}
    await redis.aclose()


async def opened(url: str) -> Redis:
    return connect(RunUrl.parse(url), name="test")


async def test_a_damaged_model_is_replaced_by_the_checkpoint(
    server_factory: ServerFactory, run_name: str, tmp_path: Path
) -> None:
    url, spec = on(server_factory(), run_name), make_spec(run_name)
    async with bench(url, spec, directory=tmp_path) as run:
        run.add("w", QUICK)
        await run.reach(2)
        await run.settle()
        await checkpointed(run)
        kept = run.versions()
    redis = await opened(url)
    blobs = [key async for key in redis.scan_iter(match="*blob:_:*")]
    await redis.delete(*blobs)
    await redis.aclose()
    async with bench(url, spec, directory=tmp_path) as again:
        assert "the stored model is damaged" in await rolled_back(again)
        assert again.versions() == kept


# --- by hand ----------------------------------------------------------------------------------------------


async def test_restore_puts_a_checkpoint_into_a_server(
    server_factory: ServerFactory, run_name: str, tmp_path: Path
) -> None:
    """To another server and under another name, as for a machine that takes over from an empty disk."""
    directory = tmp_path / "run"
    directory.mkdir()
    async with bench(on(server_factory(), run_name), make_spec(run_name), directory=directory) as run:
        run.add("w", QUICK)
        await run.reach(2)
        await run.settle()
        await checkpointed(run)
        kept, thetas = run.versions(), [run.theta(p).copy() for p in range(2)]
    url = RunUrl.parse(on(server_factory(), "other"))
    said = await restore(url, str(directory))
    assert "restored by hand from" in said
    async with bench(str(url), make_spec("other")) as again:
        assert again.versions() == kept
        for p in range(2):
            np.testing.assert_array_equal(again.theta(p), thetas[p])
        again.add("new", QUICK)
        await again.command("resume")
        await again.reach(max(kept) + 1)
        with pytest.raises(UsageError, match=r"is led by .*: end its synchronizer first"):
            await restore(url, str(directory))
    with pytest.raises(UsageError, match=r"--force puts .* in its place"):
        await restore(url, str(directory))
    await restore(url, str(directory), force=True)
    async with bench(str(url), make_spec("other")) as third:
        assert third.versions() == kept
        assert third.state.timeline.startswith("2-")
