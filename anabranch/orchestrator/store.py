"""The stored run: loading it at the start, and one fenced transaction for each batch of decisions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anabranch.errors import MalformedMessage, SpecError
from anabranch.merge.fragments import Layout
from anabranch.orchestrator import events as ev
from anabranch.orchestrator.core import Core
from anabranch.orchestrator.ledger import COLUMNS, Account, column_of
from anabranch.orchestrator.tape import Tape
from anabranch.orchestrator.transcribe import tape_event, transcribe
from anabranch.orchestrator.vault import Vault, Version
from anabranch.orchestrator.view import view
from anabranch.queue import messages
from anabranch.queue.keys import SERVER_FIELD, Keys, fragment_field, member_field
from anabranch.queue.records import RunRecord, read_run, unpack_fragment
from anabranch.queue.scripts import Transaction
from anabranch.spec import MUTABLE, RunSpec

if TYPE_CHECKING:
    from redis.asyncio import Redis


@dataclass
class Stored:
    """A run as its keys describe it; an unborn core if there is none."""

    core: Core
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
        return Stored(Core(begun, nonce), RunRecord(begun, None))
    check_same(keys.run, spec, stored.spec)
    fields: dict[Any, Any] = await redis.hgetall(keys.state)
    broadcast = int(fields.get(b"broadcast", b"0"))
    if b"core" not in fields:
        return Stored(Core(stored.spec, nonce), stored, broadcast=broadcast)
    record = messages.unpack(fields[b"core"])
    members = [messages.unpack(value) for key, value in fields.items() if key.startswith(b"member:")]
    booked: dict[Any, Any] = await redis.hgetall(keys.ledger)
    accounts = _accounts(booked, len(record["fragments"]))
    core = Core.load(record, members, accounts, spec=stored.spec, nonce=nonce, broadcast=broadcast, now=now)
    core.state.departed_books = _departed(booked, len(record["fragments"])) or core.state.departed_books
    server = fields.get(SERVER_FIELD.encode())
    return Stored(
        core,
        stored,
        server.decode() if server is not None else None,
        broadcast,
        tuple(member["incarnation"] for member in members),
        tuple(_claims(fields)),
    )


def _claims(fields: dict[Any, Any]) -> Iterator[messages.Claim]:
    """Of every fragment's record; one that is damaged names nothing."""
    for name, value in fields.items():
        if name.startswith(b"fragment:"):
            with suppress(MalformedMessage, KeyError, TypeError):
                yield from (claim for claim in unpack_fragment(value) if claim is not None)


def check_same(run: str, spec: RunSpec | None, stored: RunSpec) -> None:
    """`SpecError` if a given definition is not the run's."""
    if spec is not None and spec.hash != stored.hash:
        raise SpecError(f"run {run!r} exists with another definition: {_first_difference(spec, stored)}")


async def load_tensors(redis: Redis, keys: Keys, vault: Vault, layout: Layout) -> None:
    """Fetch Θ and momentum that `state` names into the vault."""
    names = [fragment_field(f.index) for f in layout.fragments]
    raw: list[Any] = await redis.hmget(keys.state, names)
    await vault.load(layout, [unpack_fragment(data) for data in raw])


def _accounts(fields: dict[Any, Any], fragments: int) -> dict[int, Account]:
    accounts: dict[int, Account] = {}
    for key, value in fields.items():
        incarnation, fragment, column = key.decode().split(":")
        if incarnation.isdecimal():
            account = accounts.setdefault(int(incarnation), Account.empty(fragments))
            account.add(next(c for c in COLUMNS if c == column), int(fragment), int(value))
    return accounts


def _departed(fields: dict[Any, Any], fragments: int) -> list[list[int]]:
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


