"""What docs/results/quality.jsonl says: groups over seeds, a Markdown table and the figures of the plot.

± is the 95 % interval of the mean over seeds (Student's t). Distances from a baseline are paired by seed; of a
baseline that was run with several learning rates the best one counts.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]
FACTORS = (
    "speeds", "batches", "H", "H_later", "P", "K", "grace", "tau", "merge", "embedding", "adoption", "rebase_above",
    "alpha", "outer_lr", "outer_momentum", "lever",
)  # fmt: skip
SETUP = ("codec", "inner", "inner_lr", "floor", "batch", "size")
SAME_SETUP = ("speeds", "batches", "inner", "floor", "batch", "size", "steps")  # of a baseline
NAMES = {
    "sync_dp": "synchronous",
    "sync_balanced": "synchronous, balanced",
    "single": "one process, combined batch",
    "fastest_alone": "fastest worker alone",
    "decoupled": "decoupled",
}
#: 97.5 % quantiles of Student's t, by degrees of freedom from 1 on.
T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)


@dataclass
class Group:
    """Runs that differ in the seed only."""

    records: list[Record] = field(default_factory=list)

    @property
    def first(self) -> Record:
        return self.records[0]

    @property
    def losses(self) -> list[float]:
        return [record["heldout_loss"] for record in self.records]

    def by_seed(self) -> dict[int, Record]:
        return {record["seed"]: record for record in self.records}


def identity(record: Record) -> str:
    return json.dumps({**json.loads(record["key"]), "config": record["config"], "seed": None}, sort_keys=True)


def groups(records: Iterable[Record]) -> list[Group]:
    """In the order in which they first appear."""
    found: dict[str, Group] = {}
    for record in records:
        found.setdefault(identity(record), Group()).records.append(record)
    return list(found.values())


def baseline(all_groups: Sequence[Group], group: Group, config: str) -> Group | None:
    """The best runs of `config` that `group` is measured against: same workers, inner optimizer, model and length."""
    wanted = [
        g
        for g in all_groups
        if g.first["config"] == config and all(g.first[key] == group.first[key] for key in SAME_SETUP)
    ]
    return min(wanted, key=lambda g: statistics.fmean(g.losses), default=None)


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % interval of their mean; infinite for one value."""
    count = len(values)
    if count < 2:
        return math.inf
    return T[min(count - 2, len(T) - 1)] * statistics.stdev(values) / math.sqrt(count)


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean and interval."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {interval(values):.{digits}f}"


def excess(group: Group, other: Group | None) -> list[float]:
    """Percent above the other's loss, seed by seed."""
    if other is None:
        return []
    theirs = other.by_seed()
    return [
        100 * (record["heldout_loss"] / theirs[seed]["heldout_loss"] - 1)
        for seed, record in group.by_seed().items()
        if seed in theirs
    ]


def reach(record: Record, loss: float) -> float | None:
    """When a run's held-out loss first was at or below `loss`, between points on a straight line."""
    before: tuple[float, float] | None = None
    for _, now, value in record["curve"]:
        if value <= loss:
            if before is None or before[1] == value:
                return float(now)
            then, old = before
            return float(then + (now - then) * (old - loss) / (old - value))
        before = (now, value)
    return None


def mean_reach(group: Group, loss: float) -> float:
    """Mean over seeds of when a run was at `loss`; infinite if one of them never was."""
    times = [reach(record, loss) for record in group.records]
    return statistics.fmean(math.inf if time is None else time for time in times)


def label(record: Record, base: Record) -> str:
    """What is special about a run."""
    name, ours = NAMES[record["config"]], record["config"] == "decoupled"
    keys = (*FACTORS, *SETUP, "steps") if ours else ("speeds", "batches", *SETUP, "steps")
    special = [f"{key.replace('_', ' ')} {_show(record[key])}" for key in keys if record[key] != base[key]]
    if special:
        return f"{name}: " + ", ".join(special)
    return f"{name}, as shipped" if ours else name


def _show(value: Any) -> str:
    return " : ".join(f"{part:.3g}" for part in value) if isinstance(value, list) else f"{value}"


def table(records: Sequence[Record], base: Record) -> str:
    """One line per group."""
    all_groups = groups(records)
    lines = [
        "| run | seeds | tokens | time | held-out loss | over balanced, % | over synchronous at equal tokens, % "
        "| over fastest alone, % | merged |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for group in all_groups:
        against = [baseline(all_groups, group, name) for name in ("sync_balanced", "sync_dp", "fastest_alone")]
        cells = [
            label(group.first, base),
            f"{len(group.records)}",
            f"{statistics.fmean(r['tokens'] for r in group.records) / 1e6:.2f}M",
            f"{group.first['virtual_time']:.0f}",
            spread(group.losses),
            *("0" if group is other else spread(excess(group, other), 2) for other in against),
            f"{statistics.fmean(r['merged_share'] for r in group.records):.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rewrite(path: Path, text: str, name: str = "quality") -> None:
    """Put `text` between a file's markers of this name; at its end if it has none."""
    old = path.read_text()
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    block = f"{begin}\n{text}\n{end}"
    if begin in old and end in old:
        before, _, rest = old.partition(begin)
        path.write_text(before + block + rest.partition(end)[2])
    else:
        path.write_text(old.rstrip() + "\n\n" + block + "\n")


def machine_of(records: Sequence[Record]) -> str:
    """What the runs ran on, and how far the set is."""
    machines = sorted({f"{record['processor']} ({record['cores']} cores)" for record in records})
    return f"{len(records)} runs on {', '.join(machines)}; ± is the 95 % interval of the mean over seeds."


def targets(records: Sequence[Record], base: Record) -> str:
    """What is aimed at, and whether the shipped settings reach it in the mean over seeds."""
    all_groups = groups(records)
    ours = [g for g in all_groups if g.first["config"] == "decoupled" and g.first["default"]]

    def of(workers: Sequence[float]) -> Group | None:
        return next((g for g in ours if g.first["speeds"] == list(workers) and _is_plain(g.first, base)), None)

    four, eight = of(base["speeds"]), of((1.0,) * 8)
    wanted: list[tuple[str, Group | None, str, Callable[[float], bool]]] = [
        ("at most 1.5 % over balanced synchronous training at equal time", four, "sync_balanced", lambda v: v <= 1.5),
        ("at most 1 % over synchronous training at equal tokens", four, "sync_dp", lambda v: v <= 1.0),
        ("at least 5 % below the fastest worker alone", four, "fastest_alone", lambda v: v <= -5.0),
        ("eight equal workers: at most 3 % over synchronous training", eight, "sync_dp", lambda v: v <= 3.0),
    ]
    return "\n".join(_verdict(all_groups, *item) for item in wanted)


def _is_plain(record: Record, base: Record) -> bool:
    return all(record[key] == base[key] for key in (*SETUP, "steps", "batches"))


def _verdict(
    all_groups: Sequence[Group], target: str, group: Group | None, config: str, holds: Callable[[float], bool]
) -> str:
    values = excess(group, baseline(all_groups, group, config)) if group is not None else []
    if not values:
        return f"- {target}: not measured yet."
    listed = ", ".join(f"{value:+.2f}" for value in values)
    verdict = "kept" if holds(statistics.fmean(values)) else "missed"
    return f"- {target}: **{verdict}**, {spread(values, 2)} % (by seed {listed})."
