"""The stored run as a new leader finds it, and what differs between two definitions of one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anabranch.errors import MessageError, SpecError
from anabranch.merge.fragments import Layout
from anabranch.orchestrator.core.ledger import COLUMNS, Account
from anabranch.orchestrator.core.record import restore
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.vault import Vault
from anabranch.queue import messages, records
from anabranch.queue.keys import CORE_FIELD, SERVER_FIELD, Keys, fragment_field, momentum_field
from anabranch.queue.records import RunRecord, read_run
from anabranch.spec import MUTABLE, RunSpec

if TYPE_CHECKING:
    from redis.asyncio import Redis


@dataclass
class Stored:
    """A run as its keys describe it; an unborn state if there is none."""

    state: State
    record: RunRecord
    run_id: str | None = None  # of the server's life that the last leader wrote to
    broadcast: int = 0  # number of the last entry
    members: tuple[int, ...] = ()  # incarnations that have a record
    claims: tuple[messages.Claim, ...] = ()  # blobs that it names


async def read_stored(redis: Redis, keys: Keys, spec: RunSpec | None, nonce: str, now: float) -> Stored:
    """Read a stored run, or begin one. `SpecError` if `spec` differs from the stored one in what cannot change.

    `spec` None takes the stored one. Mutable settings continue as stored.
    """
    stored = await read_run(redis, keys)
    if stored is None:
        begun = spec or RunSpec(name=keys.run)
        return Stored(State(begun, nonce), RunRecord(begun, None))
    check_same(keys.run, spec, stored.spec)
    fields: dict[Any, Any] = await redis.hgetall(keys.state)
    broadcast = int(fields.get(b"broadcast", b"0"))
    if CORE_FIELD.encode() not in fields:
        return Stored(State(stored.spec, nonce), stored, broadcast=broadcast)
    booked: dict[Any, Any] = await redis.hgetall(keys.ledger)
    members = {int(key[7:]): value for key, value in fields.items() if key.startswith(b"member:")}
    state = restore(
        fields[CORE_FIELD.encode()],
        members.values(),
        _accounts(booked, stored.spec.rounds.fragments),
        spec=stored.spec,
        nonce=nonce,
        broadcast=broadcast,
        now=now,
    )
    state.departed_books = _departed(booked, len(state.fragments)) or state.departed_books
    server = fields.get(SERVER_FIELD.encode())
    claims = tuple(_claims(fields, keys.run))
    return Stored(state, stored, server.decode() if server is not None else None, broadcast, tuple(members), claims)


def _claims(fields: dict[bytes, bytes], run: str) -> Iterator[messages.Claim]:
    """Of every fragment's Θ and momentum; a record that is damaged names nothing."""
    for name, value in fields.items():
        with suppress(MessageError):
            if name.startswith(b"fragment:"):
                yield records.read_record(messages.FragmentHead, value, run).claim
            elif name.startswith(b"momentum:"):
                yield records.unpack_claim(value)


def check_same(run: str, spec: RunSpec | None, stored: RunSpec) -> None:
    """`SpecError` if a given definition is not the run's."""
    if spec is not None and spec.hash != stored.hash:
        raise SpecError(f"run {run!r} exists with another definition: {_first_difference(spec, stored)}")


async def load_tensors(redis: Redis, keys: Keys, vault: Vault, layout: Layout) -> None:
    """Fetch Θ and momentum that `state` names into the vault."""
    count = len(layout.fragments)
    names = [*map(fragment_field, range(count)), *map(momentum_field, range(count))]
    found: list[Any] = await redis.hmget(keys.state, names)
    thetas = [records.read_record(messages.FragmentHead, data, keys.run).claim for data in found[:count]]
    momenta = [records.unpack_claim(data) if data is not None else None for data in found[count:]]
    await vault.load(layout, list(zip(thetas, momenta, strict=True)))


def _accounts(fields: dict[bytes, bytes], fragments: int) -> dict[int, Account]:
    accounts: dict[int, Account] = {}
    for key, value in fields.items():
        incarnation, fragment, column = key.decode().split(":")
        if incarnation.isdecimal():
            account = accounts.setdefault(int(incarnation), Account.empty(fragments))
            account.add(next(c for c in COLUMNS if c == column), int(fragment), int(value))
    return accounts


def _departed(fields: dict[bytes, bytes], fragments: int) -> list[list[int]]:
    """The books of all closed incarnations together; empty if none was closed."""
    books = [[int(fields.get(f"departed:{f}:{c}".encode(), b"0")) for c in COLUMNS] for f in range(fragments)]
    return books if any(map(any, books)) else []


def _first_difference(new: RunSpec, stored: RunSpec) -> str:
    ours, theirs = new.model_dump(mode="json"), stored.model_dump(mode="json")
    for section, value in ours.items():
        if not isinstance(value, dict):
            if value != theirs[section]:
                return f"{section} = {value!r} here, {theirs[section]!r} in the run"
            continue
        for key, item in value.items():
            if item != theirs[section].get(key) and f"{section}.{key}" not in MUTABLE:
                return f"{section}.{key} = {item!r} here, {theirs[section].get(key)!r} in the run"
    return "its hash differs"
