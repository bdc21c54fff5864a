"""docs/quality.svg: held-out loss over virtual time, and how far variants are from balanced synchronous training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.plots import CALLED, COLORS, drawing, svg
from benchmarks.quality_report import Group, Record, baseline, excess, groups, interval, label


def plot(records: Sequence[Record], base: Record) -> str:
    """One SVG of two panels."""
    all_groups = groups(records)
    rows = [
        (
            label(group.first, base).removeprefix("decoupled: "),
            excess(group, baseline(all_groups, group, "sync_balanced")),
        )
        for group in all_groups
        if group.first["config"] in ("decoupled", "fastest_alone")
    ]
    rows = [(name, values) for name, values in rows if len(values) > 1]  # of one there is no interval
    drawn = drawing(13.0, max(4.5, 0.24 * len(rows) + 1.0))
    left, right = drawn.subplots(1, 2)
    _curves(left, _main_groups(all_groups, base))
    _distances(right, rows)
    return svg(drawn)


def _main_groups(all_groups: Sequence[Group], base: Record) -> list[Group]:
    """The base configuration and what it is measured against."""
    return [
        group
        for group in all_groups
        if group.first["config"] in COLORS
        and group.first["speeds"] == base["speeds"]
        and ":" not in label(group.first, base)
    ]


def _curves(panel: Any, chosen: Sequence[Group]) -> None:
    panel.set(title="Held-out loss over virtual time", xlabel="time, in steps of the fastest worker")
    panel.set(ylabel="nats per byte (band: all seeds)")
    lowest = []
    for group in chosen:
        config, columns = (
            group.first["config"],
            list(zip(*(record["curve"] for record in group.records), strict=False)),
        )
        times, losses = [column[0][1] for column in columns], [[point[2] for point in column] for column in columns]
        panel.plot(times, [statistics.fmean(values) for values in losses], color=COLORS[config], label=CALLED[config])
        panel.fill_between(times, list(map(min, losses)), list(map(max, losses)), color=COLORS[config], alpha=0.2)
        lowest.append(min(map(min, losses)))
    if lowest:
        panel.set_ylim(min(lowest) * 0.985, min(lowest) * 1.45)
        panel.legend()


def _distances(panel: Any, rows: Sequence[tuple[str, list[float]]]) -> None:
    panel.set(title="Held-out loss above balanced synchronous training, %")
    panel.set(xlabel="dots: mean over seeds; lines: 95 % interval of it")
    panel.axvline(0, color="#999999")
    for place, (name, values) in enumerate(rows):
        color = COLORS["fastest_alone" if name.startswith("fastest") else "decoupled"]
        panel.errorbar(statistics.fmean(values), place, xerr=interval(values), fmt="o", color=color)
    panel.set_yticks(range(len(rows)), [name for name, _ in rows])
    panel.invert_yaxis()
