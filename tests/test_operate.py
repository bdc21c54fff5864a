"""What an operator sees and does from anywhere."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from anabranch.errors import ServerUnreachable, SpecError, UsageError
from anabranch.operate import command, obeyed, status
from anabranch.orchestrator.saving import NO_PLACE
from anabranch.queue.control import send_command
from anabranch.queue.keys import Keys
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace
from tests.harness import bench, make_spec
from tests.wait import wait_until

QUICK = Pace(step_s=0.003)


async def test_a_run_that_is_not_there_is_said_to_be_so(run_url: str, run_name: str) -> None:
    shown = await status(RunUrl.parse(run_url))
    assert shown["phase"].startswith(f"no run {run_name!r} on this server; there ")
    assert shown["run"] == run_name
    assert not shown["leader"]


async def test_status_shows_members_ledger_and_events(run_url: str, run_name: str) -> None:
    url = RunUrl.parse(run_url)
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(2)

        async def merged() -> bool:
            return bool((await status(url)).get("tokens"))

        await wait_until(merged, "the picture is stored")
        shown = await status(url)
        assert shown["leader"]
        assert shown["phase"] == "training"
        assert [member["name"] for member in shown["members"]] == ["w"]
        [row] = shown["ledger"]
        assert row["name"] == "w"
        assert row["applied"] > 0
        assert shown["events"]
        assert all(event["reason"] for event in shown["events"])


async def test_without_a_leader_status_says_so(run_url: str, run_name: str) -> None:
    url = RunUrl.parse(run_url)
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)

        async def stored() -> bool:
            return (await status(url))["leader"] is True

        await wait_until(stored, "the picture is stored")
    shown = await status(url)
    assert (shown["leader"], shown["phase"]) == (False, "no synchronizer leads this run")


async def test_a_command_is_obeyed_and_signed(run_url: str, run_name: str) -> None:
    url, said = RunUrl.parse(run_url), list[str]()
    async with bench(run_url, make_spec(run_name)) as run:
        await obeyed(url, "set", said.append, key="rounds.quorum", value=2)
        await obeyed(url, "pause", said.append, by="somebody")
        assert run.state.paused
        assert run.state.spec.rounds.quorum == 2
    assert said == [
        "rounds.quorum = 2 (by command line); only 0 live workers: no round opens until there are 2",
        "paused (by somebody)",
    ]


async def test_a_change_is_checked_against_the_runs_definition(run_url: str, run_name: str) -> None:
    """H = 4 is allowed with the default number of fragments and τ = 2; this run has more."""
    url = RunUrl.parse(run_url)
    async with bench(
        run_url, make_spec(run_name, rounds={"inner_steps": 32, "fragments": 16, "in_flight": 1})
    ) as run:
        with pytest.raises(SpecError, match="fragments = 16"):
            await command(url, "set", key="rounds.inner_steps", value=8)
        assert not run.tape("set")


async def test_what_the_leader_refuses_is_an_error(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        identity = await send_command(run.redis, run.keys, "set", key="rounds.quorum", value=0)
        await wait_until(lambda: run.tape("refused"), "it is refused")
        assert run.tape("refused")[0]["command"] == identity


@pytest.mark.parametrize("action", ["stop", "pause", "checkpoint"])
async def test_a_command_for_a_run_that_is_not_there_is_not_left_for_a_later_one(
    run_url: str, run_name: str, action: str
) -> None:
    url = RunUrl.parse(run_url)
    async with bench(run_url, make_spec(run_name)) as run:
        other = replace(url, run=f"{run_name}x")
        with pytest.raises(UsageError, match=rf"no run '{run_name}x' on this server; there are: .*\b{run_name}\b"):
            await obeyed(other, action, print)
        with pytest.raises(UsageError, match="no run"):
            await command(other, action)
        assert not await run.redis.exists(Keys(other.run).control)


async def test_after_a_stop_the_last_checkpoint_is_there(run_url: str, run_name: str, tmp_path: Path) -> None:
    url, said = RunUrl.parse(run_url), list[str]()
    async with bench(run_url, make_spec(run_name), directory=tmp_path) as run:
        run.add("w", QUICK)
        await run.reach(1)
        await obeyed(url, "checkpoint", said.append)
        assert (Path(said[0].removeprefix("checkpoint: ")) / "manifest.json").exists()
        await obeyed(url, "stop", said.append)
        assert said[1] == "stopped (by command line)"
        assert (Path(said[2].removeprefix("checkpoint: ")) / "manifest.json").exists()


async def test_without_a_place_for_checkpoints_that_is_the_answer(run_url: str, run_name: str) -> None:
    said = list[str]()
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        await obeyed(RunUrl.parse(run_url), "checkpoint", said.append)
    assert said == [f"no checkpoint was written: {NO_PLACE}"]


async def test_who_waits_for_a_synchronizer_is_told_so(
    run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.operate.SAY_EVERY_S", 0.05)
    url, said = RunUrl.parse(run_url), list[str]()
    async with bench(run_url, make_spec(run_name)):
        pass
    waiting = asyncio.create_task(obeyed(url, "pause", said.append))
    await wait_until(lambda: said, "it is said")
    assert said[0].startswith(f"no synchronizer leads run {run_name}: one does it as soon as it is started (for ")
    async with bench(run_url, make_spec(run_name)):
        await waiting
    assert said[-1] == "paused (by command line)"


async def test_a_stopped_run_stays_stopped(run_url: str, run_name: str) -> None:
    url = RunUrl.parse(run_url)
    async with bench(run_url, make_spec(run_name)) as run:
        await command(url, "stop")
        await run.synchronizer.stopped.wait()

        async def stored() -> bool:
            return bool((await status(url))["phase"] == "stopped")

        await wait_until(stored, "the picture is stored")
    assert (await status(url))["phase"] == "stopped"


async def test_commands_to_nowhere_are_server_errors() -> None:
    with pytest.raises(ServerUnreachable):
        await command(RunUrl.parse("redis://127.0.0.1:1/0"), "pause")
