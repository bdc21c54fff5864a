"""From a batch of instructions to writes and broadcast messages (what goes to the tape: `test_tape.py`)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.port import Batch, Core
from anabranch.orchestrator.core.record import image
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.scribe import Scribe, in_envelopes
from anabranch.orchestrator.tape import Tape
from anabranch.orchestrator.vault import Vault, Version
from anabranch.queue import messages as msg
from anabranch.queue.keys import Keys
from anabranch.queue.records import RunRecord
from anabranch.queue.scripts import Transaction
from tests.orchestrator.bench import Bench, claim, make_spec, one, only, told

KEYS = Keys("run")
Write = tuple[str, str, tuple[bytes | str | int, ...]]  # operation, key, arguments


def version(digest: bytes) -> Version:
    """A version whose Θ and momentum are told apart by their claims' digests."""
    zeros = np.zeros(1, dtype=np.float32)
    theta, momentum = claim("_", digest), claim("_").model_copy(update={"id": "cd", "digest": digest})
    return Version(zeros, zeros, theta, momentum)


def describe(*instructions: do.Instruction, state: State | None = None) -> Transaction:
    vault = SimpleNamespace(prepared={3: version(b"2" * 32)}, versions=[version(b"1" * 32)], newborn=None)
    core = Core(state or State(make_spec(), "bench"))
    scribe = Scribe(KEYS, core, cast(Vault, vault), Tape(None), RunRecord(core.state.spec, None))
    return scribe.describe(Batch(1, instructions, True), now=0.0)[0]


def operations(transaction: Transaction) -> list[Write]:
    names, rest = transaction.script_keys, list(transaction.script_arguments)
    result: list[Write] = []
    while rest:
        name, index, count, *rest = rest
        assert isinstance(index, int)
        assert isinstance(count, int)
        result.append((str(name), names[index - 1], tuple(rest[:count])))
        rest = rest[count:]
    return result


def written(*instructions: do.Instruction) -> list[Write]:
    """The writes that instructions add to the transaction, besides tape, broadcasts and the core's own state."""
    everything = [w for w in operations(describe(*instructions)) if w[1] not in (KEYS.tape, KEYS.broadcast)]
    return [w for w in everything if w[1] != KEYS.state or w[0] not in {"hset", "hdel"}]


def heard(*instructions: do.Instruction) -> list[msg.Message]:
    """What members read on the broadcast."""
    envelopes = [arguments[-1] for name, _, arguments in operations(describe(*instructions)) if name == "broadcast"]
    return [msg.decode(envelope, "run") for envelope in envelopes if isinstance(envelope, bytes)]


# --- writes -----------------------------------------------------------------------------------------------


def test_consumed_entries_are_deleted_from_their_inbox() -> None:
    assert written(do.Consume("merged", "a", (b"1-0", b"2-0"))) == [
        ("xdel", KEYS.contributions("a"), (b"1-0", b"2-0"))
    ]


def test_consumed_commands_are_deleted_from_the_control_stream() -> None:
    assert written(do.Consume("command read", "", (b"1-0",))) == [("xdel", KEYS.control, (b"1-0",))]


def test_booked_tokens_are_added_up_inside_redis() -> None:
    assert written(do.Book("merged", 7, 3, "applied", 500)) == [("hincrby", KEYS.ledger, ("7:3:applied", 500))]


def test_nothing_is_written_for_no_tokens() -> None:
    assert written(do.Book("late", 7, 3, "rejected", 0)) == []


def closing(last_of_name: bool) -> do.CloseBooks:
    return do.CloseBooks("closed", 7, "a", 5, ((10, 0, 2), (0, 3, 0)), last_of_name)


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


def test_the_inbox_of_somebody_who_was_not_let_in_is_dropped_if_it_is_empty() -> None:
    assert written(do.ForgetInbox("nobody was let in", "a")) == [("drop_if_empty", KEYS.contributions("a"), ())]


def test_a_new_timeline_makes_broadcast_numbers_jump() -> None:
    assert written(do.NewTimeline("lost", "1-x", 1000)) == [("hincrby", KEYS.state, ("broadcast", 1000))]


