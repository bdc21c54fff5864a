"""One batch of the core as one fenced transaction: writes, broadcasts, tape, and the core's new state.

Describing a batch changes neither the core nor the vault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from anabranch.errors import OversizedMessage
from anabranch.orchestrator.core import heads, record
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.ledger import COLUMNS
from anabranch.orchestrator.core.port import Batch, Core
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.core.view import view
from anabranch.orchestrator.tape import Event as TapeEvent
from anabranch.orchestrator.tape import Tape, tape_event
from anabranch.orchestrator.vault import Vault, Version
from anabranch.queue import messages, records
from anabranch.queue.keys import (
    BROADCAST_FIELD,
    CORE_FIELD,
    HEAD_FIELD,
    PICTURE_FIELD,
    SERVER_FIELD,
    Keys,
    fragment_field,
    ledger_field,
    member_field,
    momentum_field,
    own_field,
)
from anabranch.queue.scripts import Transaction


class Scribe:
    """One term's."""

    def __init__(self, keys: Keys, core: Core, vault: Vault, tape: Tape, run: records.RunRecord) -> None:
        self._keys = keys
        self._core = core
        self._vault = vault
        self._tape = tape
        self._run = run

    # --- a term's first and last write --------------------------------------------------------------------

    def opening(
        self,
        run_id: str | None,
        restored: Sequence[int] | None = None,
        broadcast: int = 0,
        replaced: Sequence[messages.Claim] = (),
    ) -> Transaction:
        """What the first write of a term brings besides the first decisions: which life of the server it trusts.

        `restored`: the model was put back from a copy, which is stored in full and replaces the stored members
        (those incarnations) and blobs (`replaced`); `broadcast` is by how much numbering has to catch up with what
        members saw.
        """
        transaction = Transaction(self._keys)
        transaction.set(self._keys.spec, self._run.pack())
        if run_id is not None:
            transaction.hset(self._keys.state, {SERVER_FIELD: run_id})
        if restored is None:
            return transaction
        transaction.hdel(self._keys.state, [name(i) for i in restored for name in (member_field, own_field)])
        transaction.unlink(self._keys.ledger)
        booked = {f"{number}:{name}": n for number, account in self._accounts() for name, n in account.items() if n}
        if booked:
            transaction.hset(self._keys.ledger, booked)
        for index, version in enumerate(self._vault.versions):
            self._keep(transaction, index, self._core.state.fragments[index].version, version)
        for claim in replaced:
            transaction.drop_blob(claim)
        if broadcast > 0:
            transaction.hincrby(self._keys.state, BROADCAST_FIELD, broadcast)
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
                {f"{f}:{c}": member.account.column(c)[f] for f in range(len(state.fragments)) for c in COLUMNS},
            )
        books = enumerate(state.departed_books)
        yield "departed", {f"{f}:{c}": n for f, row in books for c, n in zip(COLUMNS, row, strict=True)}

    # --- a batch ------------------------------------------------------------------------------------------

    def describe(
        self, batch: Batch, now: float, begun: Transaction | None = None
    ) -> tuple[Transaction, list[TapeEvent]]:
        """The transaction (`begun`: one that is to hold this batch, too) and the tape events in it."""
        state = self._core.state
        transaction = begun if begun is not None else Transaction(self._keys)
        tape_events = []
        for instruction in batch.instructions:
            self._write(instruction, transaction, state)
            if (event := tape_event(instruction)) is not None:
                tape_events.append(self._tape.stamp(event))
                transaction.xadd(self._keys.tape, {"e": messages.pack(tape_events[-1])})
        if tape_events and not self._tape.failing:  # the stream keeps what the file lacks
            transaction.trim(self._keys.tape, state.spec.limits.tape_length)
        self._store_state(batch, now, transaction, state)
        return transaction, tape_events

    def _write(self, instruction: do.Instruction, transaction: Transaction, state: State) -> None:
        keys = self._keys
        match instruction:
            case do.Tell():
                self._tell(instruction.message, transaction, state)
            case do.Consume():
                stream = keys.contributions(instruction.sender) if instruction.sender else keys.control
                transaction.xdel(stream, instruction.entries)
            case do.Book() if instruction.tokens:
                name = ledger_field(instruction.incarnation, instruction.fragment, instruction.column)
                transaction.hincrby(keys.ledger, name, instruction.tokens)
            case do.Commit():
                self._commit(instruction, transaction, state)
            case do.Birth():
                self._birth(transaction)
            case do.NewTimeline(jump=jump):
                transaction.hincrby(keys.state, BROADCAST_FIELD, jump)
            case do.CloseBooks():
                self._close_books(instruction, transaction)
            case do.ForgetInbox(name=name):
                transaction.drop_if_empty(keys.contributions(name))

    def _tell(self, message: messages.Message, transaction: Transaction, state: State) -> None:
        if isinstance(message, messages.Setting):
            self._run = replace(self._run, spec=state.spec)
            transaction.set(self._keys.spec, self._run.pack())
        for part in in_envelopes(message, self._keys.run):
            envelope = messages.encode(part, self._keys.run, self._run.schema)
            transaction.broadcast(envelope, state.spec.limits.broadcast_length)

    def _commit(self, commit: do.Commit, transaction: Transaction, state: State) -> None:
        """The new version's blobs are kept, the superseded ones run out."""
        new, old = self._vault.prepared[commit.round], self._vault.versions[commit.fragment]
        self._keep(transaction, commit.fragment, commit.version, new)
        transaction.expire_blob(old.theta_claim, state.spec.limits.superseded_ttl_s)
        if old.momentum_claim is not None:
            transaction.drop_blob(old.momentum_claim)

    def _birth(self, transaction: Transaction) -> None:
        newborn = self._vault.newborn
        assert newborn is not None
        layout, versions = newborn
        transaction.require_absent(self._keys.state, fragment_field(0))
        self._run = replace(self._run, layout=layout)
        transaction.set(self._keys.spec, self._run.pack())
        for index, version in enumerate(versions):
            self._keep(transaction, index, 0, version)

    def _keep(self, transaction: Transaction, fragment: int, number: int, version: Version) -> None:
        """Make a version the stored one, if every chunk of it is there."""
        for claim in (version.theta_claim, version.momentum_claim):
            if claim is not None:
                transaction.require_blob(claim)
                transaction.keep_blob(claim)
        head = messages.FragmentHead(version=number, claim=version.theta_claim)
        transaction.hset(self._keys.state, {fragment_field(fragment): self._for_members(head)})
        if version.momentum_claim is not None:
            packed = records.pack_claim(version.momentum_claim)
            transaction.hset(self._keys.state, {momentum_field(fragment): packed})
        else:
            transaction.hdel(self._keys.state, [momentum_field(fragment)])

    def _for_members(self, message: messages.Message) -> bytes:
        return messages.encode(message, self._keys.run, self._run.schema, messages.STATE_LIMIT)

    def _close_books(self, closing: do.CloseBooks, transaction: Transaction) -> None:
        """Fold an incarnation's books into the run's and drop its streams: both stay bounded."""
        keys, fields = self._keys, []
        for fragment, booked in enumerate(closing.books):
            for column, tokens in zip(COLUMNS, booked, strict=True):
                if tokens:
                    transaction.hincrby(keys.ledger, f"departed:{fragment}:{column}", tokens)
                fields.append(ledger_field(closing.incarnation, fragment, column))
        transaction.hdel(keys.ledger, fields)
        if closing.last_of_name:
            transaction.unlink(keys.progress(closing.name))
            transaction.drop_if_empty(keys.contributions(closing.name))

    def _store_state(self, batch: Batch, now: float, transaction: Transaction, state: State) -> None:
        fields: dict[str, bytes | str | int] = {
            CORE_FIELD: record.core_record(state, now),
            HEAD_FIELD: self._for_members(heads.head(state)),
        }
        if batch.everything:
            fields[PICTURE_FIELD] = messages.pack(view(state, now))
        for number in sorted(state.members if batch.everything else batch.changed):
            if (member := state.members.get(number)) is not None:
                fields[member_field(number)] = record.member_record(member, now)
                fields[own_field(number)] = self._for_members(heads.own(member, state))
        transaction.hset(self._keys.state, fields)
        gone = [name(number) for number in sorted(batch.removed) for name in (member_field, own_field)]
        transaction.hdel(self._keys.state, gone)


def in_envelopes(message: messages.Message, run: str) -> list[messages.Message]:
    """Split a list of verdicts that one envelope cannot hold. A merge comes last: whoever reads of a version knows
    what became of its own contribution to it."""
    if not isinstance(message, messages.Merged | messages.Verdicts) or len(message.verdicts) < 2:
        return [message]
    with suppress(OversizedMessage):
        messages.encode(message, run)
        return [message]
    half = len(message.verdicts) // 2
    last = message.model_copy(update={"verdicts": message.verdicts[half:]})
    return [*in_envelopes(messages.Verdicts(verdicts=message.verdicts[:half]), run), *in_envelopes(last, run)]
