"""The stored run: loading it at the start, and one fenced transaction for each batch of decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from anabranch.errors import SpecError
from anabranch.merge.fragments import Layout
from anabranch.orchestrator import events as ev
from anabranch.orchestrator.core import Core
from anabranch.orchestrator.ledger import COLUMNS, Account
from anabranch.orchestrator.tape import Tape
from anabranch.orchestrator.transcribe import tape_event, transcribe
from anabranch.orchestrator.vault import Vault
from anabranch.orchestrator.view import view
from anabranch.queue import messages
from anabranch.queue.keys import Keys, fragment_field, member_field
from anabranch.queue.records import RunRecord, read_run, unpack_fragment
from anabranch.queue.scripts import Transaction
from anabranch.spec import MUTABLE, RunSpec

if TYPE_CHECKING:
    from redis.asyncio import Redis


async def load(redis: Redis, keys: Keys, spec: RunSpec | None, timeline: str, now: float) -> tuple[Core, RunRecord]:
    """Read a stored run, or begin one. `SpecError` if `spec` differs from the stored one in what cannot change.

    `spec` None takes the stored one. Mutable settings continue as stored.
    """
    stored = await read_run(redis, keys)
    if stored is None:
        begun = spec or RunSpec(name=keys.run)
        return Core(begun, timeline), RunRecord(begun, None)
    if spec is not None and spec.hash != stored.spec.hash:
        raise SpecError(f"run {keys.run!r} exists with another definition: {_first_difference(spec, stored.spec)}")
    fields: dict[Any, Any] = await redis.hgetall(keys.state)
    if b"core" not in fields:
        return Core(stored.spec, timeline), stored
    record = messages.unpack(fields[b"core"])
    members = [messages.unpack(value) for key, value in fields.items() if key.startswith(b"member:")]
    count = len(record["fragments"])
    accounts = _accounts(await redis.hgetall(keys.ledger), count)
    core = Core.load(
        record, members, accounts, spec=stored.spec, broadcast=int(fields.get(b"broadcast", b"0")), now=now
    )
    return core, stored


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

    def write_spec(self) -> Transaction:
        """The spec (and layout) for joiners to read."""
        transaction = Transaction(self._keys)
        transaction.set(self._keys.spec, self._record.pack())
        return transaction

    def compose(
        self, instructions: Sequence[ev.Instruction], now: float, *, everything: bool = False
    ) -> tuple[Transaction, list[dict[str, Any]]]:
        """The transaction and the tape events in it; an empty one if nothing needs storing."""
        transaction = Transaction(self._keys)
        spec = self._core.state.spec
        tape_events: list[dict[str, Any]] = []
        for instruction in instructions:
            if isinstance(instruction, ev.Commit):
                self._commit(instruction, transaction)
            elif isinstance(instruction, ev.Birth):
                self._birth(instruction, transaction)
            elif isinstance(instruction, ev.ChangeSetting):
                self._record = RunRecord(spec, self._record.layout)
                transaction.set(self._keys.spec, self._record.pack())
            for message in transcribe(instruction, transaction, self._keys, self._claim):
                transaction.broadcast(messages.encode(message, self._keys.run), spec.limits.broadcast_length)
            if (event := tape_event(instruction)) is not None:
                stamped = self._tape.stamp(event)
                tape_events.append(stamped)
                transaction.xadd(self._keys.tape, {"e": messages.pack(stamped)})
        if transaction or everything:
            if tape_events:
                transaction.trim(self._keys.tape, spec.limits.tape_length)
            self._store_core(transaction, now, everything)
        return transaction, tape_events

    def _claim(self, round_number: int) -> messages.Claim:
        return self._vault.prepared[round_number].theta_claim

    def _commit(self, commit: ev.Commit, transaction: Transaction) -> None:
        """The new version's blobs are kept, the superseded ones run out."""
        new, old = self._vault.prepared[commit.round], self._vault.versions[commit.fragment]
        for claim in (new.theta_claim, new.momentum_claim):
            if claim is not None:
                transaction.require_blob(claim)
                transaction.keep_blob(claim)
        transaction.hset(self._keys.state, {fragment_field(commit.fragment): new.to_record()})
        transaction.expire_blob(old.theta_claim, self._core.state.spec.limits.superseded_ttl_s)
        if old.momentum_claim is not None:
            transaction.drop_blob(old.momentum_claim)

    def _birth(self, birth: ev.Birth, transaction: Transaction) -> None:
        self._vault.layout, self._vault.versions = birth.payload
        transaction.require_absent(self._keys.state, fragment_field(0))
        self._record = RunRecord(self._record.spec, self._vault.layout)
        transaction.set(self._keys.spec, self._record.pack())
        for index, version in enumerate(self._vault.versions):
            transaction.require_blob(version.theta_claim)
            transaction.keep_blob(version.theta_claim)
            transaction.hset(self._keys.state, {fragment_field(index): version.to_record()})

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
