"""From instructions to writes, broadcast messages and tape events."""

from __future__ import annotations

import pytest

from anabranch.orchestrator import events as ev
from anabranch.orchestrator.transcribe import tape_event, transcribe
from anabranch.queue import messages as msg
from anabranch.queue.keys import Keys
from anabranch.queue.scripts import Transaction
from tests.orchestrator.bench import Bench, claim, make_spec, one, only

KEYS = Keys("run")
Write = tuple[str, str, tuple[bytes | str | int, ...]]


def written(instruction: ev.Instruction) -> list[Write]:
    """The writes an instruction adds to the transaction: operation, key, arguments."""
    transaction = Transaction(KEYS)
    transcribe(instruction, transaction, KEYS, lambda _: claim("_"))
    names, rest = transaction.script_keys, list(transaction.script_arguments)
    result: list[Write] = []
    while rest:
        name, index, count, *rest = rest
        assert isinstance(index, int)
        assert isinstance(count, int)
        result.append((str(name), names[index - 1], tuple(rest[:count])))
        rest = rest[count:]
    return result


def told(instruction: ev.Instruction) -> list[msg.Message]:
    """What is broadcast."""
    return transcribe(instruction, Transaction(KEYS), KEYS, lambda _: claim("_"))


# --- writes -----------------------------------------------------------------------------------------------


def test_consumed_entries_are_deleted_from_their_inbox() -> None:
    assert written(ev.Consume("merged", "a", (b"1-0", b"2-0"))) == [
        ("xdel", KEYS.contributions("a"), (b"1-0", b"2-0"))
    ]


def test_consumed_commands_are_deleted_from_the_control_stream() -> None:
    assert written(ev.Consume("command read", "", (b"1-0",))) == [("xdel", KEYS.control, (b"1-0",))]


def test_an_entry_of_a_progress_stream_needs_no_deletion() -> None:
    assert written(ev.Consume("unreadable", "a", (b"",))) == []


def test_booked_tokens_are_added_up_inside_redis() -> None:
    assert written(ev.Book("merged", 7, 3, "applied", 500)) == [("hincrby", KEYS.ledger, ("7:3:applied", 500))]


def closing(last_of_name: bool) -> ev.Close:
    return ev.Close("closed", 7, "a", 5, ((10, 0, 2), (0, 3, 0)), last_of_name)


def test_closed_books_are_folded_into_the_runs() -> None:
    increments = [w for w in written(closing(True)) if w[0] == "hincrby"]
    assert [arguments for _, _, arguments in increments] == [
        ("departed:0:applied", 10),
        ("departed:0:lost", 2),
        ("departed:1:rejected", 3),
    ]
    (removed,) = [w for w in written(closing(True)) if w[0] == "hdel"]
    assert removed[2] == (
        "7:0:applied",
        "7:0:rejected",
        "7:0:lost",
        "7:1:applied",
        "7:1:rejected",
        "7:1:lost",
    )


def test_the_last_incarnation_of_a_name_takes_its_streams_along() -> None:
    dropped = [(name, key) for name, key, _ in written(closing(True)) if name in {"unlink", "drop_if_empty"}]
    assert dropped == [("unlink", KEYS.progress("a")), ("drop_if_empty", KEYS.contributions("a"))]
    assert not [w for w in written(closing(False)) if w[0] in {"unlink", "drop_if_empty"}]


# --- messages ---------------------------------------------------------------------------------------------

VERDICT = ev.Verdict(7, 0, 4, False, 100, "late")

MESSAGES: list[tuple[ev.Instruction, msg.Message]] = [
    (ev.Welcome("", "a", b"n" * 16, 7, "worker"), msg.Welcome(name="a", nonce=b"n" * 16, incarnation=7)),
    (ev.TurnAway("full", "a", b"n" * 16, True), msg.Refused(name="a", nonce=b"n" * 16, reason="full", retry=True)),
    (ev.AskInit("", 7), msg.SendInit(incarnation=7)),
    (ev.Birth("", "0-x"), msg.Born(timeline="0-x")),
    (ev.OpenRound("", 3, 1, "0-x", 4, (7, 8)), msg.Call(round=3, fragment=1, timeline="0-x", base=4, called=[7, 8])),
    (
        ev.Commit("why", 3, 0, "0-x", 5, "all arrived", (VERDICT,), ((8, 100, 1, 1.0),), 900),
        msg.Merged(
            round=3,
            fragment=0,
            timeline="0-x",
            version=5,
            claim=claim("_"),
            closed="all arrived",
            verdicts=[msg.Verdict(incarnation=7, fragment=0, base=4, applied=False, tokens=100, reason="late")],
            tokens=900,
            reason="why",
        ),
    ),
    (ev.Abandon("quorum 1/2", 3, 1, 4), msg.Abandoned(round=3, fragment=1, base=4, reason="quorum 1/2")),
    (
        ev.Settle("late", (VERDICT,)),
        msg.Verdicts(
            verdicts=[msg.Verdict(incarnation=7, fragment=0, base=4, applied=False, tokens=100, reason="late")]
        ),
    ),
    (ev.AskAgain("", 7, 1, 4), msg.Resend(incarnation=7, fragment=1, base=4)),
    (closing(True), msg.Closed(incarnations=[7], reason="closed")),
    (ev.TellClosed("over", 7), msg.Closed(incarnations=[7], reason="over")),
    (ev.ChangeSetting("", "rounds.quorum", 2), msg.Setting(key="rounds.quorum", value=2)),
    (ev.Announce("", "pause"), msg.Pause()),
    (ev.Announce("", "resume"), msg.Resume()),
    (ev.Announce("enough", "stop"), msg.Stop(reason="enough")),
]


