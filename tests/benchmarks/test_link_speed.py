"""`benchmarks.link_speed`: what it makes of curves, by hand-made ones."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import link_speed
from benchmarks.link_speed import LINKS, Measured, Scene, measured, plot, row, table, where_best
from benchmarks.quality import MEASURED_H
from benchmarks.quality_runs import UNEQUAL, Config
from tests.benchmarks.test_quality import record_of

FOUR = Config()
SCENE = Scene("a model", 1e6, 1.0)
CURVES = Measured(2.0, 3000, 1500, 1000, {8: 1100, 24: 1300, 100: 2000, 300: math.inf})


def with_curve(config: Config, times: list[float]) -> dict[str, Any]:
    """Losses 4, 3, 2 and 1 at these times."""
    curve = [[1000, time, loss] for time, loss in zip(times, (4, 3, 2, 1), strict=True)]
    return {**record_of(config, 1.0), "curve": curve}


def records_of(speeds: tuple[float, ...], *, seeds: tuple[int, ...] = (100, 101)) -> list[dict[str, Any]]:
    made = []
    for seed in seeds:
        base = replace(FOUR, speeds=speeds, seed=seed)
        alone = record_of(replace(base, config="fastest_alone"), 2.0)
        made += [alone, with_curve(replace(base, config="sync_dp"), [1000, 2000, 4000, 6000])]
        made.append(with_curve(replace(base, config="sync_balanced"), [500, 1000, 1500, 3000]))
        for number, steps in enumerate(MEASURED_H):
            made.append(with_curve(replace(base, H=steps), [600, 1200, 1600 + 100 * number + seed, 3000]))
    return made


def test_steps_to_the_loss_of_the_fastest_alone_by_the_seeds_that_all_have() -> None:
    records = records_of(UNEQUAL[4])
    records += [record for record in records_of(UNEQUAL[4], seeds=(102,)) if record["config"] == "sync_dp"]
    found = measured(records, UNEQUAL[4])
    assert (found.loss, found.fastest_alone) == (2.0, 3000)
    assert found.sync_dp == 1000  # steps of everybody, four times as long as the fastest one's
    assert found.sync_balanced == 1500
    assert found.decoupled == {8: 1700.5, 24: 1800.5, 100: 1900.5, 300: 2000.5}


def test_what_was_not_run_is_named() -> None:
    with pytest.raises(ValueError, match=r"of 4 workers H or baseline \[8, 24, .*quality --all"):
        measured([], UNEQUAL[4])
    without = [record for record in records_of(UNEQUAL[4]) if record["config"] != "sync_balanced"]
    with pytest.raises(ValueError, match=r"\['sync_balanced'\] was not run"):
        measured(without, UNEQUAL[4])


def test_between_two_measured_h_steps_lie_on_a_line_over_its_logarithm() -> None:
    assert CURVES.at(8) == 1100
    assert CURVES.at(8 * math.sqrt(3)) == pytest.approx(1200)
    assert CURVES.at(150) == CURVES.at(301) == math.inf, "nothing is claimed"


def test_a_fast_link_costs_nothing_and_a_slow_one_only_what_does_not_fit() -> None:
    fast, slow = row(SCENE, CURVES, 1e10), row(SCENE, CURVES, 1e6)
    assert (fast["H"], fast["decoupled_s"]) == (8, 1100)
    assert (fast["sync_dp_s"], fast["sync_balanced_s"], fast["fastest_alone_s"]) == (6000, 1000, 3000)
    assert slow["sync_dp_s"] == 1500 * 24  # 2 × ¾ × 2 bytes × 8 bits × 1e6 over 1 Mbit/s
    assert slow["sync_balanced_s"] == 1000 * 24
    assert slow["H"] == 128  # 4 × 4 bytes × 8 bits × 1e6 over 1 Mbit/s, at a second a step
    assert slow["decoupled_s"] is None


def test_it_says_where_it_is_the_quickest() -> None:
    rows = [row(Scene("", 1e6, 1.0), CURVES, 10**power) for power in (5, 6.2, 6.5, 7, 8, 9)]
    assert where_best(rows) == "decoupled training is the quickest from 1.6 Mbit/s to 10 Mbit/s"
    assert where_best(rows[1:]) == "decoupled training is the quickest up to 10 Mbit/s"
    assert where_best(rows[1:4]) == "decoupled training is the quickest everywhere"
    assert where_best(rows[4:]) == "decoupled training is the quickest nowhere"


def test_tables_plot_and_json_come_of_the_official_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds = {scene.speeds for scene in link_speed.SCENES}
    records = [record for one in speeds for record in records_of(one)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (tmp_path / "experiments.md").write_text("before\n")
    monkeypatch.setattr(link_speed, "DOCS", tmp_path)
    monkeypatch.setattr(link_speed, "RESULTS", tmp_path / "q.jsonl")
    monkeypatch.setattr(link_speed, "OUT", tmp_path / "out.json")
    link_speed.main()
    rows = json.loads((tmp_path / "out.json").read_text())
    assert len(rows) == len(link_speed.SCENES) * len(LINKS)
    assert rows[0].keys() == {"scene", "link_bits_per_s", "H", *(f"{way}_s" for way in link_speed.WAYS)}
    assert "before\n\n<!-- link speed: begin -->\n**125M parameters" in (tmp_path / "experiments.md").read_text()
    assert ElementTree.parse(tmp_path / "link_speed.svg").getroot().tag.endswith("svg")


def test_the_quickest_is_bold_and_what_was_not_measured_a_dash() -> None:
    lines = table([row(SCENE, CURVES, link) for link in LINKS]).splitlines()
    assert len(lines) == 2 + len(link_speed.SHOWN)
    assert lines[2].startswith("| 10 Mbit/s | 13 |")
    assert all(line.count("**") == 2 for line in lines[2:])
    assert plot({SCENE: [row(SCENE, CURVES, link) for link in LINKS]}).startswith("<?xml")
