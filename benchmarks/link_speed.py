"""From which link speed on is this the right tool: time to a given loss, from measured curves and bytes moved.

    python -m benchmarks.link_speed    # docs/results/link_speed.json, docs/link_speed.svg, tables in experiments.md

The curves are those of docs/results/quality.jsonl (held-out loss over steps of the fastest worker); the bytes are
what a model of the given size would move. Nothing is sent. The loss to be reached is the one that the fastest machine
ends with when it trains alone: whoever takes longer than that machine has no use of the others. What is assumed
favours synchronous training:

- it moves two bytes per gradient in a ring, 2 (n − 1)/n times the model each way, overlaps all of that with its
  computation, and loses nothing to latency or to machines that come and go;
- every machine has the same link, and all of Anabranch's traffic passes through that of one of them, with the server:
  n contributions of two bytes per parameter in, n copies of the new model of four bytes out, once per H steps.

H is the smallest that the link carries, LEAST_H at least. Steps to the loss for an H between two measured ones lie on
a line over log H; beyond the largest, or where a run never reached the loss, nothing is claimed.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from anabranch.merge.codecs import encoded_bytes
from benchmarks.plots import CALLED, COLORS, drawing, svg
from benchmarks.quality import DOCS, MEASURED_H, RESULTS, done
from benchmarks.quality_report import Group, Record, baseline, groups, identity, mean_reach, rewrite
from benchmarks.quality_runs import SHIPPED, UNEQUAL, Config

OUT = DOCS / "results" / "link_speed.json"
LINKS = tuple(10 ** (7 + step / 6) for step in range(19))  # bits per second: 10 Mbit/s to 10 Gbit/s
SHOWN = LINKS[::3]
GRADIENT = encoded_bytes("bf16", 1)  # bytes per parameter
UP, DOWN = encoded_bytes(SHIPPED.workers.codec, 1), encoded_bytes("fp32", 1)
LEAST_H = 8
BASELINES = ("fastest_alone", "sync_dp", "sync_balanced")
WAYS = (*BASELINES, "decoupled")


@dataclass(frozen=True)
class Scene:
    """What is trained on which machines. What travels are the trained parameters alone."""

    name: str
    parameters: float
    step_s: float  # of the fastest machine
    speeds: tuple[float, ...] = UNEQUAL[4]

    def ring_s(self, link: float) -> float:
        """How long one all-reduce takes."""
        count = len(self.speeds)
        return 8 * 2 * (count - 1) / count * GRADIENT * self.parameters / link

    def cycle_s(self, link: float) -> float:
        """How long every fragment takes from and to everybody, once; a link carries both ways at the same time."""
        return 8 * len(self.speeds) * max(UP, DOWN) * self.parameters / link


SCENES = (
    Scene("125M parameters, 0.25 s a step", 125e6, 0.25),
    Scene("1.3B parameters, 1 s a step", 1.3e9, 1.0),
    Scene("adapters of 10M parameters, 1 s a step", 10e6, 1.0),
    Scene("125M parameters, 0.25 s a step, eight equal machines", 125e6, 0.25, (1.0,) * 8),
)


@dataclass(frozen=True)
class Measured:
    """How long until the loss is reached, in steps of the fastest machine; infinite where it never was."""

    loss: float
    fastest_alone: float
    sync_dp: float  # in steps of everybody, of which each lasts as long as the slowest machine's
    sync_balanced: float
    decoupled: Mapping[int, float]  # by H

    def at(self, inner_steps: float) -> float:
        """The same for an H that was not measured."""
        known = sorted(self.decoupled)
        if not known[0] <= inner_steps <= known[-1]:
            return math.inf
        high = next(h for h in known if h >= inner_steps)
        low = max(h for h in known if h <= inner_steps)
        if low == high or math.isinf(self.decoupled[high]):
            return self.decoupled[high]
        part = math.log(inner_steps / low) / math.log(high / low)
        return self.decoupled[low] + part * (self.decoupled[high] - self.decoupled[low])


def measured(records: Sequence[Record], speeds: tuple[float, ...]) -> Measured:
    """From the runs with these workers that differ from what is shipped in H alone, over the seeds that all have.

    Raises ValueError if some are missing.
    """
    all_groups = groups(records)
    found = {identity(group.first): group for group in all_groups}
    chosen: dict[int | str, Group | None] = {
        h: found.get(identity({"key": replace(Config(speeds=speeds), H=h).key, "config": "decoupled"}))
        for h in MEASURED_H
    }
    if first := chosen[LEAST_H]:
        chosen.update({name: baseline(all_groups, first, name) for name in BASELINES})
    lacking = [name for name in (*MEASURED_H, *BASELINES) if chosen.get(name) is None]
    by_seed = {name: group.by_seed() for name, group in chosen.items() if group}
    seeds = sorted(set.intersection(*(set(runs) for runs in by_seed.values()))) if by_seed else []
    if lacking or not seeds:
        what = f"H or baseline {lacking}" if lacking else "a seed that all have"
        raise ValueError(f"of {len(speeds)} workers {what} was not run: python -m benchmarks.quality --all")
    runs = {name: Group([of[seed] for seed in seeds]) for name, of in by_seed.items()}
    loss = statistics.fmean(runs["fastest_alone"].losses)
    times = {name: mean_reach(group, loss) for name, group in runs.items()}
    times["sync_dp"] *= min(speeds)
    alone, equal, balanced = (times[name] for name in BASELINES)
    return Measured(loss, alone, equal, balanced, {h: times[h] for h in MEASURED_H})


def row(scene: Scene, curves: Measured, link: float) -> dict[str, Any]:
    """Seconds to the loss over one link speed, by way, and the H that it takes; None: never, or not measured."""
    ring = scene.ring_s(link)
    inner_steps = max(float(LEAST_H), scene.cycle_s(link) / scene.step_s)
    seconds = {
        "fastest_alone": curves.fastest_alone * scene.step_s,
        "sync_dp": curves.sync_dp * max(scene.step_s / min(scene.speeds), ring),
        "sync_balanced": curves.sync_balanced * max(scene.step_s, ring),
        "decoupled": curves.at(inner_steps) * scene.step_s,
    }
    times = {f"{way}_s": round(time, 3) if math.isfinite(time) else None for way, time in seconds.items()}
    return {"scene": scene.name, "link_bits_per_s": round(link), "H": math.ceil(inner_steps), **times}


def best(row: Mapping[str, Any]) -> str:
    """The quickest way over that link."""
    return min(WAYS, key=lambda way: math.inf if row[f"{way}_s"] is None else row[f"{way}_s"])


def where_best(rows: Sequence[Mapping[str, Any]]) -> str:
    """Over which links Anabranch is the quickest, in a sentence."""
    links = [row["link_bits_per_s"] for row in rows if best(row) == "decoupled"]
    if not links:
        return "decoupled training is the quickest nowhere"
    low, high = ("" if links[end] == rows[end]["link_bits_per_s"] else _link(links[end]) for end in (0, -1))
    if low and high:
        return f"decoupled training is the quickest from {low} to {high}"
    return (
        f"decoupled training is the quickest {f'from {low} on' if low else f'up to {high}' if high else 'everywhere'}"
    )


def _link(bits_per_s: float) -> str:
    mega = float(f"{bits_per_s / 1e6:.2g}")
    return f"{mega:g} Mbit/s" if mega < 1000 else f"{mega / 1000:.3g} Gbit/s"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """One line per link speed that is shown, hours to the loss; the quickest in bold."""
    lines = ["| link | H | " + " | ".join(CALLED[way] for way in WAYS) + " |", "| --- " + "| --: " * 5 + "|"]
    for row in rows:
        if row["link_bits_per_s"] in {round(link) for link in SHOWN}:
            hours = [_hours(row[f"{way}_s"], best(row) == way) for way in WAYS]
            lines.append(f"| {_link(row['link_bits_per_s'])} | {row['H']} | " + " | ".join(hours) + " |")
    return "\n".join(lines)


def _hours(seconds: float | None, is_best: bool) -> str:
    if seconds is None:
        return "–"
    text = f"{seconds / 3600:.3g}"
    return f"**{text}**" if is_best else text


def plot(scenes: Mapping[Scene, Sequence[Mapping[str, Any]]]) -> str:
    """One panel per scene: hours over link speed, both logarithmic."""
    lines = math.ceil(len(scenes) / 2)
    drawn = drawing(11.0, 3.2 * lines)
    panels = list(drawn.subplots(lines, 2, squeeze=False).flat)
    for panel, (scene, rows) in zip(panels, scenes.items(), strict=False):
        for way in WAYS:
            points = [(r["link_bits_per_s"] / 1e6, r[f"{way}_s"] / 3600) for r in rows if r[f"{way}_s"] is not None]
            style = "--" if way == "fastest_alone" else "-"
            panel.plot(*zip(*points, strict=True), style, color=COLORS[way], label=CALLED[way])
        panel.set(xscale="log", yscale="log", title=scene.name, xlabel="link, Mbit/s", ylabel="hours to the loss")
        quickest = min(r["sync_balanced_s"] for r in rows) / 3600
        panel.set_ylim(quickest / 1.5, quickest * 60)
    panels[0].legend()
    return svg(drawn)


def main() -> None:
    records = done(RESULTS)
    scenes, parts = {}, []
    for scene in SCENES:
        curves = measured(records, scene.speeds)
        rows = scenes[scene] = [row(scene, curves, link) for link in LINKS]
        parts.append(f"**{scene.name}**, to {curves.loss:.3f}: {where_best(rows)}.\n\n{table(rows)}")
    text = "\n\n".join(parts)
    OUT.write_text(json.dumps([row for rows in scenes.values() for row in rows], indent=1) + "\n")
    (DOCS / "link_speed.svg").write_text(plot(scenes))
    rewrite(DOCS / "experiments.md", text, "link speed")
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
