"""Two workers through a real server give the same bits as a plain loop in one process."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.merge.average import MergeRules, merge_fragment
from anabranch.merge.outer import OuterOptimizer
from anabranch.merge.weights import token_weight
from anabranch.model import Float32
from anabranch.workers.member.synthetic import Pace, SyntheticOptions
from tests.harness import ScriptedStore, bench, make_spec, same_bits, scripted, send_everything_twice
from tests.wait import wait_until

ROUNDS = 4
WORKERS = ("ada", "bob")


@pytest.mark.parametrize("slow", [0, 1], ids=["ada arrives last", "bob arrives last"])
async def test_bits_equal_a_plain_loop_whatever_the_order(run_url: str, run_name: str, slow: int) -> None:
    rounds = {"quorum": "all", "in_flight": 2, "deadline_min_s": 30.0}
    spec = make_spec(run_name, rounds=rounds, workers={"adoption": "overwrite"})  # the script knows no carried work
    layout = SyntheticOptions.parse(spec.task.options).layout(spec)
    async with bench(run_url, spec) as run:
        for number, name in enumerate(WORKERS):
            pace = Pace(step_s=0.012 if number == slow else 0.003, tokens=64 + number)
            worker = run.add(name, pace, store=lambda lay, n=number: ScriptedStore(lay, scripted(n)))
            send_everything_twice(worker.client)
        await run.reach(0)
        start = [run.theta(p).copy() for p in range(2)]
        await run.reach(ROUNDS)
        await run.settle()
        merges = {(m["fragment"], m["version"]): m for m in run.tape("merged")}
        names = {m.incarnation: m.name for m in run.state.members.values()}
        for p, fragment in enumerate(layout.fragments):
            theta, buf = start[p], None
            for version in range(1, run.versions()[p] + 1):
                theta, buf = _plain_step(fragment, merges[p, version], names, theta, buf, spec)
                if version == run.versions()[p]:
                    await same_bits(run, p, theta, buf)
        both = [m for m in merges.values() if len(m["weights"]) == 2]
        assert len(both) >= ROUNDS, "most rounds merged both workers"
        await wait_until(lambda: not run.state.verifying, "duplicates are read")
        assert run.state.counts.get("ledger mismatches", 0) == 0


def _plain_step(
    fragment: Any, merge: dict[str, Any], names: dict[int, str], theta: Float32, buf: Float32 | None, spec: Any
) -> tuple[Float32, Float32]:
    """The algorithm without anything around it: average what the tape says took part, take the outer step."""
    parts = sorted((names[incarnation], tokens, steps) for incarnation, tokens, steps, _ in merge["weights"])
    deltas = [
        scripted(WORKERS.index(name))(fragment.index, merge["version"] - 1, fragment.size) for name, *_ in parts
    ]
    weights = [token_weight(tokens, steps) for _, tokens, steps in parts]
    gradient = merge_fragment(fragment, deltas, weights, MergeRules())
    assert gradient is not None
    return OuterOptimizer(spec.merge.outer_lr, spec.merge.outer_momentum).step(theta, buf, gradient)
