"""How fast contributions are merged: GB/s of delta bytes, against naive numpy in the same run.

    python -m benchmarks.merge_speed [--out docs/results/merge_speed.json] [--elements 16777216] [--workers 4]

Absolute figures belong to the machine and its mood; the ratio to naive numpy, taken in turns, travels.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from anabranch.merge.average import MergeRules, Rule, merge_fragment
from anabranch.merge.fragments import Fragment, TensorSpec, plan_layout
from benchmarks.machine import cores, processor

Vector = NDArray[np.float32]
RULES: tuple[Rule, ...] = ("average", "radial")


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/results/merge_speed.json"))
    parser.add_argument("--elements", type=int, default=1 << 24, help="float32 elements of the fragment, about")
    parser.add_argument("--workers", type=int, default=4, help="contributors")
    parser.add_argument("--repeats", type=int, default=9, help="the best of so many is reported")
    args = parser.parse_args()

    fragment = _fragment(args.elements)
    rng = np.random.default_rng(0)
    deltas = [rng.standard_normal(fragment.size, dtype=np.float32) for _ in range(args.workers)]
    weights = [1.0 + worker for worker in range(args.workers)]
    result = {
        "benchmark": "merge_speed",
        "processor": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "workers": args.workers,
        "elements": fragment.size,
        "delta_bytes": 4 * fragment.size * args.workers,
        "repeats": args.repeats,
        "gb_per_s": {rule: _measure(rule, fragment, deltas, weights, args.repeats) for rule in RULES},
    }
    _report(result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


def _fragment(elements: int) -> Fragment:
    """Matrices and vectors as a transformer has them, `elements` in all (about)."""
    width = max(16, int((elements / 12) ** 0.5))
    shapes = {
        "qkv": (3 * width, width),
        "proj": (width, width),
        "up": (4 * width, width),
        "down": (width, 4 * width),
    }
    tensors = [TensorSpec(name, shape) for name, shape in shapes.items()]
    return plan_layout([*tensors, TensorSpec("norm1", (width,)), TensorSpec("norm2", (width,))], 1).fragments[0]


def _measure(
    rule: Rule, fragment: Fragment, deltas: Sequence[Vector], weights: Sequence[float], repeats: int
) -> dict[str, float]:
    rules = MergeRules(rule, rule)
    naive = {"average": _naive_average, "radial": _naive_radial}[rule]
    out = np.zeros(fragment.size, np.float32)
    with ThreadPoolExecutor(2) as pool:
        ways: dict[str, Callable[[], object]] = {
            "naive": lambda: naive(fragment, deltas, weights),
            "threads_1": lambda: merge_fragment(fragment, deltas, weights, rules, out=out),
            "threads_2": lambda: merge_fragment(fragment, deltas, weights, rules, map_blocks=pool.map, out=out),
        }
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(repeats):  # in turns, so that a slow moment hits all
            for name, way in ways.items():
                start = time.perf_counter()
                way()
                best[name] = min(best[name], time.perf_counter() - start)
    gigabytes = 4 * fragment.size * len(deltas) / 1e9
    speeds = {name: round(gigabytes / seconds, 2) for name, seconds in best.items()}
    return speeds | {f"ratio_{name}": round(best["naive"] / best[name], 2) for name in ("threads_1", "threads_2")}


def _naive_average(fragment: Fragment, deltas: Sequence[Vector], weights: Sequence[float]) -> Vector:
    total = np.zeros(fragment.size, np.float32)
    for delta, weight in zip(deltas, weights, strict=True):
        total = total + np.float32(weight) * delta
    return total / np.float32(sum(weights))


def _naive_radial(fragment: Fragment, deltas: Sequence[Vector], weights: Sequence[float]) -> Vector:
    out = np.empty(fragment.size, np.float32)
    for _, start, stop in fragment.segments:
        parts = [delta[start:stop] for delta in deltas]
        norms = [float(np.sqrt(np.sum(np.square(part), dtype=np.float64))) for part in parts]
        direction = np.zeros(stop - start, np.float32)
        for part, weight, norm in zip(parts, weights, norms, strict=True):
            direction = direction + np.float32(weight / norm) * part
        mean = sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / sum(weights)
        length = float(np.sqrt(np.sum(np.square(direction), dtype=np.float64)))
        out[start:stop] = direction * np.float32(mean / length)
    return out


def _report(result: dict[str, object]) -> None:
    speeds = result["gb_per_s"]
    assert isinstance(speeds, dict)
    write = sys.stdout.write
    write(f"{result['processor']}, {result['cores']} cores; numpy {result['numpy']}; ")
    write(f"{result['workers']} contributors of {result['elements']} float32; GB/s of delta bytes\n\n")
    write(f"{'':8} {'naive':>7} {'1 thread':>9} {'ratio':>6} {'2 threads':>10} {'ratio':>6}\n")
    for rule, row in speeds.items():
        write(f"{rule:8} {row['naive']:7.2f} {row['threads_1']:9.2f} {row['ratio_threads_1']:6.2f} ")
        write(f"{row['threads_2']:10.2f} {row['ratio_threads_2']:6.2f}\n")


if __name__ == "__main__":
    main()
