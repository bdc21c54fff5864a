"""The torch-free member against a real synchronizer and a real server."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from anabranch.errors import LayoutMismatch, MemberRefused, UnsuitableServer
from anabranch.merge.fragments import Layout
from anabranch.model import Float32, layout_for
from anabranch.orchestrator.web.app import picture
from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.control import send_command
from anabranch.queue.streams import Entry, StreamReader
from anabranch.queue.url import RunUrl
from anabranch.workers.member.client import Client
from anabranch.workers.member.heart import Vitals
from anabranch.workers.member.identity import Identity, default_name
from anabranch.workers.member.synthetic import NumpyStore, Pace, SyntheticOptions, SyntheticWorker
from tests.conftest import ServerFactory
from tests.harness import Bench, ScriptedStore, bench, change_line, life_of, make_spec, stored_claims
from tests.wait import wait_until

QUICK = Pace(step_s=0.003)
IDLE = Pace(steps=0)


class Gate:
    """Holds a worker's reading of the broadcast back."""

    def __init__(self, worker: SyntheticWorker) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.close_after: Callable[[messages.Message], bool] = lambda _: False
        self.waiting = asyncio.Event()
        read = worker.client.line.read

        async def gated(broadcast: StreamReader, block_ms: int) -> list[Entry]:
            if not self.open.is_set():
                self.waiting.set()
                await self.open.wait()
            entries = await read(broadcast, block_ms)
            decoded = [messages.decode(entry.fields[b"m"], worker.client.line.keys.run) for entry in entries]
            if any(self.close_after(message) for message in decoded):
                self.open.clear()
            return entries

        change_line(worker.client, "read", gated)


def member_of(run: Bench, name: str) -> Any:
    return next((m for m in run.state.members.values() if m.name == name), None)


def adopted(worker: SyntheticWorker) -> list[int]:
    versions: list[int] = life_of(worker.client).books.report()["adopted"]
    return versions


async def books_agree(run: Bench) -> None:
    """Every member has read its last outcome, and its equation holds."""
    await wait_until(
        lambda: all(not any(m.imbalances.values()) for m in run.state.members.values()), "the books agree"
    )
    assert run.state.counts.get("ledger mismatches", 0) == 0


# --- joining ----------------------------------------------------------------------------------------------


