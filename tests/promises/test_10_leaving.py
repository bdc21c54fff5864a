"""Leaving: SIGTERM finishes what is in flight and exits 0, a crash does not, a second Ctrl-C stops at once.

Real processes throughout. A leaving worker sends what it trained and has not sent yet as farewell contributions; a
synchronizer stores the merge that is under way, writes a checkpoint and gives the lease back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from anabranch.checkpoints.reading import read_checkpoint
from anabranch.queue.connection import connect
from anabranch.queue.keys import Keys
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace
from tests.conftest import ServerFactory
from tests.harness import Bench, bench, make_spec, process, stored_core
from tests.promises.long_step import LONG_S, QUICK_STEPS, TOKENS
from tests.wait import PATIENCE_S, wait_until

FAREWELL = "no worker advances: what is in hand is merged"


async def ends_with(child: subprocess.Popen[bytes], status: int, timeout_s: float = PATIENCE_S) -> None:
    await wait_until(lambda: child.poll() is not None, "the process has ended", timeout_s)
    assert child.returncode == status


async def says(child: subprocess.Popen[bytes], words: bytes, timeout_s: float = PATIENCE_S) -> None:
    """Wait until the process has written this."""
    assert child.stdout is not None
    os.set_blocking(child.stdout.fileno(), False)
    said = b""

    def heard() -> bool:
        nonlocal said
        assert child.stdout is not None
        said += child.stdout.read() or b""
        return words in said

    await wait_until(heard, f"it says {words!r}", timeout_s)


async def frozen(child: subprocess.Popen[bytes]) -> None:
    options = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    await wait_until(lambda: os.waitid(os.P_PID, child.pid, options), "it is frozen")


# --- workers ----------------------------------------------------------------------------------------------


async def leaves_in_a_pause(run: Bench, run_url: str, name: str) -> int:
    """A worker that has trained since its last contributions, of both fragments, gets SIGTERM; its incarnation.

    In a pause nothing is called for, so there is something left to send, whenever the signal comes.
    """
    with process("worker", run_url, "--name", name) as worker:
        await run.reach(1)
        await run.settle()

        def trained() -> list[int]:
            current = [m for m in run.state.members.values() if m.name == name and m.adopted == run.versions()]
            return [m.incarnation for m in current if min(m.held) > 0]

        await wait_until(trained, "it has trained on the newest versions")
        [incarnation] = trained()
        worker.send_signal(signal.SIGTERM)
        await ends_with(worker, 0)
    await wait_until(lambda: any(e["name"] == name for e in run.tape("gone")), "its farewell is read")
    fragments, verifying = run.state.fragments, run.state.verifying
    here = [incarnation in f.in_hand or (incarnation, f.index) in verifying for f in fragments]
    assert all(here), "its farewell contributions came before its farewell"
    return incarnation


async def test_the_last_workers_farewell_contributions_are_merged(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name, rounds={"quorum": 1})) as run:
        await leaves_in_a_pause(run, run_url, "w")
        await run.command("resume")
        await wait_until(lambda: run.tape("closed"), "its books are closed")
        books = run.state.departed[0]
        assert (books.left, books.lost) == (True, 0)
        assert books.processed == books.applied + books.rejected + books.discarded
        last_rounds = {e["round"] for e in run.tape("opened") if e["reason"] == FAREWELL}
        assert len(last_rounds) == 2, "one for each fragment"
        assert last_rounds <= {e["round"] for e in run.tape("merged")}
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_below_the_quorum_farewell_contributions_wait_for_the_others(run_url: str, run_name: str) -> None:
    """K = 2: what the leaving one sent is merged with the next contributions of somebody else."""
    async with bench(run_url, make_spec(run_name, rounds={"quorum": 2, "deadline_min_s": 0.5})) as run:
        run.add("stays")
        incarnation = await leaves_in_a_pause(run, run_url, "leaves")
        await run.command("resume")
        await wait_until(lambda: run.tape("closed"), "its books are closed")
        last = [e for e in run.tape("merged") if any(v["incarnation"] == incarnation for v in e["verdicts"])][-2:]
        assert all(len(e["verdicts"]) == 2 and all(v["applied"] for v in e["verdicts"]) for e in last)
        assert {e["fragment"] for e in last} == {0, 1}
        assert run.state.departed[0].lost == 0
        assert run.state.counts.get("ledger mismatches", 0) == 0


@pytest.mark.slow
async def test_a_step_that_is_longer_than_the_drain_is_dropped(run_url: str, run_name: str, tmp_path: Path) -> None:
    task = {"name": "tests.promises.long_step:LongStep", "options": {"marker": str(tmp_path / "in it")}}
    async with bench(run_url, make_spec(run_name, task=task, workers={"heartbeat_s": 5.0})) as run:
        with process("worker", run_url, "--name", "w", "--drain-s", "2") as worker:
            await wait_until((tmp_path / "in it").exists, "it is in its long step")
            asked_at = time.monotonic()
            worker.send_signal(signal.SIGTERM)
            await ends_with(worker, 0)
            assert 0.9 <= time.monotonic() - asked_at < LONG_S / 4, "it had half of the time, then said farewell"
        await wait_until(lambda: run.tape("closed"), "its books are closed")
        books = run.state.departed[0]
        assert books.left
        assert books.processed == QUICK_STEPS * TOKENS, "the step that was dropped is not counted"
        assert books.lost == 0


async def test_a_worker_that_cannot_join_ends_at_once(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        await wait_until(lambda: run.redis.exists(run.keys.spec), "the run is defined")
        inbox = run.keys.contributions("w")
    redis = connect(RunUrl.parse(run_url), name="test")
    try:
        with process("worker", run_url, "--name", "w", "--drain-s", "600") as worker:
            await wait_until(lambda: redis.exists(inbox), "it knocks, and nobody leads")
            worker.send_signal(signal.SIGTERM)
            await ends_with(worker, 0)
    finally:
        await redis.aclose()


async def test_a_second_ctrl_c_stops_at_once(server_factory: ServerFactory, run_name: str) -> None:
    """The first one waits for a server that does not answer."""
    server = server_factory()
    async with bench(f"{server.url}?run={run_name}", make_spec(run_name)) as run:
        with process("worker", str(run.url), "--name", "w", "--drain-s", "600") as worker:
            await run.reach(1)
            os.kill(server.pid, signal.SIGSTOP)
            try:
                worker.send_signal(signal.SIGINT)
                await says(worker, b"SIGINT: finishing what is in flight, in at most 600 s")
                assert worker.poll() is None
                worker.send_signal(signal.SIGINT)
                await ends_with(worker, 128 + signal.SIGINT)
            finally:
                os.kill(server.pid, signal.SIGCONT)


async def test_a_crash_is_no_farewell(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        crash = {"ANABRANCH_FAIL_AT": "worker before upload:3:raise"}
        with process("worker", run_url, "--name", "w", environment=crash) as worker:
            await ends_with(worker, 1)
        await wait_until(lambda: bool(run.tape("gone")), "it is given up")
        assert run.tape("gone")[0]["reason"].startswith("w: no heartbeat for")


async def test_a_crash_while_leaving_is_a_crash(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("first", Pace(step_s=0.005))
        await run.reach(1)
        await run.settle()  # no call: its first upload is its farewell
        crash = {"ANABRANCH_FAIL_AT": "worker before upload:1:raise"}
        with process("worker", run_url, "--name", "w", environment=crash) as worker:
            await wait_until(
                lambda: any(m.name == "w" and min(m.held) > 0 for m in run.state.members.values()), "it trains"
            )
            worker.send_signal(signal.SIGTERM)
            await ends_with(worker, 1)


# --- the synchronizer -------------------------------------------------------------------------------------


def spec_file(spec: Any, tmp_path: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(spec.to_toml())
    return str(path)


async def stored_versions(redis: Redis, keys: Keys) -> list[int]:
    core = await stored_core(redis, keys)
    return [fragment["version"] for fragment in core["fragments"]] if core is not None else []


async def test_a_synchronizer_finishes_the_merge_under_way_and_gives_the_lease_back(
    run_url: str, run_name: str, tmp_path: Path
) -> None:
    """It freezes itself between a merge and its commit, so that the signal finds it there."""
    spec = make_spec(run_name, leader={"lease_s": 600.0}, rounds={"in_flight": 1})
    url = RunUrl.parse(run_url)
    keys, redis = Keys(url.run), connect(url, name="test")
    directory = tmp_path / "run"
    arguments = ["orchestrator", run_url, "--spec", spec_file(spec, tmp_path), "--dir", str(directory), "--no-page"]
    environment = {"ANABRANCH_FAIL_AT": "after merge:4:stop"}
    try:
        with process(*arguments, environment=environment) as leader, process("worker", run_url, "--name", "w"):
            await frozen(leader)
            before = await stored_versions(redis, keys)
            leader.send_signal(signal.SIGTERM)
            leader.send_signal(signal.SIGCONT)
            await ends_with(leader, 0)
            merges = sum(await stored_versions(redis, keys)) - sum(before)
            # The commit may open one more round before the process gets round to its signal.
            assert merges in (1, 2), "that merge is stored, and none of a later round"
            assert not await redis.exists(keys.lease)
            assert read_checkpoint(directory).manifest["versions"] == await stored_versions(redis, keys)
            asked_at = time.monotonic()
            async with bench(run_url, spec, directory=directory) as successor:
                assert time.monotonic() - asked_at < PATIENCE_S, "at once, not when the lease of ten minutes runs out"
                await goes_on(successor)
    finally:
        await redis.aclose()


async def goes_on(run: Bench) -> None:
    await run.reach(max(run.versions()) + 1)
    assert {m.name: m.incarnation for m in run.state.members.values()} == {"w": 1}, "nobody had to join again"
    assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_a_second_signal_stops_a_synchronizer_at_once(run_url: str, run_name: str, tmp_path: Path) -> None:
    spec = make_spec(run_name)
    arguments = ["orchestrator", run_url, "--spec", spec_file(spec, tmp_path), "--no-page"]
    environment = {"ANABRANCH_FAIL_AT": "after merge:2:stop"}
    with process(*arguments, environment=environment) as leader, process("worker", run_url, "--name", "w"):
        await frozen(leader)
        leader.send_signal(signal.SIGINT)
        leader.send_signal(signal.SIGTERM)
        leader.send_signal(signal.SIGCONT)
        await wait_until(lambda: leader.poll() is not None, "the process has ended")
        assert leader.returncode in {128 + signal.SIGTERM, 128 + signal.SIGINT}, "whichever was delivered second"
