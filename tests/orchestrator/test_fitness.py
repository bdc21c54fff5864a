"""A server that is not fit any more, or does not write, or says nothing: the run stands still, and says why."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from anabranch.errors import ServerChanged, ServerUnreachable, UnsuitableServer
from anabranch.operate import command
from anabranch.operate import status as read_status
from anabranch.orchestrator import synchronizer as module
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.orchestrator.web.app import PageOptions, picture, serve_page
from anabranch.queue.connection import connect, crowded
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace
from tests.conftest import ServerFactory
from tests.harness import Bench, bench, make_spec
from tests.wait import wait_until

QUICK = Pace(step_s=0.003)
HEARTBEAT_S = 1.0
NOEVICTION = "maxmemory-policy is allkeys-lru, which may delete the model; set it to noeviction"


def phase_of(synchronizer: Synchronizer) -> str:
    return str(picture(synchronizer)["phase"])


# --- eviction ---------------------------------------------------------------------------------------------


async def test_while_the_server_may_evict_nothing_is_written(
    server_factory: ServerFactory, run_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "UNFIT_S", 0.02)
    async with bench(f"{server_factory().url}?run={run_name}", make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        await run.redis.config_set("maxmemory-policy", "allkeys-lru")
        await wait_until(lambda: phase_of(run.synchronizer).startswith(NOEVICTION), "it says so")
        assert run.synchronizer.core is None
        assert NOEVICTION in caplog.text
        with pytest.raises(UnsuitableServer, match="maxmemory-policy is allkeys-lru"):
            await read_status(run.url)

        async def told() -> Any:
            return await run.redis.hmget(run.keys.state, ["write", "epoch", "broadcast"])

        before, looks = await told(), await looked(run)

        async def looked_often() -> bool:
            return await looked(run) > looks + 10

        await wait_until(looked_often, "it looked ten times more")
        assert await told() == before
        assert await run.redis.exists(run.keys.lease) == 0, "nobody leads"
        await run.redis.config_set("maxmemory-policy", "noeviction")
        await wait_until(lambda: run.synchronizer.core is not None, "it leads again")
        assert run.synchronizer.trouble is None
        await run.reach(max(run.versions()) + 1)
        assert len(run.tape("timeline")) <= 1


async def looked(run: Bench) -> int:
    stats: Any = await run.redis.info("commandstats")
    return int(stats["cmdstat_info"]["calls"])


async def test_a_standby_does_not_begin_to_lead_on_a_server_that_may_evict(
    server_factory: ServerFactory, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "UNFIT_S", 0.02)
    spec = make_spec(run_name, leader={"lease_s": 0.4})
    url = f"{server_factory().url}?run={run_name}"
    second = Synchronizer(RunUrl.parse(url), spec)
    async with bench(url, spec) as run:
        task = asyncio.create_task(second.run(), name="second")
        await wait_until(lambda: second.standby_for is not None, "it is standby")
        await run.redis.config_set("maxmemory-policy", "allkeys-lru")
        await wait_until(lambda: phase_of(second).startswith(NOEVICTION), "the standby says so, too")
        assert second.core is None
    redis = connect(RunUrl.parse(url), name="test")
    await redis.config_set("maxmemory-policy", "noeviction")
    await redis.aclose()
    await wait_until(lambda: second.core is not None, "it leads")
    second.end()
    await task


async def test_terms_that_end_at_once_are_waited_after(
    run_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.04)
    synchronizer = Synchronizer(RunUrl.parse(run_url))
    begun: list[float] = []

    async def term(self: Synchronizer) -> None:
        begun.append(time.monotonic())
        if len(begun) == 8:
            self.end()
            return
        raise ServerChanged("the server lost acknowledged writes")

    monkeypatch.setattr(Synchronizer, "_one_term", term)
    await synchronizer.run()
    pauses = [later - earlier for earlier, later in itertools.pairwise(begun)]
    assert all(pause >= least for pause, least in zip(pauses, [0, 0, 0.01, 0.02, 0.04, 0.04, 0.04], strict=True))
    assert "was started again, 7 times in short order: waiting up to 0.04 s" in caplog.text
    assert synchronizer.trouble is None


# --- a server that refuses writes, or says nothing --------------------------------------------------------


async def said_in_time(run: Bench, words: str, *, to_operators: bool = True) -> None:
    """Health check, page and `anabranch status` say it within three heartbeats."""
    started = time.monotonic()
    await wait_until(lambda: run.synchronizer.trouble is not None, "it is noticed")
    assert time.monotonic() - started < 3 * HEARTBEAT_S
    assert words in str(run.synchronizer.trouble)
    assert phase_of(run.synchronizer) == run.synchronizer.trouble
    if to_operators:
        assert (await read_status(run.url))["phase"] == run.synchronizer.trouble


async def well_again(run: Bench) -> None:
    await wait_until(lambda: run.synchronizer.trouble is None, "it is well again")
    await run.reach(max(run.versions()) + 1)


def busy(run_name: str) -> Any:
    return make_spec(run_name, workers={"heartbeat_s": HEARTBEAT_S})


async def test_too_few_replicas(server_factory: ServerFactory, run_name: str) -> None:
    async with bench(f"{server_factory().url}?run={run_name}", busy(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        await run.redis.config_set("min-replicas-to-write", 1)
        await said_in_time(run, "the server refuses writes: too few replicas are in sync (min-replicas-to-write)")
        await run.redis.config_set("min-replicas-to-write", 0)
        await well_again(run)


async def test_a_server_that_became_a_replica(server_factory: ServerFactory, run_name: str) -> None:
    """As after a fail-over: the old one takes no writes. Its data stay, and it is told to lead again."""
    async with bench(f"{server_factory().url}?run={run_name}", busy(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        await run.redis.config_set("replica-serve-stale-data", "yes")
        await run.redis.replicaof("127.0.0.1", 1)  # nobody is there
        await said_in_time(run, "the server refuses writes: it is a replica, by a fail-over or the URL")
        await run.redis.replicaof("NO", "ONE")
        await well_again(run)


async def test_memory_that_is_used_up(server_factory: ServerFactory, run_name: str) -> None:
    """Our own writes may go on (`allow-oom`), or a full server would stay full; members' are refused."""
    async with bench(f"{server_factory().url}?run={run_name}", busy(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        await run.redis.config_set("maxmemory", 1)
        await wait_until(
            lambda: "the server is nearly full (maxmemory)" in phase_of(run.synchronizer), "it is noticed"
        )
        await wait_until(lambda: not run.state.rounds, "rounds that are open end, and no more begin")
        held = run.versions()
        with pytest.raises(ServerUnreachable, match="the server refuses writes: its maxmemory is used up"):
            await command(run.url, "pause")
        assert run.versions() == held
        await run.redis.config_set("maxmemory", 0)
        await well_again(run)


async def test_a_disk_that_takes_nothing(server_factory: ServerFactory, run_name: str, tmp_path: Path) -> None:
    server = server_factory()
    async with bench(f"{server.url}?run={run_name}", busy(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        in_the_way = server.options.directory / "dump.rdb"
        (in_the_way / "x").mkdir(parents=True)
        await run.redis.config_set("save", "3600 1")
        await run.redis.bgsave()

        async def failed() -> bool:
            info: Any = await run.redis.info("persistence")
            return bool(info["rdb_last_bgsave_status"] == "err")

        await wait_until(failed, "the save failed")
        await said_in_time(run, "the server refuses writes: it cannot save to its disk (MISCONF")
        await run.redis.config_set("stop-writes-on-bgsave-error", "no")
        await well_again(run)


async def test_a_server_that_is_stopped_without_a_word(server_factory: ServerFactory, run_name: str) -> None:
    server = server_factory()
    async with bench(f"{server.url}?run={run_name}", busy(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        os.kill(server.pid, signal.SIGSTOP)
        try:
            await said_in_time(run, "Redis does not answer", to_operators=False)
            assert not run.synchronizer.hearing
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await well_again(run)


async def test_no_room_for_another_client(
    server_factory: ServerFactory, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    async with bench(f"{server_factory().url}?run={run_name}", busy(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        info: Any = await run.redis.info("clients")
        await run.redis.config_set("maxclients", info["connected_clients"])
        await said_in_time(run, "the server takes no more clients (maxclients", to_operators=False)
        await run.redis.config_set("maxclients", 10000)
        await well_again(run)
        assert "clients: well again" in caplog.text


def test_room_for_clients_is_told_by_info() -> None:
    assert crowded({}) is None
    assert crowded({"connected_clients": 9, "maxclients": 10}) is None
    assert crowded({"connected_clients": 10, "maxclients": 10}) is not None


async def test_the_health_check_says_why(server_factory: ServerFactory, run_name: str) -> None:
    async with (
        bench(f"{server_factory().url}?run={run_name}", make_spec(run_name)) as run,
        serve_page(run.synchronizer, PageOptions()) as address,
        ClientSession() as http,
    ):

        async def health() -> tuple[int, str | None]:
            async with http.get(address + "healthz") as response:
                return response.status, (await response.json())["why"]

        assert await health() == (200, None)
        await run.redis.config_set("min-replicas-to-write", 1)
        await wait_until(lambda: run.synchronizer.trouble is not None, "it is noticed")
        code, why = await health()
        assert code == 503
        assert why == run.synchronizer.trouble
        await run.redis.config_set("min-replicas-to-write", 0)


async def test_it_says_so_before_it_ever_led(server_factory: ServerFactory, run_name: str) -> None:
    url = RunUrl.parse(f"{server_factory().url}?run={run_name}")
    redis = connect(url, name="test")
    await redis.config_set("min-replicas-to-write", 1)
    synchronizer = Synchronizer(url, make_spec(run_name))
    task = asyncio.create_task(synchronizer.run(), name="synchronizer")
    await wait_until(lambda: "refuses writes" in phase_of(synchronizer), "it says why it does not lead")
    await redis.config_set("min-replicas-to-write", 0)
    await wait_until(lambda: synchronizer.core is not None, "it leads")
    synchronizer.end()
    await task
    await redis.aclose()
