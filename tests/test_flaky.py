"""`make flaky` runs on after a failure, says what it did and what failed, and ends what it started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.wait import PATIENCE_S

SUITE = """
import os, subprocess, sys

def test_passes(): pass

def test_fails(): assert os.environ["ANABRANCH_SEED"] == "no"
"""


def flaky(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Our own settings and plugins stay out of it."""
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:randomly\n")
    suite = ["-q", "-c", str(folder / "pytest.ini"), "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", "tests.flaky", "--json", str(folder / "found.json"), *arguments, "--", *suite],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S, cwd=Path(__file__).parents[1],
    )  # fmt: skip


def test_every_kind_is_run_whatever_fails(tmp_path: Path) -> None:
    done = flaky(tmp_path, "--runs", "4", "--seed", "7")
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["failed_runs"] == 4
    assert [run["kind"] for run in found["runs"]] == ["order", "shuffled", "one-core", "busy"]
    for number, run in enumerate(found["runs"]):
        assert (run["seed"], run["passed"], run["failed"], run["exit"]) == (7 + number, 1, 1, 1)
        assert run["failures"][0].endswith("test_suite.py::test_fails")
        assert run["command"].startswith(f"ANABRANCH_SEED={7 + number} python -m pytest")
        assert f"run {number + 1} of 4, {run['kind']}, seed {7 + number}: 1 passed, 1 failed" in done.stdout
    assert "--randomly-seed=8" in found["runs"][1]["command"]


def test_a_run_without_a_report_has_failed(tmp_path: Path) -> None:
    done = flaky(tmp_path, "--runs", "1", "--kinds", "order", "--seed", "1", "--", "--no-such-option")
    assert done.returncode == 1
    [run] = json.loads((tmp_path / "found.json").read_text())["runs"]
    assert run["failures"] == [f"pytest ended with {run['exit']} and without a report"]


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    done = flaky(tmp_path, "--kinds", "order,upside-down")
    assert done.returncode == 2
    assert "'upside-down' is none of order, shuffled, one-core, busy" in done.stderr
