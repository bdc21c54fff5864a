"""The asyncio shell: leadership, commands, checkpoints, and what a process killed at a named point leaves."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anabranch.errors import CheckpointError, SpecError, UnsuitableServer
from anabranch.faults import POINTS, InjectedFault, armed
from anabranch.orchestrator.checkpoint import FOLDER, complete_checkpoints
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.orchestrator.tape import FILE_NAME
from anabranch.orchestrator.web.app import picture
from anabranch.queue import messages
from anabranch.queue.connection import connect
from anabranch.queue.control import send_command
from anabranch.queue.scripts import FencedWriter
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.conftest import ServerFactory
from tests.harness import Bench, bench, make_spec
from tests.wait import wait_until

ROOT = Path(__file__).parents[2]
QUICK = Pace(step_s=0.003)


def tape_file(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / FILE_NAME).read_text().splitlines()]


# --- leadership -------------------------------------------------------------------------------------------


async def test_a_second_synchronizer_waits_and_says_so(
    run_url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    async with bench(run_url, make_spec(run_name)) as run:
        second = Synchronizer(RunUrl.parse(run_url))
        task = asyncio.create_task(second.run(), name="second")
        await wait_until(lambda: second.standby_for is not None, "it is standby")
        assert second.standby_for == run.synchronizer.owner
        assert second.core is None
        assert picture(second)["phase"] == f"standby: {run.synchronizer.owner} leads"
        assert f"standby: run {run_name} is led by {run.synchronizer.owner}" in caplog.text
        second.end()
        await task


async def test_a_standby_takes_over_what_the_leader_left(run_url: str, run_name: str) -> None:
    spec = make_spec(run_name, leader={"lease_s": 0.4})
    second = Synchronizer(RunUrl.parse(run_url), spec)
    async with bench(run_url, spec) as run:
        run.add("w", QUICK)
        await run.reach(1)
        task = asyncio.create_task(second.run(), name="second")
        await wait_until(lambda: second.standby_for is not None, "it is standby")
    versions = run.versions()
    await wait_until(lambda: second.core is not None, "it leads")
    core = second.core
    assert core is not None
    assert [fragment.version for fragment in core.state.fragments] == versions
    second.end()
    await task


async def test_a_fenced_leader_stands_by_and_says_who_holds_the_run(
    run_url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    url = RunUrl.parse(run_url)
    first = Synchronizer(url, make_spec(run_name, leader={"lease_s": 0.3}))
    task = asyncio.create_task(first.run(), name="first")
    await wait_until(lambda: first.core is not None, "it leads")
    redis = connect(url, name="usurper")
    await redis.delete(first.keys.lease)
    await FencedWriter(redis, first.keys, "usurper").acquire(60.0)
    await wait_until(lambda: first.standby_for == "usurper", "it stands by")
    assert first.core is None
    assert "the run is held by 2:usurper" in caplog.text
    assert await redis.get(first.keys.lease) == b"usurper", "it did not release what is not its own"
    await redis.delete(first.keys.lease)
    await wait_until(lambda: first.core is not None, "it leads again")
    await redis.aclose()
    first.end()
    await task


async def test_an_unsuitable_server_is_refused(server_factory: ServerFactory) -> None:
    server = server_factory()
    url = RunUrl.parse(server.url)
    redis = connect(url, name="test")
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    await redis.aclose()
    with pytest.raises(UnsuitableServer, match="noeviction"):
        await Synchronizer(url).run()


# --- continuing -------------------------------------------------------------------------------------------


async def test_another_definition_is_refused_naming_the_first_difference(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(0)
    other = make_spec(run_name, merge={"outer_lr": 0.3})
    with pytest.raises(SpecError, match=r"merge\.outer_lr = 0\.3 here, 0\.7 in the run"):
        await Synchronizer(RunUrl.parse(run_url), other).run()


async def test_a_run_without_a_model_takes_another_definition_and_dismisses_who_waits(
    run_url: str, run_name: str
) -> None:
    """A worker of the old one may be here already, asked for version 0 or not."""
    async with bench(run_url, make_spec(run_name)) as run:
        for name in ("asked", "waits"):
            await run.post(name, messages.Register(nonce=name[0].encode() * 16, name=name, can_init=True))
            await run.redis.publish(run.keys.knock, name)
            await wait_until(lambda name=name: name in {m.name for m in run.state.members.values()}, "it is a member")
    other = make_spec(run_name, rounds={"fragments": 3})
    async with bench(run_url, other) as again:
        await wait_until(lambda: len(again.tape("gone")) == 2, "both are dismissed")
        assert again.tape("redefined")[0]["reason"].endswith("rounds.fragments = 3 now, 2 before")
        assert [event["reason"].partition(" was turned away")[0] for event in again.tape("gone")] == [
            "asked",
            "waits",
        ]
        assert len(again.tape("init asked")) == 1, "nobody of before is asked for version 0 again"
        again.add("new", QUICK)
        await again.reach(1)
        assert len(again.versions()) == 3


async def test_a_mutable_setting_continues_as_stored(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        await send_command(run.redis, run.keys, "set", key="rounds.quorum", value=3)
        await wait_until(lambda: run.tape("set"), "the setting changed")
    async with bench(run_url, make_spec(run_name, rounds={"quorum": 1})) as again:
        assert again.state.spec.rounds.quorum == 3


async def test_beside_checkpoints_no_new_model_is_begun(run_url: str, run_name: str, tmp_path: Path) -> None:
    async with bench(run_url, make_spec(run_name), directory=tmp_path) as run:
        run.add("w", QUICK)
        await run.reach(1)
        await send_command(run.redis, run.keys, "checkpoint")
        await wait_until(lambda: complete_checkpoints(tmp_path), "a checkpoint is written")
    redis = connect(RunUrl.parse(run_url), name="test")
    await redis.flushall()
    await redis.aclose()
    init = tmp_path / "init.safetensors"
    with pytest.raises(CheckpointError, match=r"--init .* would begin a new model, but .* is a checkpoint of run"):
        await Synchronizer(RunUrl.parse(run_url), make_spec(run_name), directory=tmp_path, init=init).run()


async def test_a_member_with_versions_keeps_an_emptied_server_from_a_new_birth(run_url: str, run_name: str) -> None:
    spec = make_spec(run_name)
    async with bench(run_url, spec) as run:
        run.add("w", QUICK)
        await run.reach(1)
    redis = connect(RunUrl.parse(run_url), name="test")
    await redis.flushall()
    await redis.aclose()
    async with bench(run_url, spec) as run:
        await run.post("old", messages.Register(nonce=bytes(16), name="old"))

        async def registered() -> bool:
            await run.redis.publish(run.keys.knock, "old")  # a knock before anybody listens is lost
            return bool(run.state.members)

        await wait_until(registered, "the old worker registered")
        incarnation = next(iter(run.state.members))
        report = messages.Progress(
            incarnation=incarnation, steps=5, step_s=0.1, adopted=[3, 3], held=[0, 0], processed=5,
            discarded=[0, 0], pending=[0, 0], read=0,
        )  # fmt: skip
        await run.redis.xadd(run.keys.progress("old"), {"m": messages.encode(report, run_name)})
        await wait_until(lambda: run.state.orphaned, "it is understood")
        assert "the server lost this run" in picture(run.synchronizer)["phase"]
        run.add("new", QUICK)
        await wait_until(lambda: any(m.name == "new" for m in run.state.members.values()), "a new worker joined")
        assert not run.state.born


async def test_version_0_can_come_from_a_file(run_url: str, run_name: str, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    tensors = {f"tensor.{i}": np.full((64,), float(i), np.float32) for i in range(4)}
    save_file(tensors, tmp_path / "init.safetensors")
    async with bench(run_url, make_spec(run_name), init=tmp_path / "init.safetensors") as run:
        await run.reach(0)
        worker = run.add("w", Pace(steps=0))
        await wait_until(worker.ready.is_set, "it adopted")
        assert worker.store is not None
        assert sorted({float(v) for theta in worker.store.theta for v in theta}) == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("content", [None, b"not safetensors", b""])
async def test_an_unreadable_file_is_no_version_0(
    run_url: str, run_name: str, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "init.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"--init .*init\.safetensors: not a readable safetensors file"):
        await Synchronizer(RunUrl.parse(run_url), make_spec(run_name), init=path).run()


# --- commands ---------------------------------------------------------------------------------------------


async def command(run: Bench, action: str, **details: Any) -> None:
    await send_command(run.redis, run.keys, action, **details)


async def test_pause_opens_no_round_and_resume_does(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        worker = run.add("w", QUICK)
        await run.reach(1)
        await run.settle()
        merged, steps = run.versions(), worker.step
        await wait_until(lambda: worker.step > steps + 40, "the worker trains on")
        assert run.versions() == merged
        assert picture(run.synchronizer)["phase"] == "paused"
        await command(run, "resume")
        await run.reach(max(merged) + 1)
        assert [event["what"] for event in run.tape("announced")] == ["pause", "resume"]
        assert await run.redis.xlen(run.keys.control) == 0, "commands are consumed"


async def test_a_repeated_command_acts_once(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        wish = messages.Command(id="ab" * 8, action="pause")
        for _ in range(3):
            await run.redis.xadd(run.keys.control, {"m": messages.encode(wish, run_name)})

        async def read() -> bool:
            return await run.redis.xlen(run.keys.control) == 0

        await wait_until(read, "all are read")
        await wait_until(lambda: len(run.tape("announced")) == 1, "it acted once")


async def test_what_is_no_command_is_refused_and_consumed(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        await run.redis.xadd(run.keys.control, {"m": b"garbage"})
        await run.redis.xadd(run.keys.control, {"x": b"no message at all"})
        await run.redis.xadd(run.keys.control, {"m": messages.encode(messages.Pause(), run_name)})
        await wait_until(lambda: len(run.tape("refused")) == 3, "each is named")
        assert await run.redis.xlen(run.keys.control) == 0
        assert not run.state.paused


async def test_set_changes_what_may_change(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        await command(run, "set", key="rounds.quorum", value=2, by="test")
        await wait_until(lambda: run.state.spec.rounds.quorum == 2, "the quorum changed")
        await command(run, "set", key="rounds.fragments", value=4)
        await command(run, "set", key="rounds.quorum", value=0)
        await wait_until(lambda: len(run.tape("refused")) == 2, "the others are refused")
        fixed, impossible = [event["reason"] for event in run.tape("refused")]
        assert "rounds.fragments = 4: cannot change while the run goes on" in fixed
        assert "rounds.quorum" in impossible
        assert run.state.spec.rounds.quorum == 2
        reason = "rounds.quorum = 2 (by test); only 0 live workers: no round opens until there are 2"
        assert run.tape("set")[0]["reason"] == reason


async def test_stop_writes_a_last_checkpoint_and_tells_everybody(run_url: str, run_name: str, tmp_path: Path) -> None:
    async with bench(run_url, make_spec(run_name), directory=tmp_path) as run:
        worker = run.add("w", QUICK)
        await run.reach(1)
        await command(run, "stop")
        await run.synchronizer.stopped.wait()
        assert len(complete_checkpoints(tmp_path)) == 1
        await wait_until(lambda: worker.client.stopped, "the worker knows")
        merged = sum(run.versions())
        await wait_until(run.tasks["w"].done, "the worker ended")
        assert sum(run.versions()) == merged, "nothing was merged after the stop"


async def test_a_stop_without_a_model_or_a_directory_ends_at_once(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        await command(run, "stop")
        await wait_until(run.synchronizer.stopped.is_set, "it is stopped")


async def test_checkpoints_are_written_periodically_and_the_last_few_kept(
    run_url: str, run_name: str, tmp_path: Path
) -> None:
    spec = make_spec(run_name, checkpoint={"every_s": 0.1, "keep": 2})
    async with bench(run_url, spec, directory=tmp_path) as run:
        run.add("w", QUICK)
        seen: set[str] = set()

        def several() -> bool:
            seen.update(path.name for path in complete_checkpoints(tmp_path))
            return len(seen) >= 4

        await wait_until(several, "several checkpoints")
        await run.settle()
        await wait_until(lambda: len(complete_checkpoints(tmp_path)) == 2, "two are kept")
        newest = complete_checkpoints(tmp_path)[-1]
        assert newest.name >= max(seen)
    # One that was under way is finished in its thread: the end of a synchronizer without a drain waits for none.
    await wait_until(lambda: not list((tmp_path / FOLDER).glob(".*")), "nothing half-written stays")


async def test_the_tape_file_has_every_decision_in_order(run_url: str, run_name: str, tmp_path: Path) -> None:
    async with bench(run_url, make_spec(run_name), directory=tmp_path) as run:
        run.add("w", QUICK)
        await run.reach(3)
        await run.settle()
    lines = tape_file(tmp_path)
    kinds = [line["kind"] for line in lines]
    assert kinds[:3] == ["joined", "init asked", "born"]
    assert all(line["reason"] and line["time"] > 0 for line in lines)
    opened = [line["round"] for line in lines if line["kind"] == "opened"]
    closed = [line["round"] for line in lines if line["kind"] in {"merged", "abandoned"}]
    assert sorted(opened) == sorted(closed) == list(range(1, len(opened) + 1))
    merged = [(line["fragment"], line["version"]) for line in lines if line["kind"] == "merged"]
    assert len(set(merged)) == len(merged) == sum(run.versions())
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


async def test_stored_and_kept_tape_agree(run_url: str, run_name: str, tmp_path: Path) -> None:
    async with bench(run_url, make_spec(run_name), directory=tmp_path) as run:
        run.add("w", QUICK)
        await run.reach(2)
        await run.settle()
        entries: Any = await run.redis.xrange(run.keys.tape)
        stored = [messages.unpack(fields[b"e"]) for _, fields in entries]
        assert json.loads(json.dumps(stored)) == tape_file(tmp_path)[: len(stored)]


# --- keys stay bounded ------------------------------------------------------------------------------------


async def test_streams_and_books_of_the_departed_are_cleared_away(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("steady", QUICK)
        await run.reach(1)
        for number in range(3):
            name = f"visitor-{number}"
            visitor = run.add(name, Pace(step_s=0.003, steps=20))
            await wait_until(lambda v=visitor: v.step == 20, "it trained")
            await visitor.client.leave("done")
            await wait_until(lambda n=name: any(d.name == n for d in run.state.departed), "it left")
            run.kill(name)

        async def cleared() -> bool:
            keys = [key async for key in run.redis.scan_iter(count=1000)]
            fields: Any = await run.redis.hkeys(run.keys.state)
            ledger: Any = await run.redis.hkeys(run.keys.ledger)
            gone = {d.incarnation for d in run.state.departed}
            return (
                not any(key.endswith(b"contributions:visitor-0") for key in keys)
                and not any(field == f"member:{i}".encode() for field in fields for i in gone)
                and not any(field.startswith(f"{i}:".encode()) for field in ledger for i in gone)
            )

        await wait_until(cleared, "nothing of them is left")
        leading = run.synchronizer.leading
        assert leading is not None
        senders = leading._listening.inboxes._senders
        assert len(senders) == 3, "only `control` and the streams of who is here are read"


# --- named points -----------------------------------------------------------------------------------------


def test_every_fault_point_is_somewhere_in_the_code() -> None:
    passed: list[str] = []
    for path in (ROOT / "anabranch").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "fail_at":
                [argument] = node.args
                assert isinstance(argument, ast.Constant)
                passed.append(str(argument.value))
    assert sorted(passed) == sorted(POINTS), "each exactly once"


@pytest.mark.parametrize("point", sorted(p for p in POINTS if not p.startswith("worker")))
async def test_whatever_point_it_dies_at_the_run_continues_with_the_same_bits(
    run_url: str, run_name: str, tmp_path: Path, point: str
) -> None:
    """A fault is nothing that anybody handles: the synchronizer ends there, as a killed process would."""
    url, spec = RunUrl.parse(run_url), make_spec(run_name, leader={"lease_s": 0.3})
    worker = SyntheticWorker(url, "w", QUICK)
    first = Synchronizer(url, spec, directory=tmp_path)
    training = asyncio.create_task(worker.run(), name="worker")
    task = asyncio.create_task(first.run(), name="first")
    try:
        await wait_until(lambda: worker.client.tokens > 0, "something was merged")
        with armed(point, passage=2 if point != "during checkpoint" else 1):
            if point == "during checkpoint":
                redis = connect(url, name="test")
                await send_command(redis, first.keys, "checkpoint")
                await redis.aclose()
            with pytest.raises(InjectedFault, match=point):
                await task
        async with bench(run_url, spec, directory=tmp_path) as run:
            await run.reach(max(run.versions()) + 2)
            await run.settle()
            versions = [(e["fragment"], e["version"]) for e in tape_file(tmp_path) if e["kind"] == "merged"]
            assert len(versions) == len(set(versions))
            assert run.state.counts.get("ledger mismatches", 0) == 0
            assert not training.done()
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
