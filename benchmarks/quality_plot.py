"""docs/quality.svg: held-out loss over virtual time, and how far variants are from balanced synchronous training."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape

from benchmarks.quality_report import Group, Record, baseline, excess, groups, interval, label

WIDTH, PANEL, TOP, ROW = 1100, 430, 46, 18
COLORS = {"sync_dp": "#999999", "sync_balanced": "#555555", "fastest_alone": "#d08a1d", "decoupled": "#1f6fb2"}
CALLED = {
    "sync_dp": "synchronous, equal batches",
    "sync_balanced": "synchronous, balanced",
    "fastest_alone": "fastest worker alone",
    "decoupled": "decoupled, as shipped",
}
Scale = Callable[[float], float]


def plot(records: Sequence[Record], base: Record) -> str:
    """One SVG of two panels."""
    all_groups = groups(records)
    rows = [
        (label(group.first, base), excess(group, baseline(all_groups, group, "sync_balanced")))
        for group in all_groups
        if group.first["config"] in ("decoupled", "fastest_alone")
    ]
    rows = [(name, values) for name, values in rows if len(values) > 1]  # of one there is no interval
    height = max(420, TOP + ROW * len(rows) + 50)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_curves(_main_groups(all_groups, base)),
        *_distances(rows),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _main_groups(all_groups: Sequence[Group], base: Record) -> list[Group]:
    """The base configuration and what it is measured against."""
    return [
        group
        for group in all_groups
        if group.first["config"] in COLORS
        and group.first["speeds"] == base["speeds"]
        and ":" not in label(group.first, base)
    ]


def _mean_curve(group: Group) -> list[tuple[float, float, float, float]]:
    """Time, mean, lowest and highest loss."""
    columns = zip(*(record["curve"] for record in group.records), strict=False)
    return [
        (points[0][1], statistics.fmean(p[2] for p in points), min(p[2] for p in points), max(p[2] for p in points))
        for points in columns
    ]


def _curves(chosen: Sequence[Group]) -> list[str]:
    curves = [(group.first["config"], _mean_curve(group)) for group in chosen]
    if not curves:
        return []
    longest = max(curve[-1][0] for _, curve in curves)
    low = min(point[2] for _, curve in curves for point in curve)
    high = low * 1.45

    def x(time: float) -> float:
        return 60 + (PANEL - 80) * time / longest

    def y(loss: float) -> float:
        return TOP + 330 * (high - min(loss, high)) / (high - low * 0.985)

    parts = [_text(60, 24, "Held-out loss (nats per byte) over virtual time", size=14)]
    for step in range(5):
        loss = low + (high - low) * step / 4
        parts += [_line(60, y(loss), PANEL - 20, y(loss), "#e5e5e5"), _text(54, y(loss) + 4, f"{loss:.2f}", "end")]
        time = longest * step / 4
        parts.append(_text(x(time), TOP + 352, f"{time:.0f}", "middle"))
    parts.append(_text((PANEL + 40) / 2, TOP + 370, "time, in steps of the fastest worker", "middle"))
    for number, (config, curve) in enumerate(curves):
        color = COLORS[config]
        shown = [point for point in curve if point[1] <= high]
        edge = [(x(t), y(lo)) for t, _, lo, _ in shown] + [(x(t), y(hi)) for t, _, _, hi in reversed(shown)]
        parts.append(f'<polygon points="{_points(edge)}" fill="{color}" opacity="0.2"/>')
        middle = _points([(x(t), y(mean)) for t, mean, _, _ in shown])
        parts.append(f'<polyline points="{middle}" fill="none" stroke="{color}" stroke-width="2"/>')
        at = TOP + 14 + 18 * number
        parts += [_line(PANEL - 190, at - 4, PANEL - 166, at - 4, color, 3), _text(PANEL - 160, at, CALLED[config])]
    return parts


def _distances(rows: Sequence[tuple[str, list[float]]]) -> list[str]:
    if not rows:
        return []
    left, right = PANEL + 310, WIDTH - 30
    lowest = min(0.0, *(min(values) for _, values in rows))
    highest = max(1.0, *(max(values) for _, values in rows))

    def x(percent: float) -> float:
        return left + (right - left) * (percent - lowest) / (highest - lowest)

    bottom = TOP + ROW * len(rows)
    parts = [_text(left, 24, "Held-out loss above balanced synchronous training, %", "middle", 14)]
    tick = max(1, round((highest - lowest) / 6))
    for percent in range(int(lowest), int(highest) + 1, tick):
        parts.append(_line(x(percent), TOP - 6, x(percent), bottom, "#999" if percent == 0 else "#e5e5e5"))
        parts.append(_text(x(percent), bottom + 16, f"{percent:+d}" if percent else "0", "middle"))
    for number, (name, values) in enumerate(rows):
        at = TOP + ROW * number + 8
        mean, half = statistics.fmean(values), interval(values)
        parts.append(_text(left - 12, at + 4, name.removeprefix("decoupled: "), "end"))
        parts.append(_line(x(mean - half), at, x(mean + half), at, COLORS["decoupled"], 2))
        color = COLORS["fastest_alone" if name.startswith("fastest") else "decoupled"]
        parts.append(f'<circle cx="{x(mean):.1f}" cy="{at}" r="4" fill="{color}"/>')
    parts.append(_text(right, bottom + 34, "dots: mean over seeds; lines: 95 % interval of it", "end"))
    return parts


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _line(x1: float, y1: float, x2: float, y2: float, color: str, width: int = 1) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{color}" stroke-width="{width}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#222">{escape(text)}</text>'
    )
