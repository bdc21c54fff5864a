"""Of every benchmark the tests run a form as short as can be."""

from __future__ import annotations

import pytest

from benchmarks import quality_runs


@pytest.fixture(autouse=True)
def little_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_runs, "POINTS", 2)
    monkeypatch.setattr(quality_runs, "HELDOUT_WINDOWS", 32)
