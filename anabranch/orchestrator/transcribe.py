"""From instructions of the core to operations of one fenced transaction, broadcast messages and tape events."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pydantic import BaseModel

from anabranch.orchestrator import events as ev
from anabranch.orchestrator.ledger import COLUMNS
from anabranch.orchestrator.timelines import JUMP
from anabranch.queue import messages as msg
from anabranch.queue.keys import Keys, ledger_field
from anabranch.queue.scripts import Transaction

_REASON_LIMIT = 160  # characters of a reason inside a list of verdicts


def transcribe(
    instruction: ev.Instruction, transaction: Transaction, keys: Keys, commit_claim: Callable[[int], msg.Claim]
) -> list[msg.Message]:
    """Add an instruction's writes to the transaction; return what is to be broadcast.

    `commit_claim(round)` gives the claim of the new version that a `Commit` of that round announces.
    """
    match instruction:
        case ev.Consume():
            stream = keys.contributions(instruction.worker) if instruction.worker else keys.control
            if entries := [entry for entry in instruction.entries if entry]:
                transaction.xdel(stream, entries)
        case ev.Book() if instruction.tokens:
            name = ledger_field(instruction.incarnation, instruction.fragment, instruction.column)
            transaction.hincrby(keys.ledger, name, instruction.tokens)
        case ev.Close():
            _close_books(instruction, transaction, keys)
        case ev.NewTimeline():
            transaction.hincrby(keys.state, "broadcast", JUMP)
        case ev.TurnAway(shared=False):
            transaction.drop_if_empty(keys.contributions(instruction.name))
    message = _message(instruction, commit_claim)
    return [] if message is None else _in_envelopes(message, keys.run)


def _in_envelopes(message: msg.Message, run: str) -> list[msg.Message]:
    """Split a list of verdicts that one envelope cannot hold. A merge comes last: whoever reads of a version knows
    what became of its own contribution to it."""
    if not isinstance(message, msg.Merged | msg.Verdicts) or len(message.verdicts) < 2 or msg.fits(message, run):
        return [message]
    half = len(message.verdicts) // 2
    last = message.model_copy(update={"verdicts": message.verdicts[half:]})
    return [*_in_envelopes(msg.Verdicts(verdicts=message.verdicts[:half]), run), *_in_envelopes(last, run)]


def _close_books(instruction: ev.Close, transaction: Transaction, keys: Keys) -> None:
    """Fold an incarnation's books into the run's and drop its streams: both stay bounded."""
    fields = []
    for fragment, booked in enumerate(instruction.books):
        for column, tokens in zip(COLUMNS, booked, strict=True):
            if tokens:
                transaction.hincrby(keys.ledger, f"departed:{fragment}:{column}", tokens)
            fields.append(ledger_field(instruction.incarnation, fragment, column))
    transaction.hdel(keys.ledger, fields)
    if instruction.last_of_name:
        transaction.unlink(keys.progress(instruction.name))
        transaction.drop_if_empty(keys.contributions(instruction.name))


def _message(instruction: ev.Instruction, commit_claim: Callable[[int], msg.Claim]) -> msg.Message | None:
    match instruction:
        case ev.Welcome(name=name, nonce=nonce, incarnation=incarnation):
            return msg.Welcome(name=name, nonce=nonce, incarnation=incarnation)
        case ev.TurnAway():
            return msg.Refused(
                name=instruction.name, nonce=instruction.nonce, reason=instruction.reason, retry=instruction.retry
            )
        case ev.AskInit(incarnation=incarnation):
            return msg.SendInit(incarnation=incarnation)
        case ev.Birth(timeline=timeline):
            return msg.Born(timeline=timeline)
        case ev.NewTimeline(timeline=timeline):
            return msg.Born(timeline=timeline)  # members read `state` again; the jump in the numbers says so, too
        case ev.OpenRound():
            return msg.Call(
                round=instruction.round,
                fragment=instruction.fragment,
                timeline=instruction.timeline,
                base=instruction.base,
                called=list(instruction.called),
            )
        case ev.Commit():
            return _merged(instruction, commit_claim(instruction.round))
        case ev.Abandon():
            return msg.Abandoned(
                round=instruction.round,
                fragment=instruction.fragment,
                base=instruction.base,
                reason=instruction.reason,
            )
        case ev.Settle(verdicts=verdicts):
            return msg.Verdicts(verdicts=_verdicts(verdicts))
        case ev.AskAgain():
            return msg.Resend(
                incarnation=instruction.incarnation, fragment=instruction.fragment, base=instruction.base
            )
        case ev.Close(incarnation=incarnation) | ev.TellClosed(incarnation=incarnation):
            return msg.Closed(incarnations=[incarnation], reason=instruction.reason)
        case ev.Grant():
            return _leases(instruction)
        case ev.AskState(incarnation=incarnation, to=to):
            return msg.SendState(incarnation=incarnation, to=to)
        case ev.GiveState(incarnation=incarnation, to=to, claim=claim):
            reason = "" if claim is not None else instruction.reason[:_REASON_LIMIT]
            return msg.PeerState(to=to, incarnation=incarnation, claim=claim, reason=reason)
        case ev.ChangeSetting(key=key, value=value):
            return msg.Setting(key=key, value=value)
        case ev.Announce(what=what):
            if what == "stop":
                return msg.Stop(reason=instruction.reason)
            return msg.Pause() if what == "pause" else msg.Resume()
    return None


def _merged(commit: ev.Commit, claim: msg.Claim) -> msg.Merged:
    return msg.Merged(
        round=commit.round,
        fragment=commit.fragment,
        timeline=commit.timeline,
        version=commit.version,
        claim=claim,
        closed=commit.closed,
        verdicts=_verdicts(commit.verdicts),
        tokens=min(commit.tokens, msg.MOST_TOKENS),
        reason=commit.reason[:_REASON_LIMIT],
    )


def _leases(grant: ev.Grant) -> msg.Leases:
    return msg.Leases(
        incarnation=grant.incarnation,
        timeline=grant.timeline,
        leases=list(grant.leases),
        exhausted=grant.exhausted,
        refused=grant.refused,
    )


def _verdicts(verdicts: Sequence[ev.Verdict]) -> list[msg.Verdict]:
    return [
        msg.Verdict(
            incarnation=v.incarnation,
            fragment=v.fragment,
            base=v.base,
            applied=v.applied,
            tokens=v.tokens,
            reason=v.reason[:_REASON_LIMIT],
        )
        for v in verdicts
    ]


def tape_event(instruction: ev.Instruction) -> dict[str, Any] | None:
    """An instruction as an event of the tape, with plain values; None if it is not for the tape."""
    if not instruction.on_tape:
        return None
    fields = {f.name: _plain(getattr(instruction, f.name)) for f in dataclasses.fields(instruction) if f.repr}
    kind = _KINDS.get(type(instruction), type(instruction).__name__.lower())
    return {"kind": kind, **fields} if not isinstance(instruction, ev.Note) else fields


_KINDS: dict[type[ev.Instruction], str] = {
    ev.Welcome: "joined",
    ev.TurnAway: "turned away",
    ev.AskInit: "init asked",
    ev.Birth: "born",
    ev.NewTimeline: "timeline",
    ev.OpenRound: "opened",
    ev.Commit: "merged",
    ev.Abandon: "abandoned",
    ev.Reject: "rejected",
    ev.Settle: "settled",
    ev.AskAgain: "resend",
    ev.AskState: "state asked",
    ev.GiveState: "state given",
    ev.Gone: "gone",
    ev.Close: "closed",
    ev.TellClosed: "told closed",
    ev.ChangeSetting: "set",
    ev.Announce: "announced",
    ev.Checkpoint: "checkpoint",
}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, BaseModel):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
