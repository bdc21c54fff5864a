"""A worker process dies by SIGKILL: rounds go on, it leaves the live list, its unmerged tokens are lost."""

from __future__ import annotations

import os
import re
import signal
from typing import Any

from anabranch.orchestrator.clock import LONGEST_STEP_S
from anabranch.orchestrator.core.policies import EXPIRY_HEARTBEATS
from anabranch.orchestrator.core.state import Departed, Member
from anabranch.workers.member.synthetic import Pace
from tests.harness import Bench, bench, make_spec, process
from tests.wait import wait_until

HEARTBEAT_S = 0.5


def lives(run: Bench, name: str) -> list[Member]:
    return [member for member in run.state.members.values() if member.name == name]


def gone(run: Bench, incarnation: int) -> list[dict[str, Any]]:
    return [event for event in run.tape("gone") if event["incarnation"] == incarnation]


def closed(run: Bench, incarnation: int) -> list[Departed]:
    return [books for books in run.state.departed if books.incarnation == incarnation]


def holds_work(run: Bench, member: Member) -> bool:
    """Whether it has told of tokens trained on the newest versions: older ones may have been merged or discarded."""
    return member.adopted == run.versions() and sum(member.held) > 0


async def test_kill_minus_nine(run_url: str, run_name: str) -> None:
    spec = make_spec(run_name, workers={"heartbeat_s": HEARTBEAT_S, "codec": "fp32"})
    async with bench(run_url, spec) as run:
        run.add("survivor", Pace(step_s=0.01))
        await run.reach(1)
        with process("worker", run_url, "--name", "victim") as victim:
            await wait_until(lambda: any(m.last_round for m in lives(run, "victim")), "the victim takes part")
            await run.settle()  # so that what it trains on these versions cannot be merged any more
            await wait_until(lambda: any(holds_work(run, m) for m in lives(run, "victim")), "it holds tokens")
            os.kill(victim.pid, signal.SIGKILL)
            killed = lives(run, "victim")[-1].incarnation
            await run.command("resume")
            merged = sum(run.versions())
            await wait_until(lambda: gone(run, killed), "the victim is gone")
        [end] = gone(run, killed)
        said = re.fullmatch(r"victim: no heartbeat for ([\d.]+) s", end["reason"])
        assert said is not None
        silent_s = float(said[1])  # rounded, and by the run's clock, which has a longest step however loaded we are
        assert EXPIRY_HEARTBEATS * HEARTBEAT_S - 0.05 <= silent_s <= 3 * HEARTBEAT_S + LONGEST_STEP_S + 0.05
        await wait_until(lambda: closed(run, killed), "its books are closed")
        [books] = closed(run, killed)
        assert books.lost > 0
        assert books.processed == books.applied + books.rejected + books.discarded + books.lost
        await wait_until(lambda: sum(run.versions()) > merged + 4, "rounds go on")
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_restarted_under_its_name_it_takes_part_again(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("steady")
        run.add("flaky")
        await wait_until(lambda: any(m.last_round for m in lives(run, "flaky")), "flaky takes part")
        run.kill("flaky")
        killed = lives(run, "flaky")[-1].incarnation
        await wait_until(lambda: closed(run, killed), "flaky's books are closed")
        run.add("flaky")
        await wait_until(
            lambda: any(m.last_round and m.incarnation > killed for m in lives(run, "flaky")),
            "it takes part again",
        )
