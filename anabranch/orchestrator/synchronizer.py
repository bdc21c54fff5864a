"""The asyncio shell around the decision core.

One task acts: it takes events from a queue, feeds the core, and stores each batch of decisions as one fenced
transaction before it takes the next. So what is stored is always a state the core was in, and a process killed
anywhere loses nothing that the streams do not still hold. Other tasks read streams, listen for knocks, renew the
lease, fetch payloads and merge; they only put events on the queue.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from redis.exceptions import ResponseError

from anabranch.errors import BlobMissing, CheckpointError, Fenced, PayloadError
from anabranch.faults import fail_at
from anabranch.loops import leaf
from anabranch.orchestrator import events as ev
from anabranch.orchestrator import store
from anabranch.orchestrator.checkpoint import Checkpointer, complete_checkpoints, take_snapshot
from anabranch.orchestrator.clock import SteadyClock, Timers
from anabranch.orchestrator.inboxes import Inboxes
from anabranch.orchestrator.tape import Tape
from anabranch.orchestrator.vault import Vault
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.connection import OUTAGE, check_server, connect
from anabranch.queue.keys import Keys
from anabranch.queue.patience import LONGEST_S, REPLY_S, persist
from anabranch.queue.records import RunRecord
from anabranch.queue.scripts import FencedWriter, Transaction, WriteRefused, Written
from anabranch.queue.streams import Entry
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.orchestrator.core import Core

log = logging.getLogger("anabranch.synchronizer")

LONGEST_WAIT_S = 0.2  # between two ticks of the core's clock
STORE_EVERY_S = 1.0  # members' volatile figures, for `anabranch status` and a successor
RELEASE_S = 2.0  # to give the lease back when ending; it runs out by itself otherwise
BATCH = 256  # events handled in one transaction
FETCHES = 8  # payloads fetched at the same time

_GLYPHS = {"merged": "✓", "abandoned": "!", "rejected": "✕", "refused": "✕", "gone": "✕", "ledger mismatch": "✕"}
_QUIET = frozenset({"opened", "settled", "told closed"})

T = TypeVar("T")


class Synchronizer:
    """Leads one run until it is stopped or fenced."""

    def __init__(
        self,
        url: RunUrl,
        spec: RunSpec | None = None,
        *,
        directory: Path | None = None,
        init: Path | None = None,
        clock: SteadyClock | None = None,
    ) -> None:
        """`directory`: run directory for tape and checkpoints; `init`: safetensors file with version 0."""
        self.url = url
        self.keys = Keys(url.run)
        self.clock = clock or SteadyClock()
        self.tape = Tape(directory)
        self.owner = secrets.token_hex(8)
        self.core: Core | None = None  # None: standby
        self.vault: Vault | None = None
        self.standby_for: str | None = None
        self.hearing = True
        self.stopped = asyncio.Event()  # the run was stopped by an operator and everything is stored
        self.changed = asyncio.Event()  # something happened: pages refresh
        self._spec = spec
        self._directory = directory
        self._init = init
        self.checkpoints: Checkpointer | None = None
        self._queue: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._timers = Timers()
        self._inboxes: Inboxes
        self._slots = asyncio.Semaphore(FETCHES)
        self._ending = asyncio.Event()
        self._tasks: asyncio.TaskGroup

    # --- life ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take the lease (waiting as standby while another leads), load, and lead until `end` or a stop.

        Raises `Fenced` when a newer leader took over, `ServerError` and `SpecError` at the start.
        """
        async with AsyncExitStack() as stack:
            self._redis = await self._open(stack, "leader")
            self._reading = await self._open(stack, "reader")
            await check_server(self._redis, self.url)
            stack.callback(self.tape.close)
            self._writer = FencedWriter(self._redis, self.keys, self.owner)
            lease_s = self._spec.leader.lease_s if self._spec is not None else RunSpec().leader.lease_s
            if not await self._lead_unless_ending(lease_s):
                return
            stack.push_async_callback(self._release)
            try:
                async with asyncio.TaskGroup() as self._tasks:
                    self._spawn(self._watch_end(), "watch for the end")
                    self._spawn(self._keep_lease(lease_s), "keep lease")  # loading a large model outlasts it
                    await self._load(stack)
                    self._spawn(self._act(), "act")
                    self._spawn(self._read(), "read streams")
                    self._spawn(self._listen(stack), "listen for knocks")
                    self._spawn(self._keep_checkpoints(), "keep checkpoints")
            except BaseExceptionGroup as group:
                if not isinstance(leaf(group), _Ended):
                    raise leaf(group) from group

    async def _lead_unless_ending(self, lease_s: float) -> bool:
        """Whether we lead; False if `end` was called first (a standby's outage must not hold up its end)."""
        leading = asyncio.create_task(self._lead(lease_s), name="synchronizer: take the lease")
        ending = asyncio.create_task(self._ending.wait(), name="synchronizer: watch for the end")
        try:
            await asyncio.wait({leading, ending}, return_when=asyncio.FIRST_COMPLETED)
            return leading.done() and leading.result()
        finally:
            for task in (leading, ending):
                task.cancel()
            await asyncio.gather(leading, ending, return_exceptions=True)

    def end(self) -> None:
        """Ask `run` to return. What was decided but not stored is decided again by whoever leads next."""
        self._ending.set()

    async def _open(self, stack: AsyncExitStack, name: str) -> Redis:
        redis = connect(self.url, name=f"anabranch-{name}")
        stack.push_async_callback(redis.aclose)
        return redis

    async def _lead(self, lease_s: float) -> bool:
        while True:
            holder = await self._persist(lambda: self._writer.acquire(lease_s), "take the lease")
            if holder is None:
                self.standby_for = None
                log.info("leading run %s, epoch %d", self.keys.run, self._writer.epoch)
                return True
            if self.standby_for != holder:
                log.info("standby: run %s is led by %s", self.keys.run, holder)
                self.standby_for = holder
            await asyncio.sleep(min(1.0, lease_s / 4))

    async def _release(self) -> None:
        with suppress(Fenced, *OUTAGE):
            async with asyncio.timeout(RELEASE_S):
                await self._writer.renew(0)

    async def _load(self, stack: AsyncExitStack) -> None:
        now = self.clock.tick()
        timeline = f"0-{secrets.token_hex(4)}"
        core, record = await self._persist(
            lambda: store.load(self._redis, self.keys, self._spec, timeline, now), "read the stored run"
        )
        core.state.init_given = self._init is not None
        self._check_no_birth_over(core)
        blobs = RedisBlobs(self._redis, self.keys)
        self.vault = Vault(core.state.spec, blobs)
        stack.callback(self.vault.close)
        if core.state.born:
            assert record.layout is not None
            vault, layout = self.vault, record.layout
            await self._persist(
                lambda: store.load_tensors(self._redis, self.keys, vault, layout), "fetch the model", bounded=False
            )
            log.info("run %s continues: %s tokens applied", self.keys.run, f"{core.state.tokens:,}")
        self._start_scribe(core, record)
        self.core = core
        self._inboxes = Inboxes(self.keys, core.state.spec.limits.max_members)
        for name in self._members():
            self._inboxes.follow(name, self._members())

    def _start_scribe(self, core: Core, record: RunRecord) -> None:
        assert self.vault is not None
        self._scribe = store.Scribe(self.keys, core, self.vault, self.tape, record)
        if self._directory is not None:
            self.checkpoints = Checkpointer(self._directory, core.state.spec.checkpoint.keep)

    def _check_no_birth_over(self, core: Core) -> None:
        """An empty server beside a run directory with checkpoints is a loss, not a beginning."""
        kept = complete_checkpoints(self._directory) if self._directory is not None else []
        if kept and not core.state.born:
            raise CheckpointError(
                f"the server holds nothing of run {self.keys.run!r}, but {kept[-1]} is a checkpoint of it: a new "
                "model must not take its place; start from it with --init "
                f"{kept[-1] / 'theta.safetensors'} in another --dir, or move the checkpoints away"
            )

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.create_task(work, name=f"synchronizer: {name}")

    async def _watch_end(self) -> None:
        await self._ending.wait()
        raise _Ended

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

    async def _drain(self) -> None:
        """Read what is there before a timer may fire."""
        with suppress(*OUTAGE, ResponseError):  # the reading task deals with those
            async with asyncio.timeout(REPLY_S):
                self._take(await self._inboxes.read(self._redis, None))

    def _take(self, entries: list[Entry]) -> None:
        for event in self._inboxes.events(entries):
            self._queue.put_nowait(event)

    async def _listen(self, stack: AsyncExitStack) -> None:
        """Knocks name inboxes we may not know yet; they are repeated until the member is welcomed."""
        redis = await self._open(stack, "knocks")
        while True:
            pubsub = redis.pubsub(ignore_subscribe_messages=True)
            try:
                await pubsub.subscribe(self.keys.knock)
                async for message in pubsub.listen():
                    self._inboxes.knocked(message["data"].decode(errors="replace"), self._members())
            except OUTAGE:
                await asyncio.sleep(LONGEST_S / 4)
            finally:
                with suppress(*OUTAGE):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    def _members(self) -> set[str]:
        assert self.core is not None
        return {member.name for member in self.core.state.members.values()}

    # --- acting -------------------------------------------------------------------------------------------

    async def _act(self) -> None:
        core = self.core
        assert core is not None
        await self._store(self._scribe.write_spec())
        await self._carry_out([*core.start(self.clock.now)])
        if self._init is not None and not core.state.born:
            self._spawn(self._birth_from_file(self._init), "read --init")
        stored_at = self.clock.now
        while True:
            events = await self._next_events()
            now = self.clock.tick(hearing=self.hearing)
            instructions = [i for event in events for i in core.handle(event, now)]
            due = now - stored_at >= STORE_EVERY_S
            stored_at = now if due else stored_at
            await self._carry_out(instructions, everything=due)

    async def _next_events(self) -> list[ev.Event]:
        """Everything that waits, or the timers that are due once the streams are drained."""
        wait_s = self._timers.next_in(self.clock.now, LONGEST_WAIT_S)
        if self._queue.empty() and wait_s > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    return self._batch(await self._queue.get())
        now = self.clock.tick(hearing=self.hearing)
        fired = self._timers.pop_due(now)
        if fired:
            await self._drain()
        events = self._batch(None, most=None if fired else BATCH)  # before a timer, everything that was read
        return events + [ev.TimerFired(name, number) for name, number in fired]

    def _batch(self, first: ev.Event | None, most: int | None = BATCH) -> list[ev.Event]:
        events = [first] if first is not None else []
        while (most is None or len(events) < most) and not self._queue.empty():
            events.append(self._queue.get_nowait())
        return events

    async def _carry_out(self, instructions: list[ev.Instruction], *, everything: bool = False) -> None:
        """Store a batch of decisions as one transaction, then do what follows from it."""
        now = self.clock.now
        self._start_work(instructions, now)
        transaction, tape_events = self._scribe.compose(instructions, now, everything=everything)
        if not transaction:
            return
        if any(isinstance(i, ev.Commit) for i in instructions):
            fail_at("before commit")
        written = await self._store(transaction, born=any(isinstance(i, ev.Birth) for i in instructions))
        for event in tape_events:
            self.tape.append(event)
            _log_event(event)
        self.tape.flush()
        self._after(instructions)
        if tape_events:
            self.changed.set()
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
                    self._save_checkpoint(self.stopped)

    def _save_checkpoint(self, then: asyncio.Event | None = None) -> None:
        """Begin a checkpoint of this moment, if there is a model and a run directory; then set `then`."""
        core, vault, checkpoints = self.core, self.vault, self.checkpoints
        assert core is not None
        assert vault is not None
        snapshot = None
        if checkpoints is not None and vault.layout is not None and core.state.born:
            snapshot = take_snapshot(core.state, vault.layout, vault.versions)

        async def save() -> None:
            if snapshot is not None and checkpoints is not None:
                try:
                    folder = await checkpoints.write(snapshot)
                    log.info("%-10s %s", "checkpoint", folder)
                except OSError as error:  # a full disk must not stop training
                    self._queue.put_nowait(ev.Troubled(f"no checkpoint was written: {error}"))
            if then is not None:
                then.set()

        self._spawn(save(), "checkpoint")

    async def _keep_checkpoints(self) -> None:
        assert self.core is not None
        every_s = self.core.state.spec.checkpoint.every_s
        while every_s is not None:
            await asyncio.sleep(every_s)
            self._save_checkpoint()

    async def _store(self, transaction: Transaction, *, born: bool = False) -> Written:
        """Write until it is stored (`born`: it holds the birth, which keeps version 0). Payloads that ran out during
        an outage are uploaded once more."""
        while True:
            try:
                return await self._persist(lambda: self._writer.write(transaction), "write")
            except WriteRefused as error:
                if not str(error).startswith("missing"):
                    raise
                log.warning("%s: uploading again", error)
                assert self.vault is not None
                # Only what this or a later commit keeps: a TTL on a version that stands would delete the model.
                for version in [*self.vault.prepared.values(), *(self.vault.versions if born else [])]:
                    await self._persist(partial(self.vault.upload_again, version), "upload", bounded=False)

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
        vault = self.vault
        digest, reason = await self._persist(lambda: vault.merge(order), "merge", bounded=False)
        self._queue.put_nowait(ev.Merged(order.round, digest, reason))

    async def _birth_from_worker(self, order: ev.FetchInit) -> None:
        assert self.vault is not None
        vault = self.vault
        try:
            layout, versions = await self._persist(
                lambda: vault.take_init(order.payload), "fetch version 0", bounded=False
            )
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
        assert self.vault is not None
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

    # --- lease --------------------------------------------------------------------------------

    async def _keep_lease(self, lease_s: float) -> None:
        while True:
            await asyncio.sleep(lease_s / 3)
            if self.core is not None:  # the stored run may say another
                lease_s = self.core.state.spec.leader.lease_s
            await self._persist(partial(self._writer.renew, lease_s), "renew the lease")

    async def _persist(
        self, action: Callable[[], Awaitable[T]], what: str, *, reading: bool = False, bounded: bool = True
    ) -> T:
        """`bounded` False: payloads, which bound themselves chunk by chunk."""
        timeout_s = REPLY_S if bounded else None
        return await persist(action, what, log, timeout_s=timeout_s, on_state=self._set_hearing if reading else None)

    def _set_hearing(self, hearing: bool) -> None:
        self.hearing = hearing


def _log_event(event: dict[str, Any]) -> None:
    """One aligned line per event; what happens every round besides the merge is for `--verbose`."""
    where = "".join(
        f" {letter}{event[key]}"
        for letter, key in (("r", "round"), ("f", "fragment"), ("v", "version"))
        if key in event
    )
    level = logging.DEBUG if event["kind"] in _QUIET else logging.INFO
    log.log(level, "%s %-10s%-14s %s", _GLYPHS.get(event["kind"], "·"), event["kind"], where, event["reason"])


class _Ended(Exception):
    """Unwinds the task group when `end` was called."""
