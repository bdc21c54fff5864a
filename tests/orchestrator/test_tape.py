"""The tape: what happened, for the page now and in a file for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.tape import FILE_NAME, Tape, parts, plain, tape_event
from anabranch.queue import messages as msg
from tests.orchestrator.bench import Bench, claim, make_spec, one
from tests.orchestrator.test_scribe import MESSAGES


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


def test_the_file_is_bounded_and_the_end_of_it_is_never_lost(tmp_path: Path) -> None:
    limit, ends = 4000, 0
    tape = Tape(tmp_path, limit)
    for number in range(1, 301):
        tape.append({"id": number, **event(number)})
        tape.flush()
        sizes = [path.stat().st_size for path in parts(tmp_path)]
        assert sum(sizes) <= limit
        ends += sizes[-1] < 100
        if number % 7 == 0:  # whoever leads next reads on where this one ended, wherever that is
            tape.close()
            tape = Tape(tmp_path, limit)
            assert tape.last_id == number
            assert [e["id"] for e in tape.recent] == kept(tmp_path)[-200:]
    tape.close()
    assert ends > 3, "a new part was begun now and then"
    ids = kept(tmp_path)
    assert ids == list(range(ids[0], 301))
    assert [path.name for path in parts(tmp_path)] == [
        "tape.3.jsonl",
        "tape.2.jsonl",
        "tape.1.jsonl",
        FILE_NAME,
    ]
    assert {path.stat().st_mode & 0o777 for path in parts(tmp_path)} == {0o600}


def kept(directory: Path) -> list[int]:
    return [json.loads(line)["id"] for path in parts(directory) for line in path.read_text().splitlines()]


def test_what_the_stream_holds_is_not_written_again_after_a_part_was_begun(tmp_path: Path) -> None:
    stored = [{"id": number, **event(number)} for number in range(1, 41)]
    tape = Tape(tmp_path, 4000)
    tape.catch_up(stored)
    tape.close()
    (tmp_path / FILE_NAME).rename(tmp_path / "tape.1.jsonl")  # the last thing before a crash
    again = Tape(tmp_path, 4000)
    before = kept(tmp_path)
    again.catch_up(stored)
    again.close()
    assert kept(tmp_path) == before


def test_without_a_limit_there_is_one_file(tmp_path: Path) -> None:
    tape = Tape(tmp_path, 0)
    for number in range(100):
        tape.append(event(number))
    tape.close()
    assert [path.name for path in parts(tmp_path)] == [FILE_NAME]
    assert len(lines(tmp_path)) == 100


def test_a_part_that_cannot_be_begun_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tape = Tape(tmp_path, 400)
    tape.append(event(0))

    def refuse(*_: object) -> None:
        raise PermissionError("no")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", refuse)
        for number in range(1, 20):
            tape.append(event(number))
    tape.close()
    assert len(lines(tmp_path)) == 20


def test_closing_twice_does_no_harm(tmp_path: Path) -> None:
    tape = Tape(tmp_path)
    tape.close()
    tape.close()


# --- from instructions to events --------------------------------------------------------------------------


def test_an_event_of_the_tape_says_what_and_why() -> None:
    said = msg.Abandoned(round=3, fragment=1, base=4, reason="quorum 1/2")
    assert tape_event(do.Tell("quorum 1/2", said, "abandoned")) == {
        "kind": "abandoned",
        "reason": "quorum 1/2",
        "round": 3,
        "fragment": 1,
        "base": 4,
    }


def test_an_event_has_the_whole_reason_though_members_get_a_short_one() -> None:
    said = msg.Abandoned(round=3, fragment=1, base=4, reason="x" * 160)
    event = tape_event(do.Tell("x" * 1000, said, "abandoned"))
    assert event is not None
    assert len(event["reason"]) == 1000


def test_a_note_keeps_its_own_kind() -> None:
    assert tape_event(do.Note("a is back", "back", {"name": "a"})) == {
        "kind": "back",
        "reason": "a is back",
        "name": "a",
    }


def test_mechanics_are_not_on_the_tape() -> None:
    leases = msg.Leases(incarnation=7, timeline="0-x")
    for instruction in (
        do.SetTimer("", "sweep", 0.5),
        do.Consume("", "a", ()),
        do.Merge("", 1, 0, 0, ()),
        do.Tell("asked for", leases),
    ):
        assert tape_event(instruction) is None


INSTRUCTIONS: list[do.Instruction] = [
    *(do.Tell("why", message, message.type) for message in MESSAGES),
    do.Birth("", "0-x"),
    do.NewTimeline("", "1-x", 1000),
    do.CloseBooks("closed", 7, "a", 5, ((10, 0, 2), (0, 3, 0)), True),
    do.Note("", "refused", {"incarnation": 7}),
]


@pytest.mark.parametrize("instruction", INSTRUCTIONS, ids=lambda value: type(value).__name__)
def test_every_event_of_the_tape_is_plain_data(instruction: do.Instruction) -> None:
    event = tape_event(instruction)
    assert event is not None
    assert msg.unpack(msg.pack(event)) == event
    assert json.loads(json.dumps(event)) == event


def test_where_a_payload_lies_is_not_on_the_tape() -> None:
    assert plain({"a": claim("a"), "b": (b"\x01", [claim("a").digest])}) == {"b": ["01", [(b"d" * 32).hex()]]}


def test_the_story_of_a_round_reads_off_the_tape() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("a")
    bench.merge(one(do.Merge, bench.contribute("b")))
    tape = [event for i in bench.log if (event := tape_event(i)) is not None]
    assert [event["kind"] for event in tape] == ["born", "joined", "joined", "opened", "merged"]
    assert tape[-1]["reason"] == "all arrived after 0.00 s: 2 of 2"
    assert tape[-1]["weights"] == [[1, 300, 3, 30000.0], [2, 300, 3, 30000.0]]
