"""The transcripts say what the core does. If that is meant to change: `python -m tests.transcripts`; `git diff`."""

from __future__ import annotations

import pytest

from tests.transcripts.scenarios import SCENARIOS
from tests.transcripts.stage import DIRECTORY


@pytest.mark.parametrize("name", SCENARIOS)
def test_the_transcript_is_what_happens(name: str) -> None:
    expected = (DIRECTORY / f"{name}.txt").read_text(encoding="utf-8")
    assert SCENARIOS[name]().text().splitlines() == expected.splitlines()


def test_every_file_is_a_scenario() -> None:
    assert {path.stem for path in DIRECTORY.glob("*.txt")} == set(SCENARIOS)