class Scribe:
    """Turns a batch of instructions into one transaction: writes, broadcasts, tape, and the core's new state."""

    def __init__(self, keys: Keys, core: Core, vault: Vault, tape: Tape, record: RunRecord) -> None:
        self._keys = keys
        self._core = core
        self._vault = vault
        self._tape = tape
        self._record = record

    def opening(
        self,
        run_id: str | None,
        restored: Sequence[int] | None,
        broadcast: int,
        replaced: Sequence[messages.Claim] = (),
    ) -> Transaction:
        """What a term writes first, besides its first decisions: who it is told by, and what was restored.

        `restored`: incarnations whose records stand in the way of a restored run; None: it is as it was stored.
        `broadcast`: by how much the numbering has to rise to where members may have seen it.
        `replaced`: blobs of what the restored run takes the place of.
        """
        transaction = Transaction(self._keys)
        transaction.set(self._keys.spec, self._record.pack())  # for joiners to read
        if run_id is not None:
            transaction.hset(self._keys.state, {SERVER_FIELD: run_id})
        if restored is not None:
            transaction.unlink(self._keys.ledger)
            transaction.hdel(self._keys.state, [member_field(i) for i in restored])
            for incarnation, account in self._accounts():
                transaction.hset(self._keys.ledger, {f"{incarnation}:{name}": n for name, n in account.items() if n})
            for index, version in enumerate(self._vault.versions):
                self._keep(index, version, transaction)
            for claim in replaced:
                transaction.drop_blob(claim)
            if broadcast > 0:
                transaction.hincrby(self._keys.state, "broadcast", broadcast)
        return transaction

    def parting(self) -> Transaction:
        """What a term writes last: no life of the server is suspected of lacking anything."""
        transaction = Transaction(self._keys)
        transaction.hdel(self._keys.state, [SERVER_FIELD])
        return transaction

    def _accounts(self) -> Iterator[tuple[str, dict[str, int]]]:
        """The ledger's fields as the core has them, by incarnation."""
        state = self._core.state
        for member in state.members.values():
            yield (
                str(member.incarnation),
                {f"{f}:{c}": column_of(member.account, c)[f] for f in range(len(state.fragments)) for c in COLUMNS},
            )
        books = enumerate(state.departed_books)
        yield "departed", {f"{f}:{c}": n for f, row in books for c, n in zip(COLUMNS, row, strict=True)}

    def compose(
        self,
        instructions: Sequence[ev.Instruction],
        now: float,
        transaction: Transaction | None = None,
        *,
        everything: bool = False,
    ) -> tuple[Transaction, list[dict[str, Any]]]:
        """The transaction (one that was begun, or a new one) and the tape events in it; an empty one if nothing
        needs storing."""
        transaction = transaction if transaction is not None else Transaction(self._keys)
        spec = self._core.state.spec
        tape_events: list[dict[str, Any]] = []
        for instruction in instructions:
            if isinstance(instruction, ev.Commit):
                self._commit(instruction, transaction)
            elif isinstance(instruction, ev.Birth):
                self._birth(instruction, transaction)
            elif isinstance(instruction, ev.ChangeSetting):
                self._record = replace(self._record, spec=spec)
                transaction.set(self._keys.spec, self._record.pack())
            for message in transcribe(instruction, transaction, self._keys, self._claim):
                envelope = messages.encode(message, self._keys.run, self._record.schema)
                transaction.broadcast(envelope, spec.limits.broadcast_length)
            if (event := tape_event(instruction)) is not None:
                stamped = self._tape.stamp(event)
                tape_events.append(stamped)
                transaction.xadd(self._keys.tape, {"e": messages.pack(stamped)})
        if transaction or everything:
            if tape_events and not self._tape.failing:  # the stream keeps what the file lacks
                transaction.trim(self._keys.tape, spec.limits.tape_length)
            self._store_core(transaction, now, everything)
        return transaction, tape_events

    def _claim(self, round_number: int) -> messages.Claim:
        return self._vault.prepared[round_number].theta_claim

    def _commit(self, commit: ev.Commit, transaction: Transaction) -> None:
        """The new version's blobs are kept, the superseded ones run out."""
        new, old = self._vault.prepared[commit.round], self._vault.versions[commit.fragment]
        self._keep(commit.fragment, new, transaction)
        transaction.expire_blob(old.theta_claim, self._core.state.spec.limits.superseded_ttl_s)
        if old.momentum_claim is not None:
            transaction.drop_blob(old.momentum_claim)

    def _birth(self, birth: ev.Birth, transaction: Transaction) -> None:
        self._vault.layout, self._vault.versions = birth.payload
        transaction.require_absent(self._keys.state, fragment_field(0))
        self._record = replace(self._record, layout=self._vault.layout)
        transaction.set(self._keys.spec, self._record.pack())
        for index, version in enumerate(self._vault.versions):
            self._keep(index, version, transaction)

    def _keep(self, fragment: int, version: Version, transaction: Transaction) -> None:
        """Make a version the stored one, if every chunk of it is there."""
        for claim in (version.theta_claim, version.momentum_claim):
            if claim is not None:
                transaction.require_blob(claim)
                transaction.keep_blob(claim)
        transaction.hset(self._keys.state, {fragment_field(fragment): version.to_record()})

    def _store_core(self, transaction: Transaction, now: float, everything: bool) -> None:
        core, members = self._core.dump(now, everything=everything)
        fields: dict[str, bytes | str | int] = {"core": messages.pack(core)}
        if everything:
            fields["picture"] = messages.pack(view(self._core.state, now))
        fields |= {member_field(i): messages.pack(member) for i, member in members.items()}
        transaction.hset(self._keys.state, fields)
        if removed := sorted(self._core.state.removed):
            transaction.hdel(self._keys.state, [member_field(i) for i in removed])
            self._core.state.removed.clear()
