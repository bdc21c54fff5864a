"""Time of an optimizer step: `anabranch.Muon` against torch's Muon and against AdamW, on models of several sizes.

    python -m benchmarks.muon_speed [--seconds 3] [--out docs/results/muon_speed.json]

One thread, float32. torch's Muon takes matrices only, so there it is Muon for the hidden ones beside AdamW for the
rest. The gradients are real ones of the built-in model; a batch's forward and backward pass is timed beside them,
because what matters is the share of a training step. Compare figures of one run only.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from anabranch.workers.hidden import divide
from anabranch.workers.muon import Muon
from anabranch.workers.tasks.gpt import GPT, GPTTask
from benchmarks.machine import cores, processor

RESULTS = Path(__file__).parents[1] / "docs" / "results" / "muon_speed.json"
MODELS: dict[str, dict[str, Any]] = {
    "demo": {},
    "benchmark": {"layers": 3, "width": 64, "heads": 4, "context": 64, "batch": 2},
    "wide": {"layers": 4, "width": 512, "heads": 8},
}


class Split:
    """torch's Muon for hidden matrices, fused AdamW for the rest."""

    def __init__(self, model: GPT) -> None:
        hidden, rest = divide(model)
        self._both = (
            torch.optim.Muon(hidden, lr=1e-3, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=1e-3, fused=True),
        )

    def step(self) -> None:
        for optimizer in self._both:
            optimizer.step()  # type: ignore[no-untyped-call]


OPTIMIZERS: dict[str, Callable[[GPT], Any]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
    "torch": Split,
    "ours": Muon.of,
}


def milliseconds(work: Callable[[], object], seconds: float) -> float:
    """Median of as many repetitions as fit, after three that do not count."""
    for _ in range(3):
        work()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(taken) < 5:
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return 1000 * sorted(taken)[len(taken) // 2]


def measure(name: str, options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One row: milliseconds of a pass, and of a step of each optimizer."""
    torch.manual_seed(0)
    task = GPTTask(options)
    model = task.build_model()
    batch = next(task.batches(0, "w"))

    def passes() -> None:
        model.zero_grad(set_to_none=True)
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]

    row: dict[str, Any] = {"model": name, "parameters": sum(p.numel() for p in model.parameters())}
    row["tokens"] = batch.tokens
    row["passes_ms"] = round(milliseconds(passes, seconds), 3)
    for kind, make in OPTIMIZERS.items():
        row[f"{kind}_ms"] = round(milliseconds(make(model).step, seconds), 3)
    row["of_torch"] = round(row["ours_ms"] / row["torch_ms"], 3)
    row["longer_step"] = round((row["passes_ms"] + row["ours_ms"]) / (row["passes_ms"] + row["adamw_ms"]), 3)
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each figure")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = []
    columns = ("passes_ms", "adamw_ms", "torch_ms", "ours_ms", "of_torch", "longer_step")
    sys.stdout.write(f"{'model':10}{'parameters':>12}" + "".join(f"{c:>13}" for c in columns) + "\n")
    for name, model in MODELS.items():
        rows.append(row := measure(name, model, options.seconds))
        sys.stdout.write(f"{name:10}{row['parameters']:12,}" + "".join(f"{row[c]:13}" for c in columns) + "\n")
    record = {"processor": processor(), "cores": cores(), "threads": 1, "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
