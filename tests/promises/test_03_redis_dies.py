"""Promise 3: Redis dies, comes back with a little less, forgets scripts and payloads, or is full."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.orchestrator.web.app import PageOptions, picture, serve_page
from anabranch.queue.embedded import EmbeddedServer
from anabranch.queue.messages import Claim, Contribution, Message
from anabranch.queue.scripts import chunk_keys
from anabranch.queue.url import RunUrl
from anabranch.workers.member.incarnation import Incarnation
from anabranch.workers.member.learner import NewVersion
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.conftest import ServerFactory
from tests.harness import Bench, bench, each_life, make_spec
from tests.promises import lives
from tests.promises.lives import Script, Stored, Zygote, scripted_spec, scripted_workers, stored_run, zygote
from tests.wait import wait_until

QUICK = Pace(step_s=0.004)
DEATHS = 3


@asynccontextmanager
async def leading(mother: Zygote, url: RunUrl, directory: Path, run: str) -> AsyncIterator[None]:
    """A synchronizer process until the block ends."""
    life = mother.begin(url, scripted_spec(run), directory)
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{error}\n{lives.last_words(directory)}") from None
    finally:
        await mother.kill(life)


# --- nothing is lost --------------------------------------------------------------------------------------


async def test_with_always_nothing_acknowledged_is_lost(
    server_factory: ServerFactory, run_name: str, tmp_path: Path, seed: int
) -> None:
    """The bits at the end are those of a plain loop, nobody joined twice and nothing was refused."""
    generator = random.Random(seed)
    server = server_factory(appendfsync="always")
    url, script = RunUrl.parse(f"{server.url}?run={run_name}"), Script()
    with zygote() as mother:
        async with scripted_workers(url, script) as workers, leading(mother, url, tmp_path, run_name):
            for _ in range(DEATHS):
                async with stored_run(url) as stored:
                    await stored.reach(max(await stored.versions(), default=0) + generator.randint(1, 3))
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
            async with stored_run(url) as stored:
                await stored.reach(max(await stored.versions()) + 1)
                script.last = max(await stored.versions()) + 2
                await stored.reach(script.last)
                await lives.adopted_by_all(workers, script.last)
                await check_nothing_lost(stored, workers, script)
                assert await stored.bits() == lives.expected_bits(scripted_spec(run_name), script)


async def check_nothing_lost(stored: Stored, workers: dict[str, SyntheticWorker], script: Script) -> None:
    tape = await stored.tape()
    lives.check_versions([event for event in tape if event["kind"] == "merged"])
    kinds = [event["kind"] for event in tape]
    assert kinds.count("joined") == len(workers)
    assert kinds.count("timeline") >= DEATHS, "each time members were told to compare"
    assert not set(kinds) & {"gone", "rejected", "ledger mismatch"}
    assert not lives.imbalances(await stored.booked(), workers)


# --- some is lost -----------------------------------------------------------------------------------------


class Witness:
    """Remembers the bits of every version that members saw; the same name must never come back with others."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int, int], bytes] = {}
        self.broken: list[tuple[str, int, int]] = []

    def watch(self, worker: SyntheticWorker) -> None:
        def watched(life: Incarnation) -> None:
            offer = life.learner.offer

            def note(version: NewVersion) -> None:
                name = (version.timeline, version.fragment, version.version)
                if self.seen.setdefault(name, version.digest) != version.digest:
                    self.broken.append(name)
                offer(version)

            life.learner.offer = note  # type: ignore[method-assign]

        each_life(worker.client, watched)


