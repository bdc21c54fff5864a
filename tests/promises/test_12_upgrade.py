"""Two neighbouring releases work together, in both directions; others are told what to install; a run is upgraded
while it goes on, as docs/upgrade.md says."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from anabranch._version import VERSION
from anabranch.errors import MalformedMessage
from anabranch.operate import status
from anabranch.queue import messages
from anabranch.queue.connection import connect
from anabranch.queue.keys import Keys
from anabranch.queue.records import RunRecord, read_run
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.harness import Bench, bench, make_spec, process
from tests.promises.lives import Stored, at_work, stored_run
from tests.promises.previous import NEXT, PREVIOUS, make_leaders_previous, make_next, make_previous, schema_of
from tests.wait import wait_until

#: What releases of each schema wrote, in hexadecimal, by type: they have to be read for ever after.
SPECIMENS: dict[str, list[str]] = json.loads((Path(__file__).parent / "schema_1.json").read_text())
QUICK = Pace(step_s=0.005)


@pytest.fixture
def next_release(monkeypatch: pytest.MonkeyPatch) -> None:
    make_next(monkeypatch)


def test_there_is_a_specimen_of_every_message_that_schema_1_has() -> None:
    assert set(SPECIMENS) == {kind for kind, message in messages.TYPES.items() if message.introduced == 1}


@pytest.mark.parametrize("kind", sorted(SPECIMENS))
@pytest.mark.parametrize("reader", ["this release", "the next one"])
def test_what_was_written_in_schema_1_is_read(kind: str, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reader == "the next one":
        make_next(monkeypatch)
        monkeypatch.setattr(messages.Progress, "since", {})  # what is made up there stands in the specimens
    assert SPECIMENS[kind], "a type that it had"
    for envelope in map(bytes.fromhex, SPECIMENS[kind]):
        message = messages.decode(envelope, msgpack.unpackb(envelope)["r"])
        assert message.type == kind


@pytest.mark.parametrize("kind", sorted(SPECIMENS))
def test_what_schema_1_can_say_is_written_as_it_was(kind: str) -> None:
    for envelope in map(bytes.fromhex, SPECIMENS[kind]):
        run = msgpack.unpackb(envelope)["r"]
        assert messages.encode(messages.decode(envelope, run), run) == envelope


@pytest.mark.usefixtures("next_release")
def test_a_newer_schema_is_used_only_for_what_needs_it() -> None:
    plain = messages.Pause()
    assert schema_of(messages.encode(plain, "r")) == PREVIOUS
    asking = messages.StateRequest(incarnation=1)
    assert schema_of(messages.encode(asking, "r")) == NEXT
    data = messages.encode(asking, "r", NEXT)
    assert messages.decode(data, "r") == asking


@pytest.mark.usefixtures("next_release")
def test_a_field_that_an_older_schema_does_not_have_is_left_out_and_refused_there() -> None:
    beat = messages.Progress(
        incarnation=1, steps=1, step_s=0.1, adopted=[], held=[], processed=1, discarded=[], pending=[],
        read=0, train_s=2.5,
    )  # fmt: skip
    newer, older = messages.encode(beat, "r", NEXT), messages.encode(beat, "r", PREVIOUS)
    assert (schema_of(newer), schema_of(older)) == (NEXT, PREVIOUS)
    assert messages.decode(newer, "r") == beat
    assert messages.decode(older, "r") == beat.model_copy(update={"train_s": 0.0})
    forged = msgpack.packb({**msgpack.unpackb(newer), "s": PREVIOUS})
    with pytest.raises(MalformedMessage, match="train_s: not in schema 1"):
        messages.decode(forged, "r")


# --- both directions --------------------------------------------------------------------------------------


def two_workers(url: RunUrl) -> dict[str, SyntheticWorker]:
    return {
        "previous": make_previous(SyntheticWorker(url, "previous", QUICK)),
        "current": SyntheticWorker(url, "current", QUICK),
    }


def lives(run: Bench) -> dict[str, int]:
    return {m.name: m.incarnation for m in run.state.members.values() if m.live}


async def both_take_part(run: Bench, rounds: int = 3) -> None:
    """Every fragment is merged so often of contributions of both, and nothing is refused."""

    def merged_of_both() -> list[int]:
        everybody = set(lives(run).values())
        return [
            e["fragment"]
            for e in run.tape("merged")
            if everybody == {v["incarnation"] for v in e["verdicts"] if v["applied"]}
        ]

    await wait_until(lambda: len(lives(run)) == 2, "both are members")
    before = [merged_of_both().count(p) for p in range(2)]
    await wait_until(
        lambda: all(merged_of_both().count(p) >= before[p] + rounds for p in range(2)), "both are merged"
    )
    assert not run.tape("refused")
    assert run.state.counts.get("ledger mismatches", 0) == 0


async def speaks(run: Bench | Stored, name: str) -> int:
    """Schema of a member's newest heartbeat."""
    newest: Any = await run.redis.xrevrange(run.keys.progress(name), count=1)
    [(_, fields)] = newest
    return schema_of(fields[b"m"])


