"""Whose work counts: one fast worker and one N times slower, in virtual time (`python -m benchmarks.starvation`).

Writes docs/results/starvation.json: for each N, H and P the share of the slow worker's tokens that was merged, and
the share of rounds that it took part in. No gradients: only who is called, waited for and merged.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.merge.fragments import TensorSpec, plan_layout
from anabranch.spec import parse_spec
from anabranch.workers.member.synthetic import NumpyStore
from benchmarks import machine
from benchmarks.virtual import World

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "starvation.json"
SLOWER = (1, 2, 6, 13, 16, 20, 23, 32, 64, 128)
STEPS = ((8, 1), (8, 8), (8, 24), (24, 1), (24, 8), (24, 24), (4, 1), (4, 8), (4, 24))  # H, P
ADOPTIONS = (("overwrite", 0.0), ("rebase", 0.0), ("rebase", 0.1))
TOKENS = 128
LEAST = 600.0  # steps of the fast worker
SLOW_STEPS = 30  # and at least so many of the slow one


@dataclass
class Steady:
    """A worker that trains on nothing: its books are what is looked at."""

    store: NumpyStore

    def step(self, share_done: float) -> tuple[int, float]:
        return TOKENS, 1.0


def run(slower: int, inner_steps: int, fragments: int, workers: Mapping[str, Any]) -> dict[str, Any]:
    """One run; what became of the slow worker's tokens."""
    spec = parse_spec(
        {
            "rounds": {
                "fragments": fragments,
                "inner_steps": inner_steps,
                "in_flight": max(2, -(-fragments // inner_steps)),  # or fragments would have no turn
            },
            "workers": {"heartbeat_s": 1000.0, **workers},
        }
    )
    layout = plan_layout([TensorSpec(f"t{i}", (1,)) for i in range(24)], fragments)
    theta = [NumpyStore(layout).initial(i) for i in range(fragments)]
    rounds: list[bool] = []
    world = World(spec, layout, theta, max(LEAST, SLOW_STEPS * slower) + 1e-6)
    world.on_merged = lambda merged: rounds.append(any(v.incarnation == 2 and v.applied for v in merged.verdicts))
    for name, step_s in (("fast", 1.0), ("slow", float(slower))):
        world.add(name, step_s, Steady(NumpyStore(layout)))
    world.run()
    world.finish()
    if world.notes:
        raise AssertionError(f"the books do not add up: {world.notes[:3]}")
    fast, slow = (round(world.share_of(worker), 4) for worker in world.workers)
    return {
        "slower": slower, "H": inner_steps, "P": fragments, **workers, "merged_share": slow,
        "fast_merged_share": fast, "rounds_share": round(sum(rounds) / max(1, len(rounds)), 4), "rounds": len(rounds),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slower", type=int, nargs="*", default=SLOWER)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = []
    sys.stdout.write("adoption   above    H   P  slower  merged  rounds  fast merged\n")
    for adoption, above in ADOPTIONS:
        for inner_steps, fragments in STEPS:
            for slower in options.slower:
                row = run(slower, inner_steps, fragments, {"adoption": adoption, "rebase_above": above})
                rows.append(row)
                sys.stdout.write(
                    f"{adoption:9}  {above:5}  {inner_steps:3} {fragments:3} {slower:7}  {row['merged_share']:6.1%}"
                    f"  {row['rounds_share']:6.1%}  {row['fast_merged_share']:6.1%}\n"
                )
                sys.stdout.flush()
    record = {"processor": machine.processor(), "cores": machine.cores(), "rows": rows}
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