@pytest.mark.parametrize(("instruction", "message"), MESSAGES, ids=lambda value: type(value).__name__)
def test_what_members_are_told(instruction: ev.Instruction, message: msg.Message) -> None:
    assert told(instruction) == [message]


def test_what_only_the_synchronizer_needs_is_not_broadcast() -> None:
    for instruction in (
        ev.Consume("", "a", (b"1-0",)),
        ev.Book("", 7, 0, "lost", 1),
        ev.SetTimer("", "sweep", 0.5),
        ev.Merge("", 1, 0, 0, ()),
        ev.Reject("", 7, "a", 0, 0, 1),
        ev.Gone("", 7, "a"),
        ev.Note("", "back"),
        ev.Checkpoint(""),
    ):
        assert told(instruction) == []


def test_a_commit_with_hundreds_of_wordy_verdicts_fits_envelopes() -> None:
    verdicts = tuple(ev.Verdict(i, 0, 4, False, 10**9, "x" * 5000) for i in range(1000))
    messages = told(ev.Commit("why", 3, 0, "0-x", 5, "all arrived", verdicts, (), 900))
    assert isinstance(messages[-1], msg.Merged), "last: who reads of a version knows what became of its own work"
    told_of = [v.incarnation for m in messages if isinstance(m, msg.Merged | msg.Verdicts) for v in m.verdicts]
    assert told_of == list(range(1000)), "each verdict once"
    assert all(len(msg.encode(message, "run")) <= msg.ENVELOPE_LIMIT for message in messages)


# --- the tape ---------------------------------------------------------------------------------------------


def test_an_event_of_the_tape_says_what_and_why() -> None:
    assert tape_event(ev.Abandon("quorum 1/2", 3, 1, 4)) == {
        "kind": "abandoned",
        "reason": "quorum 1/2",
        "round": 3,
        "fragment": 1,
        "base": 4,
    }


def test_a_note_keeps_its_own_kind() -> None:
    assert tape_event(ev.Note("a is back", "back", {"name": "a"})) == {
        "kind": "back",
        "reason": "a is back",
        "details": {"name": "a"},
    }


def test_mechanics_are_not_on_the_tape() -> None:
    for instruction in (ev.SetTimer("", "sweep", 0.5), ev.Consume("", "a", ()), ev.Merge("", 1, 0, 0, ())):
        assert tape_event(instruction) is None


@pytest.mark.parametrize("instruction", [pair[0] for pair in MESSAGES], ids=lambda value: type(value).__name__)
def test_every_event_of_the_tape_is_plain_data(instruction: ev.Instruction) -> None:
    event = tape_event(instruction)
    assert event is not None
    assert msg.unpack(msg.pack(event)) == event


def test_the_story_of_a_round_reads_off_the_tape() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    bench.contribute("a")
    bench.merge(one(ev.Merge, bench.contribute("b")))
    tape = [event for i in bench.log if (event := tape_event(i)) is not None]
    assert [event["kind"] for event in tape] == ["born", "joined", "joined", "opened", "merged"]
    assert tape[-1]["reason"] == "all arrived after 0.00 s: 2 of 2"
    assert tape[-1]["weights"] == [[1, 300, 3, 30000.0], [2, 300, 3, 30000.0]]


def test_what_the_core_decides_in_a_round_can_be_transcribed() -> None:
    bench = Bench()
    bench.worker("a")
    bench.steps(a=2)
    bench.merge(one(ev.Merge, bench.contribute("a")))
    told_types = [message.type for i in bench.log for message in told(i)]
    assert told_types == ["born", "welcome", "call", "merged"]
    assert all(len(msg.encode(m, "run")) < 2048 for i in bench.log for m in told(i))
    assert only(ev.Consume, bench.log)
