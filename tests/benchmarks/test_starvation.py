"""Whose work counts: the benchmark's short form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.spec import RoundsSpec
from benchmarks import starvation, starvation_quality


@pytest.mark.parametrize(("inner_steps", "fragments"), [(24, 8), (4, 1)])
@pytest.mark.parametrize("slower", [2, 13, 23, 32])
def test_with_rebase_nobodys_work_is_lost(inner_steps: int, fragments: int, slower: int) -> None:
    row = starvation.run(slower, inner_steps, fragments, {"adoption": "rebase", "rebase_above": 0.1})
    assert min(row["merged_share"], row["fast_merged_share"]) >= 0.9


@pytest.mark.parametrize("slower", [2, 13, 32])
def test_by_default_nobodys_work_is_lost(slower: int) -> None:
    default = RoundsSpec()
    row = starvation.run(slower, default.inner_steps, default.fragments, {})
    assert min(row["merged_share"], row["fast_merged_share"]) >= 0.9


def test_with_overwrite_a_slow_worker_is_starved() -> None:
    row = starvation.run(32, 24, 8, {"adoption": "overwrite"})
    assert row["merged_share"] == row["rounds_share"] == 0
    assert row["fast_merged_share"] > 0.9


def test_it_writes_a_row_for_each(tmp_path: Path) -> None:
    starvation.main(["--slower", "2", "--out", str(tmp_path / "s.json")])
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert {(r["adoption"], r["rebase_above"], r["H"], r["P"]) for r in rows} == {
        (*adoption, *steps) for adoption in starvation.ADOPTIONS for steps in starvation.STEPS
    }
    assert {"slower", "merged_share", "rounds_share"} <= rows[0].keys()


def test_its_losses_are_those_of_the_policy(tmp_path: Path) -> None:
    where = tmp_path / "q.json"
    starvation_quality.main(["--seeds", "1", "--set-ups", "fast + 1/16", "--steps", "64", "--out", str(where)])
    rows = json.loads(where.read_text())["rows"]
    shares = {(row["adoption"], row["rebase_above"]): row["merged_share"] for row in rows}
    assert shares["overwrite", 0.0] < shares["rebase", 0.1] <= shares["rebase", 0.0] == 1.0
    assert all(row["heldout_loss"] < 6 for row in rows)