def cut_short(server: EmbeddedServer, generator: random.Random) -> int:
    """What `everysec` may lose: the end of the append-only file, cut anywhere. Returns bytes cut."""
    [log] = (server.options.directory / "appendonlydir").glob("*.incr.aof")
    size = log.stat().st_size
    cut = generator.randint(1, min(40_000, size // 3))
    with log.open("r+b") as file:
        file.truncate(size - cut)
    return cut


@pytest.mark.parametrize("leader", ["lives", "dies, too"])
async def test_with_everysec_lost_writes_are_made_good(
    server_factory: ServerFactory, run_name: str, tmp_path: Path, seed: int, leader: str
) -> None:
    """Members saw versions that the server no longer has: nothing is applied twice, every book balances."""
    generator = random.Random(f"{seed}/{leader}")
    server, witness = server_factory(), Witness()
    url = RunUrl.parse(f"{server.url}?run={run_name}")
    spec = make_spec(run_name, leader={"lease_s": 0.3}, workers={"heartbeat_s": 0.5})
    workers = {
        name: SyntheticWorker(url, name, Pace(step_s=step_s, tokens=tokens))
        for name, step_s, tokens in (("ada", 0.004, 64), ("bob", 0.006, 65), ("cyd", 0.011, 66))
    }
    for worker in workers.values():
        witness.watch(worker)
    with zygote() as mother:
        async with lives.at_work(workers):
            life = mother.begin(url, spec, tmp_path)
            for _ in range(DEATHS):
                await several_more(url)
                if leader != "lives":
                    await mother.kill(life)
                await asyncio.to_thread(server.kill)
                cut_short(server, generator)
                await asyncio.to_thread(server.start)
                if leader != "lives":
                    life = mother.begin(url, spec, tmp_path)
            await several_more(url, tmp_path)
            await mother.kill(life)
            async with bench(str(url), spec, directory=tmp_path) as run:
                await check_books(run, set(workers))
    assert not witness.broken
    assert len({timeline for timeline, *_ in witness.seen}) >= DEATHS


async def several_more(url: RunUrl, directory: Path | None = None) -> None:
    """Wait until several versions more are stored."""
    async with stored_run(url) as stored:
        target = sum(await stored.versions()) + 4

        async def reached() -> bool:
            return sum(await stored.versions()) >= target

        try:
            await wait_until(reached, f"{target} versions are stored")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{lives.last_words(directory) if directory else ''}") from None


async def check_books(run: Bench, names: set[str]) -> None:
    """Every worker takes part, its books agree, and those of former lives are closed without a rest."""

    def settled() -> bool:
        members = run.state.members.values()
        return {m.name for m in members if m.live and m.last_round} == names == {m.name for m in members}

    await wait_until(settled, "everybody takes part, former lives are closed")
    await run.settle()

    await wait_until(lambda: not any(any(m.imbalances.values()) for m in run.state.members.values()), "books agree")
    assert run.state.counts.get("ledger mismatches", 0) == 0
    for gone in run.state.departed:
        rest = gone.processed - gone.applied - gone.rejected - gone.discarded - gone.lost
        assert abs(rest) < 1e-6, gone


# --- the outage itself ------------------------------------------------------------------------------------


async def test_an_outage_is_said_once_and_shown(
    server_factory: ServerFactory, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers train on, /healthz fails meanwhile, and nobody floods the log."""
    caplog.set_level(logging.INFO, logger="anabranch")
    server = server_factory(appendfsync="always")
    async with bench(f"{server.url}?run={run_name}", make_spec(run_name)) as run:
        workers = [run.add(name, QUICK) for name in ("a", "b")]
        async with serve_page(run.synchronizer, PageOptions()) as address:
            await run.reach(2)
            assert await health(address) == 200
            steps = [worker.step for worker in workers]
            caplog.clear()
            await asyncio.to_thread(server.kill)

            async def unhealthy() -> bool:
                return await health(address) == 503

            await wait_until(unhealthy, "/healthz fails")
            await wait_until(
                lambda: all(w.step > s + 100 for w, s in zip(workers, steps, strict=True)), "they train without it"
            )
            await asyncio.to_thread(server.start)

            async def healthy() -> bool:
                return await health(address) == 200

            await wait_until(healthy, "/healthz is well again")
            await run.reach(max(run.versions(), default=2) + 2)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("anabranch")]
    assert 1 <= sum(line.startswith("cannot ") for line in lines) <= 3, "one for each of three processes' worth"


async def health(address: str) -> int:
    from aiohttp import ClientSession

    async with ClientSession() as session, session.get(f"{address}healthz") as response:
        return response.status


async def test_a_vanished_script_cache_is_reloaded(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        for _ in range(3):
            await run.reach(max(run.versions(), default=0) + 1)
            await run.redis.script_flush()
        await run.reach(max(run.versions()) + 1)
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_a_payload_that_ran_out_is_asked_for_again(run_url: str, run_name: str) -> None:
    """It does not count towards the quorum; sent again, it is applied once.

    A round that was opened when only one of the two had adopted its base is abandoned at its deadline: a short one.
    """
    spec = make_spec(run_name, rounds={"fragments": 1, "in_flight": 1, "quorum": 2})
    async with bench(run_url, spec) as run:
        run.add("steady", QUICK)
        forgetful = SyntheticWorker(run.url, "forgetful", QUICK)
        lost: list[Claim] = []

        async def runs_out(claim: Claim) -> None:
            await run.redis.delete(*chunk_keys(run.keys, claim))
            lost.append(claim)

        _lose_first_upload(forgetful, runs_out, lost)
        run.workers["forgetful"] = forgetful
        run.tasks["forgetful"] = run._group.create_task(forgetful.run(), name="worker forgetful")
        await wait_until(lambda: run.tape("resend"), "it is asked again")
        await run.reach(2)
        assert len(lost) == 1
        applied = [(v["incarnation"], v["base"]) for m in run.tape("merged") for v in m["verdicts"] if v["applied"]]
        assert len(applied) == len(set(applied))
        assert run.state.counts.get("ledger mismatches", 0) == 0


def _lose_first_upload(worker: SyntheticWorker, lose: Callable[[Claim], Awaitable[None]], lost: list[Claim]) -> None:
    """The first payload of a contribution is gone before its message is sent."""

    def loses(life: Incarnation) -> None:
        outbox = life.outbox
        post = outbox._post

        async def post_without_payload(message: Message) -> None:
            if not lost and isinstance(message, Contribution):
                await lose(message.claim)
            await post(message)

        outbox._post = post_without_payload

    each_life(worker.client, loses)


# --- no room ----------------------------------------------------------------------------------------------

LIMIT = 24 << 20


async def test_a_full_server_opens_no_round_until_there_is_room(server_factory: ServerFactory, run_name: str) -> None:
    server = server_factory(maxmemory_bytes=LIMIT)
    spec = make_spec(run_name, workers={"heartbeat_s": 1.0})
    async with bench(f"{server.url}?run={run_name}", spec) as run:
        run.add("w", QUICK)
        await run.reach(1)

        async def noticed() -> bool:
            await fill(run, 0.85)  # again and again: what was merged meanwhile gave some of it back
            return run.state.full

        await wait_until(noticed, "it is noticed")
        await wait_until(lambda: not run.state.rounds, "rounds in flight are closed")
        assert "nearly full" in picture(run.synchronizer)["phase"]
        opened = len(run.tape("opened"))
        await fill(run, 1.0)
        worker = run.workers["w"]
        step = worker.step
        await wait_until(lambda: worker.step > step + 300, "it trains on while nothing can be written")
        assert len(run.tape("opened")) == opened
        assert not run.tape("gone"), "its heartbeats could not be written, either"
        for key in [key async for key in run.redis.scan_iter(match="ballast:*")]:
            await run.redis.delete(key)
        await wait_until(lambda: not run.state.full, "there is room again")
        await run.reach(max(run.versions()) + 2)
        assert not run.tape("gone")
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def fill(run: Bench, share: float) -> None:
    """Ballast until that share of the memory is used; 1.0: until the server refuses more."""
    from redis.exceptions import OutOfMemoryError

    while True:
        info = await run.redis.info("memory")
        if share < 1.0 and info["used_memory"] >= share * LIMIT:
            return
        size = 256 << 10 if share < 1.0 else 8 << 10
        try:
            await run.redis.set(f"ballast:{secrets.token_hex(8)}", b"x" * size)
        except OutOfMemoryError:
            return


async def test_a_standby_takes_over_while_the_server_is_full(server_factory: ServerFactory, run_name: str) -> None:
    server = server_factory(maxmemory_bytes=LIMIT)
    spec = make_spec(run_name, workers={"heartbeat_s": 1.0})
    async with bench(f"{server.url}?run={run_name}", spec) as run:
        run.add("w", QUICK)
        await run.reach(1)
        standby = Synchronizer(run.url)
        task = asyncio.create_task(standby.run(), name="standby")
        try:
            await wait_until(lambda: standby.standby_for, "it stands by")
            await fill(run, 1.0)
            run.synchronizer.end()
            await wait_until(lambda: standby.core is not None, "it leads")
            await wait_until(lambda: standby.core is not None and standby.core.state.full, "and opens nothing")
            async for key in run.redis.scan_iter(match="ballast:*"):
                await run.redis.delete(key)
            merged = max(f.version for f in standby.core.state.fragments) if standby.core is not None else 0

            def goes_on() -> bool:
                core = standby.core
                return core is not None and min(f.version for f in core.state.fragments) > merged

            await wait_until(goes_on, "rounds are merged again")
        finally:
            standby.end()
            await task