async def test_a_joiner_adopts_the_global_model_before_it_trains(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("first", QUICK)
        await run.reach(2)
        await run.settle()
        found: list[list[Float32]] = []

        def train(store: NumpyStore, step: int) -> None:
            if not found:
                found.append([theta.copy() for theta in store.theta])

        late = run.add("late", QUICK, train=train, store=lambda layout: NumpyStore(layout, seed=99))
        await wait_until(lambda: late.step > 0, "the joiner trains")
        for fragment in range(2):
            np.testing.assert_array_equal(found[0][fragment], run.theta(fragment))
        assert late.client.tokens == run.state.tokens


async def test_it_waits_until_a_synchronizer_has_started_the_run(
    run_url: str, run_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.workers.member.telling.SAID_AFTER_S", 0.05)
    caplog.set_level(logging.INFO, logger="anabranch")
    worker = SyntheticWorker(RunUrl.parse(run_url), "early", QUICK)
    task = asyncio.create_task(worker.run(), name="early")
    try:
        await wait_until(lambda: "waiting: no run" in caplog.text, "it says what it waits for")
        async with bench(run_url, make_spec(run_name)) as run:
            await run.reach(1)
            assert member_of(run, "early") is not None
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_it_takes_no_part_on_a_server_that_may_evict(server_factory: ServerFactory) -> None:
    server = server_factory()
    url = RunUrl.parse(server.url)
    async with AsyncExitStack() as stack:
        client = Client(url, Identity("w"))
        await client.line.redis.config_set("maxmemory-policy", "allkeys-lru")
        with pytest.raises(UnsuitableServer, match="allkeys-lru"):
            await client.open(stack)


async def test_it_closes_all_its_connections_even_if_one_cannot_be_closed(run_url: str) -> None:
    client, closed = Client(RunUrl.parse(run_url), Identity("w")), list[str]()
    stack = AsyncExitStack()
    for name in ("redis", "pulse", "reading"):

        async def cancelled(name: str = name) -> None:
            closed.append(name)
            raise asyncio.CancelledError

        getattr(client.line, name).aclose = cancelled
    client.line.close_with(stack)
    with pytest.raises(asyncio.CancelledError):
        await stack.aclose()
    assert sorted(closed) == ["pulse", "reading", "redis"]


@asynccontextmanager
async def direct(run: Bench, name: str, layout: Layout | None = None) -> AsyncIterator[tuple[Client, Any]]:
    """A client and its `serve` task, without a training loop."""
    async with AsyncExitStack() as stack:
        client = Client(run.url, Identity(name))
        record = await client.open(stack)
        chosen = layout or record.layout or SyntheticOptions.parse(record.spec.task.options).layout(record.spec)
        task = asyncio.create_task(client.serve(record, NumpyStore(chosen), chosen), name=f"serve {name}")
        try:
            yield client, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_name_in_use_is_refused(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("taken", QUICK)
        await run.reach(0)
        async with direct(run, "taken") as (_, task):
            with pytest.raises(
                MemberRefused,
                match=r"'taken' is in use by a member heard a moment ago",
            ):
                await task
        await run.reach(run.versions()[0] + 1)


async def test_another_layout_is_refused(run_url: str, run_name: str) -> None:
    spec = make_spec(run_name)
    async with bench(run_url, spec) as run:
        run.add("first", QUICK)
        await run.reach(0)
        other = layout_for(spec, [("a", (3,)), ("b", (3,))])
        async with direct(run, "stranger", other) as (_, task):
            with pytest.raises(LayoutMismatch, match="'a'"):
                await task


async def test_a_repeated_registration_gives_one_incarnation(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        worker = run.add("only", QUICK)
        await run.reach(0)
        request = messages.Register(nonce=life_of(worker.client).nonce, name="only")
        await run.post("only", request)
        await wait_until(lambda: len(run.tape("joined")) == 2, "the repeat is answered")
        assert {event["incarnation"] for event in run.tape("joined")} == {worker.client.incarnation}


def test_made_up_names_differ() -> None:
    assert default_name() != default_name()


# --- gaps in the broadcast --------------------------------------------------------------------------------


async def _forget_entries(run: Bench, after: int, until: str) -> int:
    """Trim what was not read yet, up to the first entry of type `until`: a gap. Returns that one's number."""
    entries: Any = await run.redis.xrange(run.keys.broadcast)
    unread = [(entry, fields) for entry, fields in entries if int(fields[b"n"]) > after]
    kinds = [messages.decode(fields[b"m"], run.url.run).type for _, fields in unread]
    at = kinds.index(until, 1)
    await run.redis.xdel(run.keys.broadcast, *[entry for entry, _ in unread[:at]])
    return int(unread[at][1][b"n"])


async def test_after_a_gap_it_reads_the_state_again(
    run_url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the entry that reveals the gap announces a version that is superseded by now."""
    caplog.set_level(logging.DEBUG, logger="anabranch")
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("busy", QUICK)
        await run.reach(1)
        deaf = run.add("deaf", IDLE)
        gate = Gate(deaf)
        await wait_until(deaf.ready.is_set, "it has joined")
        gate.open.clear()
        await gate.waiting.wait()
        seen = life_of(deaf.client).books.last_read
        await run.reach(max(run.versions()) + 4)
        await run.settle()
        revealing = await _forget_entries(run, seen, "merged")
        gate.open.set()
        await wait_until(lambda: life_of(deaf.client).books.last_read > revealing, "it has read on")
        running = life_of(deaf.client)._fetcher._running
        await wait_until(lambda: all(task.done() for task in running.values()), "it has fetched everything")
        await wait_until(lambda: adopted(deaf) == run.versions(), "it holds the newest versions")
        assert deaf.store is not None
        for fragment in range(2):
            np.testing.assert_array_equal(deaf.store.base[fragment], run.theta(fragment))
        assert adopted(deaf) == run.versions()
        assert "broadcast went from" in caplog.text
        await books_agree(run)


async def test_a_damaged_record_of_the_run_is_waited_for(
    run_url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A joiner finds it so while nothing changes, and takes part once the leader has stored it again."""
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("a", Pace(step_s=0.005))
        await run.reach(1)
        await run.settle()
        fields: Any = await run.redis.hkeys(run.keys.state)
        damaged = ["head", *(f.decode() for f in fields if f.startswith((b"own:", b"fragment:")))]
        for field in damaged:
            await run.redis.hset(run.keys.state, field, b"\xc1 nothing")
        run.add("b", Pace(step_s=0.005))
        await wait_until(lambda: "for its members is damaged" in caplog.text, "it is said")
        for worker in run.workers.values():
            assert not worker.client.stopped
        await run.command("resume")
        held = run.versions()
        await wait_until(lambda: min(run.versions()) >= min(held) + 2, "it goes on")
        await wait_until(lambda: run.workers["b"].client.joined.is_set(), "the joiner takes part")
        assert not any(task.done() for task in run.tasks.values())


async def test_a_call_that_a_catch_up_overtook_is_still_answered(run_url: str, run_name: str) -> None:
    """Versions and outcomes are in `state`; calls are not."""
    spec = make_spec(run_name, rounds={"fragments": 1, "in_flight": 1, "inner_steps": 4, "deadline_min_s": 600.0})
    async with bench(run_url, spec) as run:
        worker = run.add("only", QUICK)
        gate = Gate(worker)
        await run.reach(1)
        await run.settle()
        gate.open.clear()
        await gate.waiting.wait()
        merged, seen = run.versions()[0], life_of(worker.client).books.last_read
        await run.post("only", messages.Register(nonce=life_of(worker.client).nonce, name="only"))
        await wait_until(lambda: len(run.tape("joined")) == 2, "an entry that will be missing")
        await send_command(run.redis, run.keys, "resume")
        await wait_until(lambda: bool(run.state.rounds), "it is called")
        await _forget_entries(run, seen, "resume")
        gate.open.set()
        await run.reach(merged + 1)


async def test_it_learns_outcomes_it_missed_from_the_state(run_url: str, run_name: str) -> None:
    spec = make_spec(run_name, rounds={"fragments": 1, "in_flight": 1, "inner_steps": 4})
    async with bench(run_url, spec) as run:
        worker = run.add("only", QUICK)
        gate = Gate(worker)
        await run.reach(1)
        gate.close_after = lambda message: isinstance(message, messages.Call)
        await gate.waiting.wait()
        missed = run.state.fragments[0].version + (1 if run.state.rounds else 0)
        await wait_until(lambda: run.state.fragments[0].version >= missed, "its contribution is merged")
        books = life_of(worker.client).books
        assert not books.has_outcome(0, missed - 1)
        await run.settle()
        entries: Any = await run.redis.xrevrange(run.keys.broadcast)
        kinds = {entry: messages.decode(fields[b"m"], run_name).type for entry, fields in entries}
        newest = next(entry for entry, kind in kinds.items() if kind == "merged")
        await run.redis.xdel(run.keys.broadcast, newest)
        gate.close_after = lambda _: False
        gate.open.set()
        await wait_until(lambda: books.has_outcome(0, missed - 1), "the outcome is known")
        await wait_until(lambda: adopted(worker) == run.versions(), "it adopted")
        assert run.tape("settled") == [], "nothing had to be sent again to be told"
        await send_command(run.redis, run.keys, "resume")
        await run.reach(missed + 2)
        await books_agree(run)


# --- payloads ---------------------------------------------------------------------------------------------


async def test_a_payload_that_vanished_is_sent_again(run_url: str, run_name: str) -> None:
    spec = make_spec(run_name, rounds={"deadline_min_s": 60.0})  # no other round asks again meanwhile
    async with bench(run_url, spec) as run:
        worker = run.add("only", QUICK)
        await run.reach(1)
        blobs = worker.client.line.blobs
        put, lost = blobs.put, 0

        async def leaky(owner: str, data: memoryview, codec: str, ttl_s: float) -> messages.Claim:
            nonlocal lost
            claim = await put(owner, data, codec, ttl_s)
            if lost < 2:
                lost += 1
                await blobs.delete(claim)
            return claim

        blobs.put = leaky  # type: ignore[method-assign]
        await wait_until(lambda: len(run.tape("resend")) >= 2, "the synchronizer asks for it again")
        await run.reach(run.versions()[0] + 3)
        assert run.tape("rejected") == []
        await books_agree(run)


async def test_a_joiner_waits_for_a_version_that_is_not_there(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("first", QUICK)
        await run.reach(1)
        await run.settle()
        theta, _ = await stored_claims(run.redis, run.keys, 0)
        blobs = RedisBlobs(run.redis, run.keys)
        data = await blobs.get(theta, 10**6)
        await blobs.delete(theta)
        late = run.add("late", QUICK)
        await wait_until(lambda: late.client.life is not None and adopted(late)[1] >= 0, "the other one is there")
        assert not late.ready.is_set()
        await blobs.put_again(theta, data, 60.0)
        await wait_until(late.ready.is_set, "it has both")


async def test_settled_payloads_are_deleted(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("only", QUICK)
        await run.reach(3)
        await run.settle()

        async def left() -> list[bytes]:
            return [key async for key in run.redis.scan_iter(count=1000) if b"blob:only:" in key]

        async def few() -> bool:
            return len(await left()) <= 4  # version 0 (its parts and their lists) runs out by itself

        await wait_until(few, "contributions are gone")
        assert all([await run.redis.pttl(key) > 0 for key in await left()])


async def test_a_nan_is_rejected_and_the_worker_goes_on(
    run_url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    bad = 2

    def script(fragment: int, version: int, size: int) -> Float32:
        nonlocal bad
        if version == 1 and fragment == 0 and bad:
            bad -= 1
            return np.full(size, np.nan, np.float32)
        return np.full(size, 0.1, np.float32)

    async with bench(run_url, make_spec(run_name, workers={"adoption": "overwrite"})) as run:
        worker = run.add("only", QUICK, store=lambda layout: ScriptedStore(layout, script))
        await run.reach(4)
        rejected = run.tape("rejected")
        assert len(rejected) == 2
        assert all("non-finite" in event["reason"] for event in rejected)
        assert all(np.isfinite(run.theta(p)).all() for p in range(2))
        assert [event["incarnation"] for event in run.tape("joined")] == [worker.client.incarnation]
        await books_agree(run)


# --- ending and coming back -------------------------------------------------------------------------------


async def test_closed_while_it_lives_it_joins_anew(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("steady", QUICK)
        frozen = run.add("frozen", QUICK)
        await wait_until(lambda: member_of(run, "frozen") and member_of(run, "frozen").last_round, "it takes part")
        first, life = frozen.client.incarnation, life_of(frozen.client)
        report = frozen.client._heart.report

        async def silence() -> None:
            return

        frozen.client._heart.report = silence  # type: ignore[method-assign]
        await wait_until(lambda: any(e["incarnation"] == first for e in run.tape("closed")), "its books are closed")
        frozen.client._heart.report = report  # type: ignore[method-assign]
        await wait_until(lambda: frozen.client.incarnation > first, "it has a new incarnation")
        assert life.number == first
        assert all(task.done() for task in (life._sending, *life._aside)), "nothing works for the old one any more"
        assert life_of(frozen.client).nonce != life.nonce
        await wait_until(
            lambda: member_of(run, "frozen") and member_of(run, "frozen").last_round, "it takes part again"
        )
        closed = next(d for d in run.state.departed if d.incarnation == first)
        assert closed.processed == pytest.approx(closed.applied + closed.rejected + closed.discarded + closed.lost)
        await books_agree(run)


async def test_a_farewell_leaves_no_lost_tokens(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("steady", QUICK)
        leaver = run.add("leaver", Pace(step_s=0.003, steps=60))
        await wait_until(
            lambda: leaver.step == 60 and any(m.last_round for m in run.state.members.values() if m.name == "leaver"),
            "it has trained and took part",
        )
        await leaver.client.leave("enough")
        await wait_until(lambda: any(d.name == "leaver" for d in run.state.departed), "its books are closed")
        run.kill("leaver")
        books = next(d for d in run.state.departed if d.name == "leaver")
        assert books.lost == 0
        assert books.processed == 60 * 64
        assert books.processed == pytest.approx(books.applied + books.rejected + books.discarded)
        assert books.applied > 0
        assert any(event["reason"] == "leaver left: enough" for event in run.tape("gone"))


async def test_the_end_of_the_run_ends_its_members(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        worker = run.add("only", QUICK)
        await run.reach(1)
        await send_command(run.redis, run.keys, "stop", by="test")
        await wait_until(run.tasks["only"].done, "the worker returned")
        run.tasks["only"].result()
        assert worker.client.stopped == "stopped (by test)"
        async with direct(run, "late") as (_, task):
            with pytest.raises(MemberRefused, match="the run has stopped"):
                await task


async def test_pausing_is_heard_also_by_joiners(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        first = run.add("first", QUICK)
        await run.reach(1)
        await run.settle()
        late = run.add("late", QUICK)
        await wait_until(lambda: first.client.paused and late.client.paused, "both know")
        steps = first.step
        await wait_until(lambda: first.step > steps + 5, "workers train on")
        await send_command(run.redis, run.keys, "resume")
        await wait_until(lambda: not (first.client.paused or late.client.paused), "both know")


async def test_reports_are_coalesced(run_url: str, run_name: str) -> None:
    """However quick the steps: at most ten heartbeats per second."""
    async with bench(run_url, make_spec(run_name)) as run:
        worker = run.add("only", Pace(step_s=0.001))
        await wait_until(lambda: worker.step > 200, "many steps are made")
        beats, steps = worker.client._heart.beats, worker.step
        await wait_until(lambda: worker.step > steps + 200, "many steps more")
        assert worker.client._heart.beats - beats < (worker.step - steps) / 5
        assert await run.redis.xlen(run.keys.progress("only")) <= 200


async def test_heartbeats_say_how_much_memory_the_process_has(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("only", QUICK)
        await run.reach(1)
        [shown] = picture(run.synchronizer)["members"]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # kilobytes on Linux
        assert peak / 10 < shown["memory_bytes"] <= peak * 1.01


def test_where_the_system_does_not_say_it_no_memory_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.read_text", missing)
    assert Vitals().fields()["memory_bytes"] == 0


# --- outages ----------------------------------------------------------------------------------------------


async def test_workers_train_on_while_the_server_is_away(server_factory: ServerFactory) -> None:
    server = server_factory(appendfsync="always")
    heartbeat_s = 1.0  # members are given up after three; a busy machine keeps nobody waiting that long
    async with bench(f"{server.url}?run=outage", make_spec("outage", workers={"heartbeat_s": heartbeat_s})) as run:
        workers = [run.add(name, QUICK) for name in ("a", "b")]
        await run.reach(2)
        await asyncio.to_thread(server.kill)
        killed_at, merged, steps = time.monotonic(), run.versions(), [worker.step for worker in workers]
        await wait_until(lambda: time.monotonic() - killed_at > 3.5 * heartbeat_s, "it is away for long")
        assert all(w.step > s + 50 for w, s in zip(workers, steps, strict=True)), "they train without a server"
        await asyncio.to_thread(server.start)
        await run.reach(max(merged) + 3)
        assert [len(run.tape("joined")), len(run.tape("gone"))] == [2, 0], "nobody was thought dead"
        await books_agree(run)


async def test_a_lost_connection_is_no_end(run_url: str, run_name: str) -> None:
    """CLIENT KILL cuts every connection of the run again and again."""
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("only", QUICK)
        await run.reach(1)
        for _ in range(3):
            for kind in ("normal", "pubsub"):
                await run.redis.client_kill_filter(_type=kind, skipme=True)
            await run.reach(run.versions()[0] + 1)
        await books_agree(run)