def test_a_commit_keeps_the_new_blobs_and_lets_the_old_ones_run_out() -> None:
    blobs = [(name, key) for name, key, _ in written(do.Commit("all arrived", 3, 0, 1))]
    theta, momentum = KEYS.blob("_", "ab", 0), KEYS.blob("_", "cd", 0)
    new = [("exists", theta), ("persist", theta), ("exists", momentum), ("persist", momentum)]
    assert blobs == [*new, ("expire", theta), ("unlink", momentum)]


def test_describing_a_batch_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 0.0)  # else the tape's remark of when differs now and then
    bench = Bench()
    bench.worker("a")
    before = image(bench.state)
    first = describe(*bench.log[-1:], state=bench.state).script_arguments
    assert describe(*bench.log[-1:], state=bench.state).script_arguments == first
    assert image(bench.state) == before


# --- messages ---------------------------------------------------------------------------------------------

VERDICT = msg.Verdict(incarnation=7, fragment=0, base=4, applied=False, tokens=100, reason="late")
MERGED = msg.Merged(
    round=3,
    fragment=0,
    timeline="0-x",
    version=5,
    claim=claim("_"),
    closed="all arrived",
    verdicts=[VERDICT],
    tokens=900,
    reason="why",
)
MESSAGES: list[msg.Message] = [
    msg.Welcome(name="a", nonce=b"n" * 16, incarnation=7),
    msg.Refused(name="a", nonce=b"n" * 16, reason="full", retry=True),
    msg.SendInit(incarnation=7),
    msg.Born(timeline="0-x"),
    msg.Call(round=3, fragment=1, timeline="0-x", base=4, called=[7, 8]),
    MERGED,
    msg.Abandoned(round=3, fragment=1, base=4, reason="quorum 1/2"),
    msg.Verdicts(verdicts=[VERDICT]),
    msg.Resend(incarnation=7, fragment=1, base=4),
    msg.Closed(incarnations=[7], reason="over"),
    msg.Setting(key="rounds.quorum", value=2),
    msg.Pause(),
    msg.Resume(),
    msg.Stop(reason="enough"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: str(message.type))
def test_what_members_are_told(message: msg.Message) -> None:
    assert heard(do.Tell("why", message)) == [message]


def test_what_only_the_synchronizer_needs_is_not_broadcast() -> None:
    assert not heard(
        do.Consume("", "a", (b"1-0",)),
        do.Book("", 7, 0, "lost", 1),
        do.SetTimer("", "sweep", 0.5),
        do.Merge("", 1, 0, 0, ()),
        do.Note("", "rejected"),
        do.Note("", "gone"),
        do.Note("", "back"),
        do.Checkpoint(""),
    )


def test_a_commit_with_hundreds_of_wordy_verdicts_fits_envelopes() -> None:
    verdicts = [VERDICT.model_copy(update={"incarnation": i, "reason": "x" * 160}) for i in range(1000)]
    parts = in_envelopes(MERGED.model_copy(update={"verdicts": verdicts}), "run")
    assert isinstance(parts[-1], msg.Merged), "last: who reads of a version knows what became of its own work"
    told_of = [v.incarnation for m in parts if isinstance(m, msg.Merged | msg.Verdicts) for v in m.verdicts]
    assert told_of == list(range(1000)), "each verdict once"
    assert all(len(msg.encode(message, "run")) <= msg.ENVELOPE_LIMIT for message in parts)


def test_the_reasons_in_a_list_of_verdicts_are_cut_short() -> None:
    bench = Bench(make_spec(quorum=2))
    bench.worker("a")
    bench.worker("b")
    bench.steps(a=2, b=2)
    offer = bench.offer("b")
    bench.send_offer(offer)
    bench.fetch_failed(offer, "x" * 5000)
    bench.worker("c")
    bench.contribute("a")
    [merged] = told(msg.Merged, bench.merge(one(do.Merge, bench.contribute("c"))))
    assert [len(v.reason) for v in merged.verdicts if not v.applied] == [160]


def test_what_the_core_decides_in_a_round_can_be_described() -> None:
    bench = Bench()
    bench.worker("a")
    bench.steps(a=2)
    bench.merge(one(do.Merge, bench.contribute("a")))
    tells = only(do.Tell, bench.log)
    assert [message.type for message in heard(*tells)] == ["born", "welcome", "call", "merged"]
    assert all(len(msg.encode(tell.message, "run")) < 2048 for tell in tells)
    assert only(do.Consume, bench.log)
