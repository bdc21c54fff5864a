"""The stored run as a new leader finds it, and what differs between two definitions of one."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from anabranch.errors import CommandRefused, MalformedMessage, MessageError, SpecError
from anabranch.merge.fragments import Layout
from anabranch.orchestrator.core.ledger import COLUMNS, Account
from anabranch.orchestrator.core.record import restore
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.vault import Vault
from anabranch.queue import messages, records
from anabranch.queue.keys import CORE_FIELD, HEAD_FIELD, SERVER_FIELD, Keys, fragment_field, momentum_field
from anabranch.queue.records import RunRecord, read_run
from anabranch.spec import MUTABLE, RunSpec

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.queue.scripts import FencedWriter

T = TypeVar("T")


@dataclass
class Stored:
    """A run as its keys describe it; an unborn state if there is none."""

    state: State
    record: RunRecord
    run_id: str | None = None  # of the server's life that the last leader wrote to
    broadcast: int = 0  # number of the last entry
    members: tuple[int, ...] = ()  # incarnations that have a record
    claims: tuple[messages.Claim, ...] = ()  # blobs that it names
    damage: str | None = None  # why it cannot be read; the state is an unborn one then
    redefined: str | None = None  # how the definition differs from what members know


async def read_stored(
    redis: Redis, keys: Keys, spec: RunSpec | None, nonce: str, now: float, *, may_change: bool = False
) -> Stored:
    """Read a stored run, or begin one. `SpecError` if `spec` differs from the stored one in what cannot change.

    `spec` None takes the stored one. Mutable settings continue as stored. `may_change`: `spec` takes its place if the
    run has no model yet. Whatever cannot be read is `damage`.
    """
    found = await _read_stored(redis, keys, spec, nonce, now)
    stored, state = found.record.spec, found.state
    if spec is None or spec.hash == stored.hash:
        return found
    if not may_change or found.record.layout is not None or state.born or state.orphaned or found.damage is not None:
        check_same(keys.run, spec, stored)
    state.spec = spec
    difference = _first_difference(spec, stored, "now", "before")
    why = f"the run's definition was changed before it had a model: {difference}"
    return replace(found, record=replace(found.record, spec=spec), redefined=why)


async def _read_stored(redis: Redis, keys: Keys, spec: RunSpec | None, nonce: str, now: float) -> Stored:
    found: list[str] = []
    record = await _read(read_run(redis, keys), found)
    fields, booked = await _read_hash(redis, keys.state, found), await _read_hash(redis, keys.ledger, found)
    was_born = any(name.startswith(b"fragment:") for name in fields) or (
        record is not None and record.layout is not None
    )
    if record is None and was_born:
        found.append("its definition is gone")
    record = record or RunRecord(spec or RunSpec(name=keys.run), None)
    stored = Stored(State(record.spec, nonce), record, claims=tuple(_claims(fields, keys.run)))
    try:
        stored.broadcast = int(fields.get(b"broadcast", b"0"))
        if CORE_FIELD.encode() in fields and not found:
            _restore(stored, fields, booked, nonce, now)
        if stored.state.born != was_born and not found:
            found.append("its core is gone, or of before its birth" if was_born else "its versions are gone")
    except (MessageError, *records.DAMAGE) as error:
        found.append(str(error) if isinstance(error, MessageError) else records.said(error))
    if found:
        stored.state = State(record.spec, nonce, timeline=_timeline(fields, keys.run))
        stored.damage = f"what is stored is damaged ({found[0]})"
    return stored


async def _read(reading: Awaitable[T], found: list[str]) -> T | None:
    """The result, or None: then what is wrong with it is `found`."""
    try:
        return await reading
    except MalformedMessage as error:
        found.append(str(error))
    except CommandRefused as error:
        if error.code != "WRONGTYPE":
            raise
        found.append("a key is of another type")
    return None


async def _read_hash(redis: Redis, key: str, found: list[str]) -> dict[bytes, bytes]:
    reading: Awaitable[Any] = redis.hgetall(key)
    return await _read(reading, found) or {}


def _restore(stored: Stored, fields: dict[bytes, bytes], booked: dict[bytes, bytes], nonce: str, now: float) -> None:
    """Everything of a run that was stored; what cannot be read raises one of `records.DAMAGE` or `MessageError`."""
    found = {int(key[7:]): value for key, value in fields.items() if key.startswith(b"member:")}
    members = dict(sorted(found.items()))  # as they came, not in the order of a hash
    spec = stored.record.spec
    layout = stored.record.layout
    state = restore(
        fields[CORE_FIELD.encode()],
        members.values(),
        _accounts(booked, len(layout.fragments) if layout is not None else spec.rounds.fragments),
        spec=spec,
        nonce=nonce,
        broadcast=stored.broadcast,
        now=now,
    )
    if state.born and b"broadcast" not in fields:
        raise MalformedMessage("the number of the last broadcast entry is gone")
    if state.applied_parameter_tokens and not booked:
        raise MalformedMessage("the ledger is gone")
    if state.members.keys() != members.keys():
        raise MalformedMessage("a member's record is another's")
    if layout is not None and [f.size for f in layout.fragments] != state.sizes:
        raise MalformedMessage("the core's fragments are not those of the layout")
    state.departed_books = _departed(booked, len(state.fragments)) or state.departed_books
    server = fields.get(SERVER_FIELD.encode())
    stored.state, stored.members = state, tuple(members)
    stored.run_id = server.decode(errors="replace") if server is not None else None


def _timeline(fields: dict[bytes, bytes], run: str) -> str:
    """As members last read it, so that it is outlasted; "" if that is damaged, too."""
    with suppress(MessageError):
        return records.read_record(messages.Head, fields.get(HEAD_FIELD.encode()), run).timeline
    return ""


async def make_room(redis: Redis, writer: FencedWriter, keys: Keys, *, damaged: bool) -> list[str]:
    """Rename what a term could not write to; names of those keys. Streams hold nothing that is not made good.

    `damaged`: what is stored cannot be read, and a copy is about to take its place.
    """
    expected = dict.fromkeys((keys.broadcast, keys.tape, keys.control), "stream")
    if damaged:
        expected |= {keys.spec: "string", keys.ledger: "hash", keys.state: ""}
    found: dict[str, Any] = {key: await redis.type(key) for key in expected}
    names = [key for key, kind in expected.items() if found[key].decode() not in (kind, "none")]
    if names:
        await writer.set_aside(names)
    return names


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


async def load_tensors(redis: Redis, keys: Keys, vault: Vault, layout: Layout, state: State) -> None:
    """Fetch Θ and momentum that the key `state` names into the vault; `MessageError` or `PayloadError` if damaged."""
    count = len(layout.fragments)
    names = [*map(fragment_field, range(count)), *map(momentum_field, range(count))]
    found: list[Any] = await redis.hmget(keys.state, names)
    heads = [records.read_record(messages.FragmentHead, data, keys.run) for data in found[:count]]
    momenta = [records.unpack_claim(data) if data is not None else None for data in found[count:]]
    for fragment, head, momentum in zip(state.fragments, heads, momenta, strict=True):
        if (head.version, head.claim.digest) != (fragment.version, fragment.digest):
            raise MalformedMessage(f"fragment {fragment.index} is not the one that the core knows")
        if momentum is None and head.version > 0:
            raise MalformedMessage(f"the momentum of fragment {fragment.index} is gone")
    await vault.load(layout, list(zip((head.claim for head in heads), momenta, strict=True)))


def _accounts(fields: dict[bytes, bytes], fragments: int) -> dict[int, Account]:
    accounts: dict[int, Account] = {}
    for key, value in fields.items():
        incarnation, fragment, column = key.decode().split(":")
        if incarnation.isdecimal():
            account = accounts.setdefault(int(incarnation), Account.empty(fragments))
            account.add(COLUMNS[COLUMNS.index(column)], int(fragment), int(value))
    return accounts


def _departed(fields: dict[bytes, bytes], fragments: int) -> list[list[int]]:
    """The books of all closed incarnations together; empty if none was closed."""
    books = [[int(fields.get(f"departed:{f}:{c}".encode(), b"0")) for c in COLUMNS] for f in range(fragments)]
    return books if any(map(any, books)) else []


def _first_difference(new: RunSpec, stored: RunSpec, here: str = "here", there: str = "in the run") -> str:
    ours, theirs = new.model_dump(mode="json"), stored.model_dump(mode="json")
    for section, value in ours.items():
        if not isinstance(value, dict):
            if value != theirs[section]:
                return f"{section} = {value!r} {here}, {theirs[section]!r} {there}"
            continue
        for key, item in value.items():
            if item != theirs[section].get(key) and f"{section}.{key}" not in MUTABLE:
                return f"{section}.{key} = {item!r} {here}, {theirs[section].get(key)!r} {there}"
    return "its hash differs"
