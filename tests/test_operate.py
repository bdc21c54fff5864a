"""What an operator sees and does from anywhere."""

from __future__ import annotations

import pytest

from anabranch.errors import ServerUnreachable
from anabranch.operate import command, status
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace
from tests.harness import bench, make_spec
from tests.wait import wait_until

QUICK = Pace(step_s=0.003)


async def test_a_run_that_is_not_there_is_said_to_be_so(run_url: str, run_name: str) -> None:
    shown = await status(RunUrl.parse(run_url))
    assert shown["phase"] == "no such run on this server"
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
    url = RunUrl.parse(run_url)
    async with bench(run_url, make_spec(run_name)) as run:
        await command(url, "set", key="rounds.quorum", value=2)
        await command(url, "pause", by="somebody")
        await wait_until(lambda: run.tape("announced"), "it is paused")
        assert run.state.paused
        assert run.state.spec.rounds.quorum == 2
        assert run.tape("set")[0]["reason"].endswith("(by command line)")
        assert run.tape("announced")[0]["reason"] == "paused (by somebody)"


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
