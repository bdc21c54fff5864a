"""Leading a run, from the moment it is loaded: the asyncio shell around the decision core.

One task acts: it takes events from a queue, feeds the core, and stores each batch of decisions as one fenced
transaction before it takes the next. So what is stored is always a state the core was in, and a process killed
anywhere loses nothing that the streams do not still hold. Other tasks read streams, listen for knocks, fetch payloads
and merge; they only put events on the queue. Any of them ends the term by raising `LeadershipLost`.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial

from anabranch.errors import LeadershipLost, ServerChanged, ServerError
from anabranch.faults import fail_at
from anabranch.orchestrator.checkpoint import Restored, Snapshot, take_snapshot
from anabranch.orchestrator.context import Context
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.events import Draining, Event, Redefined, Returned, Started
from anabranch.orchestrator.core.port import Batch, Core
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.core.timers import Timers
from anabranch.orchestrator.journal import JournaledCore
from anabranch.orchestrator.listening import BLOCK_S, Listening
from anabranch.orchestrator.loading import Loaded, pack_stored
from anabranch.orchestrator.saving import Saving
from anabranch.orchestrator.scribe import Scribe
from anabranch.orchestrator.tape import Event as TapeEvent
from anabranch.orchestrator.working import Working
from anabranch.queue import messages
from anabranch.queue.patience import STALL
from anabranch.queue.scripts import Transaction, WriteRefused, Written

log = logging.getLogger("anabranch.synchronizer")

STORE_EVERY_S = 1.0  # members' volatile figures, for `anabranch status` and a successor
PART_S = 2.0  # for the last write of a term; without it the next leader begins a new timeline
BATCH = 256  # events handled in one transaction

_GLYPHS = {"merged": "✓", "abandoned": "!", "rejected": "✕", "refused": "✕", "gone": "✕", "ledger mismatch": "✕"}
_QUIET = frozenset({"opened", "called", "merged", "settled", "told closed", "leased"})
_LOUD = frozenset({"timeline", "server full", "orphaned"})


class Leading:
    """See the module's docstring."""

    def __init__(self, context: Context, loaded: Loaded) -> None:
        self.core = _core(context, loaded.state)
        self.vault = loaded.vault
        self._context = context
        self._loaded = loaded
        self._clock = context.clock
        self._broadcast = loaded.heard  # number of the last entry; before the first write it must not be 0
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._timers = Timers()
        self._drained = asyncio.Event()  # nothing is being merged any more
        self._scribe = Scribe(context.keys, self.core, loaded.vault, context.tape, loaded.record)
        limits = loaded.state.spec.limits
        self._listening = Listening(context, self._events, self._members, limits.max_members)
        self._working = Working(context, self._events, loaded.vault, loaded.state)
        self._saving = Saving(context, self._events, self.snapshot)

    def begin(self) -> None:
        """Lead, in tasks of the term's group."""
        self._context.spawn(self._act(), "act")
        self._listening.begin()
        self._saving.keep(self.core.state.spec.checkpoint.every_s)

    async def drain(self, within_s: float) -> None:
        """Let merges and checkpoints that are under way finish; open nothing new."""
        if within_s <= 0:
            return
        self._events.put_nowait(Draining())
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._drained.wait()
                self._saving.begin()
                await self._saving.finish()

    async def part(self) -> None:
        """The term's last write, once its tasks have ended: nothing of ours is missing if this is stored.

        So whoever leads next need not suspect a server that was stopped and started in between.
        """
        with suppress(LeadershipLost, WriteRefused, ServerError, *STALL):
            async with asyncio.timeout(PART_S):
                await self._context.writer.write(self._scribe.parting())

    def snapshot(self) -> Snapshot | None:
        """This moment, if there is a model. What was decided but is not stored yet counts: it is never undone."""
        state, vault = self.core.state, self.vault
        if vault.layout is None or not state.born:
            return None
        versions = vault.matching([fragment.digest for fragment in state.fragments])
        if versions is None:
            return None
        return take_snapshot(state, vault.layout, versions, pack_stored(state, self._broadcast, self._clock.now))

    def memory(self) -> Restored | None:
        """What this process holds of the run, as a checkpoint would give it back."""
        snapshot = self.snapshot()
        return snapshot.restored("this synchronizer's memory") if snapshot is not None else None

    def _members(self) -> set[str]:
        return {member.name for member in self.core.state.members.values()}

    # --- acting -------------------------------------------------------------------------------------------

    async def _act(self) -> None:
        core, loaded, context = self.core, self._loaded, self._context
        opening = self._scribe.opening(context.life.run_id, loaded.restored, loaded.broadcast, loaded.replaced)
        if loaded.returned is not None:
            core.step(Returned(loaded.returned), self._clock.now)
        if loaded.redefined is not None:
            log.warning("%s", loaded.redefined)
            core.step(Redefined(loaded.redefined), self._clock.now)
        core.step(Started(context.fresh, init_given=context.init is not None), self._clock.now)
        await self._carry_out(everything=True, begun=opening)
        if core.state.stopped:  # while we stood by: whoever stopped the run meant us, too
            self._saving.begin(last=True)
        if context.init is not None and not core.state.born:
            self._working.birth_from_file(context.init)
        stored_at = self._clock.now
        while True:
            events = await self._next_events()
            now = self._clock.tick()
            for event in events:
                core.step(event, now)
            due = now - stored_at >= STORE_EVERY_S
            stored_at = now if due else stored_at
            await self._carry_out(everything=due)
            if core.state.draining and not any(r.stage == "merging" for r in core.state.rounds.values()):
                self._drained.set()

    async def _next_events(self) -> list[Event]:
        """Everything that waits, or the timers that are due once the streams are drained."""
        next_at, now = self._timers.next_at, self._clock.now
        wait_s = BLOCK_S if next_at is None else max(0.0, min(BLOCK_S, next_at - now))
        if self._events.empty() and wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    return self._waiting(await self._events.get())
        fired = self._timers.pop_due(self._clock.tick())
        if fired:
            await self._listening.drain()
        return [*self._waiting(None, most=None if fired else BATCH), *fired]  # before a timer, all that was read

    def _waiting(self, first: Event | None, most: int | None = BATCH) -> list[Event]:
        events = [first] if first is not None else []
        while (most is None or len(events) < most) and not self._events.empty():
            events.append(self._events.get_nowait())
        return events

    async def _carry_out(self, *, everything: bool = False, begun: Transaction | None = None) -> None:
        """Store what was decided as one transaction, then do what follows from it.

        `begun`: a transaction that is to hold these decisions, too (a term's first).
        """
        if (batch := self.core.take(everything=everything)) is None:
            return
        now = self._clock.now
        for instruction in batch.instructions:
            self._begin(instruction, now)
        if not batch.writes:
            self.core.stored(batch, self._broadcast, now)
            return
        transaction, tape_events = self._scribe.describe(batch, now, begun)
        if any(isinstance(i, do.Commit) for i in batch.instructions):
            fail_at("before commit")
        restoring = begun is not None and self._loaded.restored is not None
        names_versions = restoring or any(isinstance(i, do.Birth) for i in batch.instructions)
        self._broadcast = (await self._store(transaction, names_versions=names_versions)).broadcast
        self._record(tape_events)
        self._follow_up(batch)
        self.core.stored(batch, self._broadcast, now)

    def _begin(self, instruction: do.Instruction, now: float) -> None:
        match instruction:
            case do.SetTimer():
                self._timers.set(instruction, now)
            case do.Drop(sender=sender, entry=entry):
                self.vault.drop(sender, entry)
            case do.Fetch() | do.Merge() | do.FetchInit():
                self._working.begin(instruction)

    def _record(self, events: list[TapeEvent]) -> None:
        tape = self._context.tape
        for event in events:
            tape.append(event)
            _log_event(event)
        tape.flush()
        if events:
            self._context.changed.set()

    def _follow_up(self, batch: Batch) -> None:
        """What may only happen once the batch is stored."""
        for instruction in batch.instructions:
            match instruction:
                case do.Commit():
                    self.vault.install(instruction.fragment, instruction.round, instruction.version - 1)
                    fail_at("after commit")
                case do.Birth():
                    self.vault.install_newborn()
                case do.CloseBooks(last_of_name=True, name=name) | do.ForgetInbox(name=name):
                    self._listening.inboxes.forget(name)
                case do.Tell(message=messages.Welcome(name=name)):
                    self._listening.inboxes.follow(name, self._members())
                case do.Checkpoint(command=command, last=last):
                    self._saving.begin(command, last=last)
                case do.Ended():
                    self._context.stopped.set()

    async def _store(self, transaction: Transaction, *, names_versions: bool) -> Written:
        """Write until it is stored. Payloads that ran out during an outage are uploaded once more.

        `names_versions`: the vault's versions, too, for the first time, as a birth does.
        """
        context, vault = self._context, self.vault
        while True:
            try:
                return await context.persist(lambda: context.writer.write(transaction), "write")
            except WriteRefused as error:
                if not str(error).startswith("missing"):
                    raise ServerChanged(f"somebody else wrote to the run ({error})") from None
                log.warning("%s: uploading again", error)
                # Only what this or a later commit keeps: a TTL on a version that stands would delete the model.
                own = [*vault.versions, *(vault.newborn[1] if vault.newborn is not None else [])]
                for version in [*vault.prepared.values(), *(own if names_versions else [])]:
                    await context.persist(partial(vault.upload_again, version), "upload", bounded=False)


def _core(context: Context, state: State) -> Core:
    if context.journal is None:
        return Core(state)
    return JournaledCore(state, context.journal, f"epoch {context.writer.epoch}")


def _log_event(event: TapeEvent) -> None:
    """One aligned line per event; what happens every round besides the merge is for `--verbose`."""
    where = "".join(
        f" {letter}{event[key]}"
        for letter, key in (("r", "round"), ("f", "fragment"), ("v", "version"))
        if key in event
    )
    kind = event["kind"]
    quiet = kind in _QUIET or event["reason"].startswith(("late: ", "stale: "))  # happens to the best
    level = logging.DEBUG if quiet else logging.WARNING if kind in _LOUD else logging.INFO
    log.log(level, "%s %-10s%-14s %s", _GLYPHS.get(kind, "·"), kind, where, event["reason"])
