"""A worker whose step is longer than the time between rounds answers from what it copied at its last boundary."""

from __future__ import annotations

from anabranch.workers.member.synthetic import Pace
from tests.harness import Bench, bench, make_spec
from tests.wait import wait_until

ROUNDS = {"fragments": 4, "inner_steps": 24, "grace_cap_s": 0.02, "grace_factor": 1.0}


async def test_a_slow_worker_takes_part(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name, rounds=ROUNDS)) as run:
        run.add("fast", Pace(step_s=0.02))
        slow = run.add("slow", Pace(step_s=0.2))  # a round opens about every 6 × 0.02 s
        await wait_until(lambda: _called(run, slow.client.incarnation) >= 12, "slow was called")
        called, merged = _called(run, slow.client.incarnation), 0
        for event in run.tape("merged"):
            merged += any(weight[0] == slow.client.incarnation for weight in event["weights"])
        # Waiting for its next boundary, it would reach a window of 0.02 s once in ten times.
        assert merged >= called / 2, f"{merged} of {called}"
        await run.settle()
        assert run.state.counts.get("ledger mismatches", 0) == 0


def _called(run: Bench, incarnation: int) -> int:
    return sum(incarnation in event["called"] for event in run.tape("opened"))


async def test_with_rebase_no_step_is_too_long(run_url: str, run_name: str) -> None:
    """A worker whose every step takes as long as twelve rounds on each fragment: nearly all of its work is merged."""
    spec = make_spec(
        run_name,
        rounds={"fragments": 2, "inner_steps": 4},
        workers={"adoption": "rebase", "rebase_above": 0.1, "codec": "bf16"},
    )
    async with bench(run_url, spec) as run:
        run.add("fast", Pace(step_s=0.01))
        await run.reach(1)
        glacier = run.add("glacier", Pace(step_s=0.5, tokens=100))

        def merged() -> bool:
            member = run.state.members.get(glacier.client.incarnation)
            return member is not None and min(member.account.applied) >= 500

        await wait_until(merged, "five of its steps are merged, in every fragment")
        member = run.state.members[glacier.client.incarnation]
        assert max(member.discarded) <= 0.1 * member.processed
        assert sum(member.account.rejected) == 0
        await run.settle()
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_a_step_longer_than_h_paced_steps_is_shown_and_not_waited_for(run_url: str, run_name: str) -> None:
    from anabranch.operate import status

    spec = make_spec(run_name, rounds={"fragments": 2, "inner_steps": 4}, workers={"adoption": "overwrite"})
    async with bench(run_url, spec) as run:
        run.add("fast", Pace(step_s=0.01))
        run.add("glacier", Pace(step_s=0.5))

        async def shown() -> bool:
            members = (await status(run.url)).get("members", [])
            return any(m["name"] == "glacier" and m["condition"] == "step too long for H" for m in members)

        async def complained() -> bool:
            members = (await status(run.url)).get("members", [])
            [said, other] = [next((m for m in members if m["name"] == name), None) for name in ("glacier", "fast")]
            return bool(said and other and "workers.adoption" in (said["complaint"] or "") and not other["complaint"])

        await wait_until(shown, "status says why the glacier is not called")
        await wait_until(complained, "and that its work is in vain, and which setting changes that")
        await run.reach(max(run.versions()) + 3)