async def record_of(run: Bench | Stored) -> RunRecord:
    record = await read_run(run.redis, run.keys)
    assert record is not None
    return record


@pytest.mark.usefixtures("next_release")
async def test_a_worker_of_the_previous_schema_in_a_run_of_the_current_one(run_url: str, run_name: str) -> None:
    spec = make_spec(run_name, workers={"heartbeat_s": 5.0})
    async with at_work(two_workers(RunUrl.parse(run_url))):
        async with bench(run_url, spec) as run:
            await both_take_part(run)
            before = lives(run)
            shown = await status(run.url)
            assert (shown["release"], shown["schema"]) == (VERSION, NEXT)
        async with bench(run_url, spec) as again:
            await both_take_part(again)
            assert lives(again) == before
            assert await speaks(again, "previous") == PREVIOUS
            assert await speaks(again, "current") == NEXT


@pytest.mark.usefixtures("next_release")
async def test_a_current_worker_under_a_synchronizer_of_the_previous_schema(
    run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(run_name, workers={"heartbeat_s": 5.0})
    make_leaders_previous(monkeypatch)
    async with at_work(two_workers(RunUrl.parse(run_url))):
        async with bench(run_url, spec) as run:
            await both_take_part(run)
            before = lives(run)
        async with bench(run_url, spec) as again:
            await both_take_part(again)
            assert lives(again) == before
            assert await speaks(again, "current") == PREVIOUS, "nothing that the synchronizer cannot read"


@pytest.mark.usefixtures("next_release")
async def test_under_a_previous_leader_a_member_that_spoke_newer_joins_again_and_is_understood(
    run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the order that docs/upgrade.md asks for: a run that has moved on gets an older synchronizer."""
    spec = make_spec(run_name)
    async with at_work({"w": SyntheticWorker(RunUrl.parse(run_url), "w", QUICK)}):
        async with bench(run_url, spec) as run:
            await run.reach(2)
            assert await speaks(run, "w") == NEXT
            [before] = lives(run).values()
        make_leaders_previous(monkeypatch)
        async with bench(run_url, spec) as older:
            await wait_until(lambda: any("schema 2" in e["reason"] for e in older.tape("refused")), "it says why")
            await wait_until(lambda: lives(older).get("w", 0) > before, "it joins again")
            await older.reach(max(older.versions()) + 2)
            assert older.state.counts.get("ledger mismatches", 0) == 0


@asynccontextmanager
async def led_by_previous(run_url: str, spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bench]:
    with monkeypatch.context() as patch:
        make_leaders_previous(patch)
        async with bench(run_url, spec) as run:
            yield run


# --- rolling ----------------------------------------------------------------------------------------------


async def stands_by(child: subprocess.Popen[bytes]) -> None:
    assert child.stdout is not None
    line = b""
    while b"standby: run" not in line:
        line = await asyncio.to_thread(child.stdout.readline)
        assert line, "it ended early"


async def goes_on(stored: Stored, rounds: int = 3) -> None:
    versions = await stored.versions()
    await stored.reach(max(versions) + rounds)
    assert await stored.count("ledger mismatches") == 0


async def live_members(stored: Stored) -> dict[str, int]:
    fields: dict[Any, Any] = await stored.redis.hgetall(stored.keys.state)
    records = [messages.unpack(value) for key, value in fields.items() if key.startswith(b"member:")]
    members = [record["member"] for record in records if record["member"]["live"]]
    return {member["register"]["name"]: member["incarnation"] for member in members}


@pytest.mark.usefixtures("next_release")
async def test_a_rolling_upgrade_and_a_step_back(
    run_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = RunUrl.parse(run_url)
    spec = make_spec(run_name, workers={"heartbeat_s": 5.0}, leader={"lease_s": 5.0})
    (tmp_path / "run.toml").write_text(spec.to_toml())
    command = ("orchestrator", run_url, "--spec", str(tmp_path / "run.toml"), "--no-page")
    current = process(*command, module="tests.promises.previous")
    async with stored_run(url) as stored, at_work(two_workers(url)):
        async with led_by_previous(run_url, spec, monkeypatch) as previous:
            await both_take_part(previous)
            before = lives(previous)
            upgraded = current.__enter__()
            await stands_by(upgraded)
        try:
            await goes_on(stored)
            record = await record_of(stored)
            assert (record.schema, record.release) == (PREVIOUS, VERSION), "as long as somebody may know no other"
            assert await live_members(stored) == before, "nobody had to join again"
            assert await speaks(stored, "current") == PREVIOUS
            upgraded.send_signal(signal.SIGTERM)
            await wait_until(lambda: upgraded.poll() == 0, "it gives the lease back")
        finally:
            current.__exit__(None, None, None)
        async with led_by_previous(run_url, spec, monkeypatch) as back:
            await both_take_part(back)
            assert lives(back) == before, "nobody had to join again"


@pytest.mark.usefixtures("next_release")
async def test_once_everybody_has_left_a_new_term_moves_the_run_on(
    run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, spec = RunUrl.parse(run_url), make_spec(run_name)
    async with at_work({"w": SyntheticWorker(url, "w", QUICK)}):
        async with led_by_previous(run_url, spec, monkeypatch) as previous:
            await previous.reach(1)
        async with bench(run_url, spec) as still:
            assert (await record_of(still)).schema == PREVIOUS, "w might know no other"
    async with bench(run_url, spec) as alone:
        await wait_until(lambda: not alone.state.members, "w is given up")
    async with bench(run_url, spec) as moved:
        assert (await record_of(moved)).schema == NEXT
        moved.add("newcomer", QUICK)
        await moved.reach(max(moved.versions()) + 1)
        assert await speaks(moved, "newcomer") == NEXT


# --- releases that do not fit -----------------------------------------------------------------------------


async def exit_of(child: subprocess.Popen[bytes]) -> tuple[int, str]:
    assert child.stdout is not None
    output = await asyncio.to_thread(child.stdout.read)
    return await asyncio.to_thread(child.wait), output.decode()


async def test_whoever_does_not_know_the_runs_schema_is_told_what_to_install(
    run_url: str, run_name: str, tmp_path: Path
) -> None:
    url, spec = RunUrl.parse(run_url), make_spec(run_name)
    (tmp_path / "run.toml").write_text(spec.to_toml())
    redis = connect(url, name="test")
    try:
        await redis.set(Keys(url.run).spec, RunRecord(spec, None, schema=4, release="9.8.7").pack())
        await redis.set(Keys(url.run).lease, "somebody", px=60_000)
    finally:
        await redis.aclose()
    told = f"the run speaks schema 4 (anabranch 9.8.7), this is anabranch {VERSION}, which speaks 1 to 1: "
    with (
        process("worker", run_url) as worker,
        process("orchestrator", run_url, "--spec", str(tmp_path / "run.toml"), "--no-page") as standby_,
    ):
        for child in (worker, standby_):
            code, output = await exit_of(child)
            assert code == 2
            assert told + "pip install anabranch==9.8.7" in output


async def test_a_message_of_an_unknown_schema_is_refused_with_what_to_install(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        body = messages.Farewell(incarnation=lives(run)["w"]).model_dump()
        envelope = {"s": 4, "t": "farewell", "r": run_name, "b": msgpack.packb(body), "g": b""}
        await run.send("w", msgpack.packb(envelope))
        await wait_until(lambda: run.tape("refused"), "it is on the tape")
        [refusal] = run.tape("refused")
        assert refusal["name"] == "w"
        assert f"schema 4; this release ({VERSION}) reads 1 to 1: install the same" in refusal["reason"]
        assert "pip install anabranch==" in refusal["reason"]
        await run.reach(max(run.versions()) + 1)
        assert "w" in lives(run), "what could not be read did nothing"
