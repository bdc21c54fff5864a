"""The benchmark of optimizer steps runs, in short, and says what its columns promise."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import muon_speed


def test_a_short_run_writes_a_row_per_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(muon_speed, "MODELS", {"tiny": {"layers": 1, "width": 16, "heads": 2, "context": 8}})
    muon_speed.main(["--seconds", "0", "--out", str(tmp_path / "speed.json")])
    [row] = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert row["model"] == "tiny"
    assert all(row[f"{name}_ms"] > 0 for name in ("passes", "adamw", "torch", "ours"))
    assert row["of_torch"] == pytest.approx(row["ours_ms"] / row["torch_ms"], rel=0.01)
    assert "tiny" in capsys.readouterr().out
