"""The core's state as plain values: what a leader stores, what its successor makes of it, and exact images.

Every field is stored unless it is named here with a reason. Two uses:

- `core_record` and `member_record` are what lies in Redis and in checkpoints; `restore` is their inverse for
  *another* process, whose clock is another and who has heard nothing yet.
- `image` and `from_image` keep everything, instants as they are: a core that is fed the same events afterwards
  decides the same, bit for bit. The journal begins with one.

Both are the leader's own: members read messages instead (`heads.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgpack
from pydantic import TypeAdapter

from anabranch.errors import MalformedMessage, SpecError
from anabranch.orchestrator.core.ledger import COLUMNS, Account
from anabranch.orchestrator.core.state import Member, State
from anabranch.queue.messages import unpack
from anabranch.spec import RunSpec, parse_spec

_DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, SpecError)
_STATE: TypeAdapter[State] = TypeAdapter(State)
_MEMBER: TypeAdapter[Member] = TypeAdapter(Member)

#: What is not stored of the state, and what a successor has instead.
STATE_NOT_STORED = {
    "spec": "stored in the key `spec`",
    "nonce": "each leader has its own",
    "members": "a record each",
    "init_given": "said by `Started`",
    "init_reading": "it reads the offer again",
    "orphaned": "any heartbeat says so again",
    "due_at": "it is due again at once",
    "full": "it looks itself",
    "draining": "it has only just come",
    "changed": "everything is stored at its start",
    "removed": "everything is stored at its start",
    "unmarked": "their batch is stored with this record",
    "committing": "its clock is another",
}
FRAGMENT_NOT_STORED = {"in_hand": "its inbox entries are read again"}
ROUND_NOT_STORED = {
    "stage": "it collects again",
    "quorum_at": "contributions are read again",
    "grace_s": "its window opens again",
    "closed": "its merge is begun again",
    "closed_at": "its merge is begun again",
    "parts": "contributions are read again",
}
MEMBER_NOT_STORED = {
    "account": "stored in the ledger",
    "joined_at": "it has the new leader's patience, too",
    "observed_s": "measured again",
    "stepped_at": "it has not been heard yet",
    "fetching": "its inbox entries are read again",
    "outcome_read": "before the last broadcast entry, all of them",
    "imbalances": "noted again",
    "lately": "measured again",
    "state_from": "the joiner asks again",
}

_STORED: Any = {
    **dict.fromkeys(STATE_NOT_STORED, True),
    "fragments": {"__all__": set(FRAGMENT_NOT_STORED)},
    "rounds": {"__all__": set(ROUND_NOT_STORED)},
}


def pack_record(value: object) -> bytes:
    """msgpack, sets as lists in their order."""
    data: bytes = msgpack.packb(value, default=sorted)
    return data


def core_record(state: State, now: float) -> bytes:
    """Everything but members, and the instant that its own are relative to."""
    return pack_record({"now": now, "state": _STATE.dump_python(state, exclude=_STORED)})


def member_record(member: Member, now: float) -> bytes:
    return pack_record({"now": now, "member": _MEMBER.dump_python(member, exclude=set(MEMBER_NOT_STORED))})


def restore(
    record: bytes,
    members: Iterable[bytes],
    accounts: Mapping[int, Account],
    *,
    spec: RunSpec,
    nonce: str,
    broadcast: int,
    now: float,
) -> State:
    """What a new leader begins with. `accounts`: the ledger's booked figures by incarnation; `broadcast`: number of
    the last entry, past every outcome stored so far. `MalformedMessage` if a record is damaged."""
    try:
        held = unpack(record)
        ago = now - held["now"]
        plain = {**held["state"], "spec": spec, "nonce": nonce}
        plain["rounds"] = {n: {**r, "opened_at": r["opened_at"] + ago} for n, r in plain["rounds"].items()}
        plain["interval_at"] += ago
        state = _STATE.validate_python(plain)
        for data in members:
            member = _restore_member(unpack(data), accounts, len(state.fragments), broadcast, now)
            state.members[member.incarnation] = member
        _check(state)
        state.rounds = {n: r for n, r in state.rounds.items() if state.fragments[r.fragment].version == r.base}
    except _DAMAGE as error:
        said = f"{type(error).__name__} {' '.join(str(error).split()):.200}"
        raise MalformedMessage(f"the stored state is damaged: {said}") from None
    return state


def _check(state: State) -> None:
    """What the core relies on and no type says; ValueError."""
    count = len(state.fragments)
    if [fragment.index for fragment in state.fragments] != list(range(count)):
        raise ValueError("its fragments are not numbered from 0")
    if any(not 0 <= round_.fragment < count for round_ in state.rounds.values()):
        raise ValueError("a round is on a fragment that is not there")
    for member in state.members.values():
        account = member.account
        lengths = {
            len(member.adopted),
            len(member.held),
            len(member.known),
            *(len(account.column(c)) for c in COLUMNS),
        }
        if lengths != {count}:
            raise ValueError(f"incarnation {member.incarnation} has figures for other than {count} fragments")


def _restore_member(
    held: dict[str, Any], accounts: Mapping[int, Account], fragments: int, broadcast: int, now: float
) -> Member:
    plain = held["member"]
    plain["seen_at"] += now - held["now"]
    account = accounts.get(plain["incarnation"]) or Account.empty(fragments)
    member = _MEMBER.validate_python({**plain, "account": account, "joined_at": now})
    member.outcome_read = dict.fromkeys(member.outcomes, broadcast)
    return member


def image(state: State) -> bytes:
    """Everything, exactly."""
    return pack_record(
        {"spec": state.spec.model_dump(mode="json"), "state": _STATE.dump_python(state, exclude={"spec"})}
    )


def from_image(data: bytes) -> State:
    """The inverse of `image`; `MalformedMessage` if damaged."""
    held = unpack(data)
    try:
        return _STATE.validate_python({**held["state"], "spec": parse_spec(held["spec"])})
    except _DAMAGE as error:
        raise MalformedMessage(f"the image is damaged: {error!s:.200}") from None
