"""The tape: what happened, for the page now and in a file for ever."""

from __future__ import annotations

import json
from pathlib import Path

from anabranch.orchestrator.tape import FILE_NAME, Tape


def lines(directory: Path) -> list[object]:
    return [json.loads(line) for line in (directory / FILE_NAME).read_text().splitlines()]


def event(number: int) -> dict[str, object]:
    return {"kind": "note", "reason": f"number {number}"}


def test_events_are_numbered_for_the_page_and_kept_in_the_file(tmp_path: Path) -> None:
    tape = Tape(tmp_path)
    for number in range(3):
        tape.append(event(number))
    tape.flush()
    assert lines(tmp_path) == [event(number) for number in range(3)]
    assert [item["number"] for item in tape.recent] == [1, 2, 3]
    tape.close()


def test_a_second_life_appends_and_remembers(tmp_path: Path) -> None:
    first = Tape(tmp_path)
    first.append(event(1))
    first.close()
    second = Tape(tmp_path)
    assert [item["reason"] for item in second.recent] == ["number 1"]
    second.append(event(2))
    second.close()
    assert lines(tmp_path) == [event(1), event(2)]
    assert [item["number"] for item in second.recent] == [1, 2]


def test_a_line_that_a_crash_cut_short_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    path.write_text(json.dumps(event(1)) + '\n{"kind": "no')
    tape = Tape(tmp_path)
    tape.append(event(2))
    tape.close()
    assert [item["reason"] for item in tape.recent] == ["number 1", "number 2"]
    assert json.loads(path.read_text().splitlines()[-1]) == event(2)


def test_the_page_gets_the_last_few(tmp_path: Path) -> None:
    tape = Tape(None)
    for number in range(500):
        tape.append(event(number))
    assert len(tape.recent) == 200
    assert tape.recent[-1]["number"] == 500
    tape.flush()
    tape.close()


def test_a_stamp_is_a_number_and_wall_clock_time_and_comes_first() -> None:
    stamped = Tape(None).stamp(event(1))
    assert list(stamped) == ["id", "time", "kind", "reason"]
    assert stamped["time"] > 1.6e9


def test_only_the_owner_can_read_it(tmp_path: Path) -> None:
    Tape(tmp_path).close()
    assert (tmp_path / FILE_NAME).stat().st_mode & 0o777 == 0o600


def test_closing_twice_does_no_harm(tmp_path: Path) -> None:
    tape = Tape(tmp_path)
    tape.close()
    tape.close()
