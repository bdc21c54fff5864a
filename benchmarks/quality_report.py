"""What docs/results/quality.jsonl says: groups over seeds, a Markdown table and the figures of the plot."""

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
    "speeds",
    "H",
    "P",
    "K",
    "grace",
    "tau",
    "merge",
    "embedding",
    "adoption",
    "alpha",
    "outer_lr",
    "outer_momentum",
    "lever",
)
SETUP = ("alpha", "codec", "inner_lr", "floor", "batch")  # one base for all, unless a run says otherwise
LEVERS = {"later=24,from=0.25": "for a quarter of the run, then H 24"}
BEGIN, END = "<!-- quality: begin -->", "<!-- quality: end -->"
NAMES = {
    "sync_dp": "synchronous data-parallel",
    "single": "one process, combined batch",
    "fastest_alone": "fastest worker alone",
    "decoupled": "decoupled",
}


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
    """The runs of `config` that `group` is measured against: same workers, same setup, as many tokens."""
    wanted = [g for g in all_groups if g.first["config"] == config and g.first["speeds"] == group.first["speeds"]]
    wanted = [g for g in wanted if all(g.first[key] == group.first[key] for key in SETUP)]
    shorter = [g for g in wanted if g.first["steps"] <= group.first["steps"]]
    return max(shorter, key=lambda g: g.first["steps"], default=None)


def spread(values: Sequence[float], digits: int = 4) -> str:
    """Mean ± half the range."""
    if not values:
        return "–"
    mean = f"{statistics.fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:.{digits}f}"


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


def time_shares(group: Group, sync: Group | None) -> list[float | None]:
    """Time to sync_dp's final loss as a share of sync_dp's time, seed by seed."""
    if sync is None:
        return []
    theirs = sync.by_seed()
    shares: list[float | None] = []
    for seed, record in group.by_seed().items():
        if seed in theirs:
            when = reach(record, theirs[seed]["heldout_loss"])
            shares.append(None if when is None else when / theirs[seed]["virtual_time"])
    return shares


def label(record: Record, base: Record) -> str:
    """What is special about a run."""
    if record["config"] != "decoupled":
        text = NAMES[record["config"]]
    else:
        special = [_special(key, record[key]) for key in (*FACTORS, *SETUP) if record[key] != base[key]]
        text = "decoupled" + (": " + ", ".join(special) if special else ", base")
    if record["config"] != "decoupled" and record["speeds"] != base["speeds"]:
        text += f", speeds {_show(record['speeds'])}"
    if record["steps"] != base["steps"]:
        text += f", {record['steps']} steps"
    return text


def _special(key: str, value: Any) -> str:
    return LEVERS.get(value, f"lever {value}") if key == "lever" else f"{key} {_show(value)}"


def _show(value: Any) -> str:
    return " : ".join(f"{speed:g}" for speed in value) if isinstance(value, list) else f"{value}"


def table(records: Sequence[Record], base: Record) -> str:
    """One line per group."""
    all_groups = groups(records)
    lines = [
        "| run | seeds | tokens | virtual time | held-out loss | against sync_dp, % | against fastest alone, % "
        "| time to sync_dp's loss | merged |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for group in all_groups:
        sync, alone = (baseline(all_groups, group, name) for name in ("sync_dp", "fastest_alone"))
        if alone is not None and alone.first["steps"] != group.first["steps"]:
            alone = None  # not at equal time
        shares = time_shares(group, sync) if group.first["config"] == "decoupled" else []
        reached = [share for share in shares if share is not None]
        when = spread(reached, 2) + (f" ({len(reached)} of {len(shares)})" if len(reached) < len(shares) else "")
        cells = [
            label(group.first, base),
            f"{len(group.records)}",
            f"{statistics.fmean(r['tokens'] for r in group.records) / 1e6:.2f}M",
            f"{group.first['virtual_time']:.0f}",
            spread(group.losses),
            spread(excess(group, sync), 1) if group is not sync else "0",
            spread(excess(group, alone), 1) if group is not alone else "0",
            when if shares else "–",
            f"{statistics.fmean(r['merged_share'] for r in group.records):.2f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rewrite(path: Path, text: str) -> None:
    """Put `text` between the markers; at the end of the file if it has none."""
    old = path.read_text()
    block = f"{BEGIN}\n{text}\n{END}"
    if BEGIN in old and END in old:
        before, _, rest = old.partition(BEGIN)
        path.write_text(before + block + rest.partition(END)[2])
    else:
        path.write_text(old.rstrip() + "\n\n" + block + "\n")


def machine_of(records: Sequence[Record]) -> str:
    """What the runs ran on, and how far the set is."""
    machines = sorted({f"{record['processor']} ({record['cores']} cores)" for record in records})
    return f"{len(records)} runs on {', '.join(machines)}; ± is half the range over seeds."


def targets(records: Sequence[Record], base: Record) -> str:
    """The three targets, and whether the base configuration meets them in every seed."""
    all_groups = groups(records)
    ours = [g for g in all_groups if g.first["config"] == "decoupled"]
    mine = next((g for g in ours if label(g.first, base) == "decoupled, base"), None)
    longer = next((g for g in ours if label(g.first, base).startswith("decoupled, base, ")), None)
    lines: list[str] = []
    if mine is not None:
        near = excess(mine, baseline(all_groups, mine, "sync_dp"))
        lines.append(_verdict("within 2 % of synchronous training at equal tokens", near, "%", lambda v: v <= 2))
    if longer is not None:
        shares = time_shares(longer, baseline(all_groups, longer, "sync_dp"))
        reached = [math.inf if share is None else share for share in shares]
        lines.append(_verdict("its final loss in at most 0.6 of its time", reached, "of it", lambda v: v <= 0.6005))
    if mine is not None:
        ahead = [-value for value in excess(mine, baseline(all_groups, mine, "fastest_alone"))]
        lines.append(
            _verdict("at least 5 % below the fastest worker alone at equal time", ahead, "%", lambda v: v >= 5)
        )
    return "\n".join(lines)


def _verdict(target: str, values: Sequence[float], unit: str, holds: Callable[[float], bool]) -> str:
    if not values:
        return f"- {target}: not measured yet."
    kept = sum(holds(value) for value in values)
    listed = ", ".join("not reached" if value == math.inf else f"{value:.2f}" for value in values)
    return f"- {target}: {listed} {unit} by seed; kept in {kept} of {len(values)}."
