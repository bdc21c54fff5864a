"""One term of leading a run: the asyncio shell around the decision core.

One task acts: it takes events from a queue, feeds the core, and stores each batch of decisions as one fenced
transaction before it takes the next. So what is stored is always a state the core was in, and a process killed
anywhere loses nothing that the streams do not still hold. Other tasks read streams, listen for knocks, renew the
lease, fetch payloads and merge; they only put events on the queue. Any of them ends the term by raising
`LeadershipLost`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import ResponseError

from anabranch.errors import BlobMissing, CheckpointError, LeadershipLost, PayloadError
from anabranch.faults import fail_at
from anabranch.orchestrator import events as ev
from anabranch.orchestrator.checkpoint import Restored, Snapshot, take_snapshot
from anabranch.orchestrator.clock import Timers
from anabranch.orchestrator.inboxes import Inboxes
from anabranch.orchestrator.loading import Loaded, load_run, pack_stored
from anabranch.orchestrator.store import Scribe
from anabranch.orchestrator.vault import Vault
from anabranch.queue.connection import OUTAGE, ServerLife, connect
from anabranch.queue.patience import LONGEST_S, REPLY_S, persist
from anabranch.queue.records import read_tape
from anabranch.queue.scripts import FencedWriter, Transaction, WriteRefused, Written
from anabranch.queue.streams import Entry

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.orchestrator.core import Core
    from anabranch.orchestrator.synchronizer import Synchronizer

log = logging.getLogger("anabranch.synchronizer")

LONGEST_WAIT_S = 0.2  # between two ticks of the core's clock
STORE_EVERY_S = 1.0  # members' volatile figures, for `anabranch status` and a successor
MEMORY_EVERY_S = 1.0  # between two looks at how full the server is
PART_S = 2.0  # for the last write of a term; without it the next leader begins a new timeline
KNOCKS_SILENT_S = 10.0  # without a word on the knock channel its connection is tried
BATCH = 256  # events handled in one transaction
FETCHES = 8  # payloads fetched at the same time

_GLYPHS = {"merged": "✓", "abandoned": "!", "rejected": "✕", "refused": "✕", "gone": "✕", "ledger mismatch": "✕"}
_QUIET = frozenset({"opened", "settled", "told closed", "leased"})
_LOUD = frozenset({"timeline", "server full", "orphaned"})

T = TypeVar("T")


class TermEnded(Exception):
    """Unwinds the task group when the synchronizer is to end."""


class Term:
    """See the module's docstring. Everything in here is made anew for each term."""

    def __init__(
        self,
        synchronizer: Synchronizer,
        redis: Redis,
        life: ServerLife,
        writer: FencedWriter,
        lease_s: float,
        memory: Restored | None,
    ) -> None:
        """`memory`: what an earlier term held when the server lost it."""
        self.core: Core | None = None  # None: not loaded yet
        self.vault: Vault | None = None
        self.hearing = True
        self._owner = synchronizer
        self._keys = synchronizer.keys
        self._clock = synchronizer.clock
        self._tape = synchronizer.tape
        self._checkpoints = synchronizer.checkpoints
        self._redis = redis
        self._life = life
        self._writer = writer
        self._lease_s = lease_s
        self._memory = memory
        self._scribe: Scribe
        self._inboxes: Inboxes
        self._broadcast = 0  # number of the last broadcast entry
        self._queue: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._timers = Timers()
        self._slots = asyncio.Semaphore(FETCHES)
        self._saving: set[asyncio.Task[None]] = set()
        self._drained = asyncio.Event()  # nothing is being merged any more
        self._tasks: asyncio.TaskGroup

    # --- life ---------------------------------------------------------------------------------------------

    async def lead(self, tasks: asyncio.TaskGroup, stack: AsyncExitStack) -> None:
        """Load the run and start leading it in tasks of the group. `stack` closes what was opened."""
        self._tasks = tasks
        self._reading = self._open(stack, "reader")
        self._spawn(self._keep_lease(), "keep lease")  # loading a large model outlasts it
        loaded = await self._load(stack)
        self._spawn(self._act(loaded), "act")
        self._spawn(self._read(), "read streams")
        self._spawn(self._listen(self._open(stack, "knocks")), "listen for knocks")
        self._spawn(self._keep_checkpoints(), "keep checkpoints")
        self._spawn(self._watch_memory(), "watch the server's memory")

    async def drain(self, within_s: float) -> None:
        """Let merges and checkpoints that are under way finish; open nothing new."""
        if within_s <= 0 or self.core is None:
            return
        self._queue.put_nowait(ev.Draining())
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._drained.wait()
                self._save_checkpoint()
                while self._saving:
                    await asyncio.wait(self._saving)

    async def part(self) -> None:
        """The term's last write, once its tasks have ended: nothing of ours is missing if this is stored.

        So whoever leads next need not suspect a server that was stopped and started in between.
        """
        if self.core is not None:
            with suppress(LeadershipLost, WriteRefused, *OUTAGE, ResponseError):
                async with asyncio.timeout(PART_S):
                    await self._writer.write(self._scribe.parting())

    def memory(self) -> Restored | None:
        """What this process holds of the run, as a checkpoint would give it back."""
        snapshot = self._snapshot()
        if snapshot is None:
            return None
        return Restored.from_snapshot(snapshot, "this synchronizer's memory")

    def _open(self, stack: AsyncExitStack, name: str) -> Redis:
        redis = connect(self._owner.url, name=f"anabranch-{name}", life=self._life)
        stack.push_async_callback(redis.aclose)
        return redis

    async def _load(self, stack: AsyncExitStack) -> Loaded:
        loaded = await load_run(self._owner, self._redis, self._life, self._persist, self._memory)
        self.vault = loaded.vault
        stack.callback(loaded.vault.close)
        self._tape.catch_up(
            await self._persist(lambda: read_tape(self._redis, self._keys, self._tape.last_id), "read the tape")
        )
        self._scribe = Scribe(self._keys, loaded.core, loaded.vault, self._tape, loaded.record)
        self._inboxes = Inboxes(self._keys, loaded.core.state.spec.limits.max_members)
        self._broadcast = loaded.heard  # before the first write this term's copy must not say 0
        self.core = loaded.core
        for name in self._members():
            self._inboxes.follow(name, self._members())
        return loaded

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self._tasks.create_task(work, name=f"synchronizer: {name}")

    # --- reading ------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Follow every inbox and progress stream; blocks briefly so that new streams are picked up."""
        while True:
            try:
                entries = await self._persist(
                    lambda: self._inboxes.read(self._reading, int(LONGEST_WAIT_S * 1000)),
                    "read streams",
                    reading=True,
                )
            except ResponseError as error:
                await self._drop_damaged(error)
                continue
            fail_at("after read")
            self._take(entries)

    async def _drop_damaged(self, error: ResponseError) -> None:
        """A member made something else of its stream: it is not read any more, the others are."""
        damaged = await self._persist(lambda: self._inboxes.drop_damaged(self._redis), "look for a damaged stream")
        if not damaged:
            raise error
        for sender in damaged:
            self._queue.put_nowait(ev.Troubled(f"a stream of {sender} is no stream any more: it is not read"))

    async def _drain_streams(self) -> None:
        """Read what is there before a timer may fire."""
        with suppress(*OUTAGE, ResponseError):  # the reading task deals with those
            async with asyncio.timeout(REPLY_S):
                self._take(await self._inboxes.read(self._redis, None))

    def _take(self, entries: list[Entry]) -> None:
        for event in self._inboxes.events(entries):
            self._queue.put_nowait(event)

    async def _listen(self, redis: Redis) -> None:
        """Knocks name inboxes we may not know yet; they are repeated until the member is welcomed."""
        while True:
            pubsub = redis.pubsub()
            try:
                await pubsub.subscribe(self._keys.knock)
                while True:
                    message = await pubsub.get_message(timeout=KNOCKS_SILENT_S)
                    if message is None:  # perhaps nobody knocks, perhaps the connection is dead
                        await pubsub.ping()
                        if await pubsub.get_message(timeout=REPLY_S) is None:
                            break
                    elif message["type"] == "message":
                        self._inboxes.knocked(message["data"].decode(errors="replace"), self._members())
            except OUTAGE:
                await asyncio.sleep(LONGEST_S / 4)
            finally:
                with suppress(*OUTAGE):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    def _members(self) -> set[str]:
        assert self.core is not None
        return {member.name for member in self.core.state.members.values()}

    async def _watch_memory(self) -> None:
        while True:
            info: dict[str, Any] = await self._persist(lambda: self._redis.info("memory"), "look at the memory")
            limit = int(info.get("maxmemory", 0))
            used = int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))
            self._queue.put_nowait(ev.MemorySeen(used / limit if limit else 0.0))
            await asyncio.sleep(MEMORY_EVERY_S)

    # --- acting -------------------------------------------------------------------------------------------

    async def _act(self, loaded: Loaded) -> None:
        core = loaded.core
        begin = [] if loaded.returned is None else core.handle(ev.Returned(loaded.returned), self._clock.now)
        opening = self._scribe.opening(self._life.run_id, loaded.restored, loaded.broadcast, loaded.replaced)
        start = core.start(self._clock.now, fresh=self._owner.fresh)
        await self._carry_out([*begin, *start], everything=True, transaction=opening)
        if core.state.stopped:  # while we stood by: whoever stopped the run meant us, too
            self._owner.stopped.set()
        if self._owner.init is not None and not core.state.born:
            self._spawn(self._birth_from_file(self._owner.init), "read --init")
        stored_at = self._clock.now
        while True:
            events = await self._next_events()
            now = self._clock.tick(hearing=self.hearing)
            instructions = [i for event in events for i in core.handle(event, now)]
            due = now - stored_at >= STORE_EVERY_S
            stored_at = now if due else stored_at
            await self._carry_out(instructions, everything=due)
            if core.state.draining and not any(round_.closed for round_ in core.state.rounds.values()):
                self._drained.set()

    async def _next_events(self) -> list[ev.Event]:
        """Everything that waits, or the timers that are due once the streams are drained."""
        wait_s = self._timers.next_in(self._clock.now, LONGEST_WAIT_S)
        if self._queue.empty() and wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    return self._batch(await self._queue.get())
        now = self._clock.tick(hearing=self.hearing)
        fired = self._timers.pop_due(now)
        if fired:
            await self._drain_streams()
        events = self._batch(None, most=None if fired else BATCH)  # before a timer, everything that was read
        return events + [ev.TimerFired(name, number) for name, number in fired]

    def _batch(self, first: ev.Event | None, most: int | None = BATCH) -> list[ev.Event]:
        events = [first] if first is not None else []
        while (most is None or len(events) < most) and not self._queue.empty():
            events.append(self._queue.get_nowait())
        return events

    async def _carry_out(
        self,
        instructions: list[ev.Instruction],
        *,
        everything: bool = False,
        transaction: Transaction | None = None,
    ) -> None:
        """Store a batch of decisions as one transaction, then do what follows from it.

        `transaction`: one that was begun and is to hold these decisions, too (a term's first).
        """
        now = self._clock.now
        self._start_work(instructions, now)
        restoring = transaction is not None
        transaction, tape_events = self._scribe.compose(instructions, now, transaction, everything=everything)
        if not transaction:
            return
        if any(isinstance(i, ev.Commit) for i in instructions):
            fail_at("before commit")
        own = restoring or any(isinstance(i, ev.Birth) for i in instructions)
        written = await self._store(transaction, own=own)
        self._broadcast = written.broadcast
        for event in tape_events:
            self._tape.append(event)
            _log_event(event)
        self._tape.flush()
        self._after(instructions)
        if tape_events:
            self._owner.changed.set()
        assert self.core is not None
        # At once, before any other event: it marks exactly the outcomes of this write.
        await self._carry_out(self.core.handle(ev.Wrote(written.broadcast), now))

    def _start_work(self, instructions: list[ev.Instruction], now: float) -> None:
        assert self.vault is not None
        for instruction in instructions:
            match instruction:
                case ev.SetTimer():
                    self._timers.set(instruction.name, instruction.round, now + instruction.after_s)
                case ev.Fetch(offer=offer):
                    self._spawn(self._fetch(offer), "fetch")
                case ev.Drop(offer=offer):
                    self.vault.drop(offer)
                case ev.Merge():
                    self._spawn(self._merge(instruction), "merge")
                case ev.FetchInit():
                    self._spawn(self._birth_from_worker(instruction), "fetch version 0")

    def _after(self, instructions: list[ev.Instruction]) -> None:
        """What may only happen once the batch is stored."""
        assert self.vault is not None
        for instruction in instructions:
            match instruction:
                case ev.Commit():
                    self.vault.install(instruction.fragment, instruction.round, instruction.version - 1)
                    fail_at("after commit")
                case ev.Close(last_of_name=True, name=name) | ev.TurnAway(shared=False, name=name):
                    self._inboxes.forget(name)
                case ev.Welcome(name=name):
                    self._inboxes.follow(name, self._members())
                case ev.Checkpoint():
                    self._save_checkpoint()
                case ev.Announce(what="stop"):
                    self._save_checkpoint(self._owner.stopped)

    async def _store(self, transaction: Transaction, *, own: bool = False) -> Written:
        """Write until it is stored (`own`: it names the vault's versions for the first time, as a birth does).
        Payloads that ran out during an outage are uploaded once more."""
        while True:
            try:
                return await self._persist(lambda: self._writer.write(transaction), "write")
            except WriteRefused as error:
                if not str(error).startswith("missing"):
                    raise
                log.warning("%s: uploading again", error)
                assert self.vault is not None
                # Only what this or a later commit keeps: a TTL on a version that stands would delete the model.
                for version in [*self.vault.prepared.values(), *(self.vault.versions if own else [])]:
                    await self._persist(partial(self.vault.upload_again, version), "upload", bounded=False)

    # --- checkpoints --------------------------------------------------------------------------------------

    def _snapshot(self) -> Snapshot | None:
        """This moment, if there is a model. What was decided but is not stored yet counts: it is never undone."""
        core, vault = self.core, self.vault
        if core is None or vault is None or vault.layout is None or not core.state.born:
            return None
        versions = vault.matching([fragment.digest for fragment in core.state.fragments])
        if versions is None:
            return None
        return take_snapshot(core.state, vault.layout, versions, pack_stored(core, self._broadcast, self._clock.now))

    def _save_checkpoint(self, then: asyncio.Event | None = None) -> None:
        """Begin a checkpoint of this moment, if there is a model and a place for it; then set `then`."""
        snapshot = self._snapshot() if self._checkpoints is not None else None
        task = self._spawn(self._save(snapshot, then), "checkpoint")
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)

    async def _save(self, snapshot: Snapshot | None, then: asyncio.Event | None) -> None:
        if snapshot is not None and self._checkpoints is not None:
            try:
                log.info("%-10s %s", "checkpoint", await self._checkpoints.write(snapshot))
            except (OSError, CheckpointError) as error:  # a full disk or an unreachable store must not stop training
                self._queue.put_nowait(ev.Troubled(f"no checkpoint was written: {error}"))
        if then is not None:
            then.set()

    async def _keep_checkpoints(self) -> None:
        assert self.core is not None
        every_s = self.core.state.spec.checkpoint.every_s
        while every_s is not None:
            await asyncio.sleep(every_s)
            self._save_checkpoint()

    # --- work off the loop --------------------------------------------------------------------------------

    async def _fetch(self, offer: ev.Offer) -> None:
        assert self.vault is not None
        vault = self.vault
        async with self._slots:
            if not self._wanted(offer):
                return
            try:
                await self._persist(lambda: vault.fetch(offer), "fetch a contribution", bounded=False)
            except BlobMissing as error:
                self._queue.put_nowait(ev.FetchFailed(offer, str(error), gone=True))
            except PayloadError as error:
                self._queue.put_nowait(ev.FetchFailed(offer, str(error)))
            else:
                self._queue.put_nowait(ev.Fetched(offer))

    def _wanted(self, offer: ev.Offer) -> bool:
        """Not replaced while it waited for its turn."""
        assert self.core is not None
        return self.core.state.fetching.get((offer.incarnation, offer.fragment, offer.base)) is offer

    async def _merge(self, order: ev.Merge) -> None:
        assert self.vault is not None
        assert self.core is not None
        vault = self.vault
        digest, reason = await self._persist(lambda: vault.merge(order), "merge", bounded=False)
        if order.round not in self.core.state.rounds:  # a new timeline began meanwhile
            vault.prepared.pop(order.round, None)
        self._queue.put_nowait(ev.Merged(order.round, digest, reason))

    async def _birth_from_worker(self, order: ev.FetchInit) -> None:
        assert self.vault is not None
        vault = self.vault
        try:
            layout, versions = await self._persist(
                lambda: vault.take_init(order.payload), "fetch version 0", bounded=False
            )
        except LeadershipLost:
            raise
        except Exception as error:  # whatever a member sent may not end the run
            log.debug("version 0 refused", exc_info=True)
            reason = str(error) or type(error).__name__
            self._queue.put_nowait(ev.InitFailed(order.incarnation, reason, order.entry))
            return
        self._prepare_birth(layout, versions, order.incarnation, order.entry)

    async def _birth_from_file(self, path: Path) -> None:
        assert self.vault is not None
        vault = self.vault
        layout, versions = await self._persist(lambda: vault.take_file(path), "upload version 0", bounded=False)
        self._prepare_birth(layout, versions, 0, None)

    def _prepare_birth(self, layout: Any, versions: list[Any], incarnation: int, entry: bytes | None) -> None:
        self._queue.put_nowait(
            ev.InitReady(
                incarnation,
                layout.hash,
                tuple(fragment.size for fragment in layout.fragments),
                tuple(version.theta_claim.digest for version in versions),
                entry,
                (layout, versions),
            )
        )

    # --- lease --------------------------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 3)
            if self.core is not None:  # the stored run may say another
                self._lease_s = self.core.state.spec.leader.lease_s
            await self._persist(partial(self._writer.renew, self._lease_s), "renew the lease")

    async def _persist(
        self, action: Callable[[], Awaitable[T]], what: str, *, reading: bool = False, bounded: bool = True
    ) -> T:
        """`bounded` False: payloads, which bound themselves chunk by chunk."""
        return await persist(
            action,
            what,
            log,
            timeout_s=REPLY_S if bounded else None,
            on_state=self._set_hearing if reading else None,
            outages=self._owner.outages,
        )

    def _set_hearing(self, hearing: bool) -> None:
        self.hearing = hearing


def _log_event(event: dict[str, Any]) -> None:
    """One aligned line per event; what happens every round besides the merge is for `--verbose`."""
    where = "".join(
        f" {letter}{event[key]}"
        for letter, key in (("r", "round"), ("f", "fragment"), ("v", "version"))
        if key in event
    )
    kind = event["kind"]
    level = logging.DEBUG if kind in _QUIET else logging.WARNING if kind in _LOUD else logging.INFO
    log.log(level, "%s %-10s%-14s %s", _GLYPHS.get(kind, "·"), kind, where, event["reason"])
