"""One worker, one known outer gradient: the global model moves by exactly the outer step."""

from __future__ import annotations

import numpy as np

from anabranch.merge.outer import OuterOptimizer
from anabranch.workers.member.synthetic import Pace
from tests.harness import ScriptedStore, bench, make_spec, scripted


async def test_theta_moves_by_exactly_the_outer_step(run_url: str, run_name: str) -> None:
    spec = make_spec(run_name, rounds={"quorum": 1})
    script = scripted(0)
    async with bench(run_url, spec) as run:
        run.add("only", Pace(step_s=0.002), store=lambda layout: ScriptedStore(layout, script))
        await run.reach(0)
        start = [run.theta(p).copy() for p in range(2)]
        await run.reach(1)
        await run.settle()
        outer = OuterOptimizer(spec.merge.outer_lr, spec.merge.outer_momentum)
        for p in range(2):
            theta, buf = start[p], None
            for version in range(run.versions()[p]):
                theta, buf = outer.step(theta, buf, script(p, version, theta.size))
            np.testing.assert_array_equal(run.theta(p), theta)
        lr, mu = np.float32(spec.merge.outer_lr), np.float32(spec.merge.outer_momentum)
        gradient = script(0, 0, start[0].size)
        by_hand = start[0] - lr * (gradient + mu * gradient)
        np.testing.assert_allclose(outer.step(start[0], None, gradient)[0], by_hand, rtol=1e-6)


async def test_below_quorum_nothing_is_ever_merged(run_url: str, run_name: str) -> None:
    from anabranch.operate import status
    from tests.wait import wait_until

    spec = make_spec(run_name, rounds={"quorum": 2, "deadline_min_s": 0.5})
    async with bench(run_url, spec) as run:
        run.add("only", Pace(step_s=0.002))
        only = run.workers["only"]
        await wait_until(lambda: only.step > 200, "many rounds would have been due")
        assert run.versions() == [0, 0]
        assert not run.tape("opened"), "what cannot close is not opened"

        async def says_why() -> bool:
            shown = await status(run.url)
            return bool(shown["phase"] == "quorum 1/2")

        await wait_until(says_why, "`anabranch status` says quorum 1/2")
        run.add("second", Pace(step_s=0.002))
        await run.reach(1)
