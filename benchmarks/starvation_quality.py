"""What carrying late work over does to the loss: `python -m benchmarks.starvation_quality`, 15 minutes of a core.

Writes docs/results/starvation_quality.json: the held-out loss of `overwrite` and of `rebase`, with slow workers
beside a fast one, and with four unequal ones. Runs are those of `benchmarks.quality`, shorter; seeds are paired.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine, quality_runs
from benchmarks.quality_runs import UNEQUAL, Config

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "starvation_quality.json"
SLOW = 1 / 16
SET_UPS: dict[str, tuple[tuple[float, ...], int]] = {  # speeds, H
    "fast alone": ((1.0,), 24),
    "fast + 1/16": ((1.0, SLOW), 24),
    "fast + 4 x 1/16": ((1.0, *(SLOW,) * 4), 24),
    "base": (UNEQUAL[4], 24),
    "h8": (UNEQUAL[4], 8),
}
POLICIES = (("overwrite", 0.0), ("rebase", 0.1), ("rebase", 0.0))


def run(set_up: str, adoption: str, above: float, seed: int, steps: int) -> dict[str, Any]:
    speeds, inner_steps = SET_UPS[set_up]
    config = Config(speeds=speeds, H=inner_steps, P=8, adoption=adoption, rebase_above=above, seed=seed, steps=steps)
    record = quality_runs.run(config)
    return {
        "set_up": set_up, "adoption": adoption, "rebase_above": above, "workers": len(speeds), "H": inner_steps,
        "P": 8, "steps": steps, "seed": seed, "heldout_loss": round(record["heldout_loss"], 4),
        "merged_share": round(record["merged_share"], 3),
    }  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[30, 31, 32, 33])
    parser.add_argument("--set-ups", nargs="*", default=list(SET_UPS), choices=SET_UPS)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    rows = []
    for set_up in options.set_ups:
        for adoption, above in POLICIES if set_up != "fast alone" else POLICIES[:1]:
            for seed in options.seeds:
                rows.append(run(set_up, adoption, above, seed, options.steps))
                sys.stdout.write(f"{set_up:16} {adoption:9} {above:3} {seed:3}  {rows[-1]['heldout_loss']:.4f}\n")
                sys.stdout.flush()
    record = {"processor": machine.processor(), "cores": machine.cores(), "rows": rows}
    options.out.write_text(json.dumps(record, indent=0) + "\n")


if __name__ == "__main__":
    main()
