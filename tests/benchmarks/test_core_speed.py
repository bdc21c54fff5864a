"""The fleet whose events the core is measured with is an honest one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import core_speed


def test_the_fleet_trains_and_is_merged_without_a_complaint() -> None:
    fleet = core_speed.Fleet(6)
    script = fleet.run(30)
    state = fleet.engine.state
    assert state.counts["all arrived"] >= 8
    assert set(state.counts) == {"all arrived"}, "nothing is refused, no book is off"
    assert min(fragment.version for fragment in state.fragments) >= 1
    assert core_speed.read_again(script) > 0
    spent_s, record_s = core_speed.decide_again(script, core_speed.spec_for(6))
    assert 0 < record_s < spent_s


def test_it_writes_what_it_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "core_speed.json"
    arguments = ["core_speed", "--members", "4", "--seconds", "12", "--repeats", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    core_speed.main()
    result = json.loads(out.read_text())
    assert result["events"] > 50
    assert set(result["events_per_s"]) == {"read", "core", "record"}
    assert "4 members" in capsys.readouterr().out
