"""The torch-free member of a run: registration, heartbeats, broadcast, payloads. Hundreds fit into one process.

The client owns every connection. What it learns it leaves with its `Learner`; what the training side hands over
it sends. It never blocks the training side and is never blocked by it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from anabranch._version import VERSION
from anabranch.errors import LayoutMismatch, MemberRefused, MessageError
from anabranch.loops import leaf, run_async
from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.connection import check_server, connect
from anabranch.queue.keys import Keys
from anabranch.queue.patience import REPLY_S, STALL, Outages, persist
from anabranch.queue.records import FragmentRecord, RunRecord, Snapshot, read_run, read_snapshot
from anabranch.queue.streams import StreamReader, last_id
from anabranch.queue.url import RunUrl
from anabranch.workers.adoption import ParameterStore, adoption_of
from anabranch.workers.books import Books
from anabranch.workers.feed import Feed
from anabranch.workers.fetching import Fetcher
from anabranch.workers.heart import Heart, Vitals
from anabranch.workers.identity import Identity
from anabranch.workers.initial import upload_initial
from anabranch.workers.learner import Learner, NewVersion, Outgoing, Refusal
from anabranch.workers.outbox import Outbox
from anabranch.workers.registration import Registration
from anabranch.workers.supply import Supply
from anabranch.workers.warm_start import WarmStart, limit_bytes

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.merge.fragments import Layout

log = logging.getLogger("anabranch.worker")

BLOCK_MS = 1000
KNOCK_S = 0.25
LEAVE_S = 10.0  # for the last contributions and the farewell
FAREWELL_S = 3.0  # of it, for the farewell alone; less if there is less than twice that
_REASON_LIMIT = 200

T = TypeVar("T")


def farewell_s(within_s: float) -> float:
    """Of the time to leave in, what is kept for the farewell."""
    return min(FAREWELL_S, within_s / 2)


def read_run_record(url: RunUrl) -> RunRecord:
    """The run's definition; waits until a synchronizer has written it. Not inside an event loop."""

    async def read() -> RunRecord:
        async with AsyncExitStack() as stack:
            return await Client(url, Identity("reader")).open(stack)

    return run_async(read())


class Client:
    """One member. Use `open`, then `serve` until it returns; `learner` exists once the run is born."""

    def __init__(
        self,
        url: RunUrl,
        identity: Identity,
        *,
        on_change: Callable[[], None] | None = None,
        warm_start: bool = False,
    ) -> None:
        """`on_change` is called (in the I/O thread) when a call, a version or the end of the run arrived.
        `warm_start`: ask for a peer's optimizer state when joining a run that is under way."""
        self.url = url
        self.identity = identity
        self.keys = Keys(url.run)
        self.vitals = Vitals()
        self.incarnation = 0
        self.learner: Learner | None = None
        self.record: RunRecord | None = None
        self.tokens = 0  # global tokens applied, as last heard
        self.paused = False
        self.stopped: str | None = None  # reason, once the run is over
        self.joined = asyncio.Event()
        self.supply = Supply()
        self.outages = Outages(log)
        self._on_change = on_change or (lambda: None)
        self.warm_start = WarmStart(warm_start, self._on_change)
        self._nonce = secrets.token_bytes(16)
        self._books: Books | None = None
        self._outbox: Outbox | None = None
        self._sending: asyncio.Task[None] | None = None
        self._helping: asyncio.Task[None] | None = None
        self._bytes_before = 0  # sent by earlier incarnations of this process
        self._broadcast = StreamReader()
        self._number = 0  # of the last broadcast entry read
        self._timeline = ""  # of the versions we follow
        self._fetcher: Fetcher
        self._init_sent = 0  # incarnation that was asked for version 0 and answered
        self._leaving = False
        self._cut_off = False  # the connection was lost since the broadcast was last read
        self._due = asyncio.Event()  # a step was made: report soon
        self._heart: Heart
        self._tasks: asyncio.TaskGroup

    # --- joining ------------------------------------------------------------------------------------------

    async def open(self, stack: AsyncExitStack) -> RunRecord:
        """Connect, check the server and read the run's definition; waits until a synchronizer has written it."""
        self._redis = await self._connect(stack, "member")
        pulse = await self._connect(stack, "heart")
        self._heart = Heart(pulse, self.keys.progress(self.identity.name), self._progress, self._due)
        self._reading = await self._connect(stack, "reader")
        self.blobs = RedisBlobs(self._redis, self.keys)
        await check_server(self._redis, self.url)
        waiting = False
        while (record := await self._persist(lambda: read_run(self._redis, self.keys), "read the run")) is None:
            if not waiting:
                log.info("run %s: no synchronizer has started it yet; waiting", self.keys.run)
                waiting = True
            await asyncio.sleep(KNOCK_S)
        self.record = record
        return record

    async def _connect(self, stack: AsyncExitStack, purpose: str) -> Redis:
        name = f"anabranch-{purpose}-{self.identity.name}"[:64]
        # redis-py would hide a lost connection of the reader: after each the state has to be read again.
        redis = connect(self.url, name=name, connections=4, retries=0 if purpose == "reader" else 3)
        stack.push_async_callback(redis.aclose)
        return redis

    async def serve(self, store: ParameterStore, layout: Layout) -> None:
        """Register, adopt, and take part until the run stops or `leave` is called.

        `store` holds the model; `layout` is its layout under the run's spec. Raises `MemberRefused`.
        """
        self._store, self._layout = store, layout
        try:
            async with asyncio.TaskGroup() as self._tasks:
                sizes = [fragment.size for fragment in layout.fragments]
                self._fetcher = Fetcher(self.blobs, sizes, self._newest, self._deliver, self._tasks, self.outages)
                await self._register()
                self._tasks.create_task(self._beat(), name="client: heart")
                heartbeat_s = self.record.spec.workers.heartbeat_s if self.record is not None else 1.0
                asking = self.supply.ask(self._standing, self._post, heartbeat_s)
                self._tasks.create_task(asking, name="client: ask for data")
                self._exchange_states()
                await self._follow()
                raise _Left
        except BaseExceptionGroup as group:
            if not isinstance(leaf(group), _Left):
                raise leaf(group) from group

    def _exchange_states(self) -> None:
        assert self.record is not None
        warm = self.warm_start
        if warm.over or not self.tokens or self.record.schema < messages.StateRequest.introduced:
            warm.over = True
        else:
            tensors = [tensor for fragment in self._layout.fragments for tensor in fragment.tensors]
            limit = limit_bytes(sum(fragment.size for fragment in self._layout.fragments), len(tensors))
            seeking = warm.seek(lambda: self.incarnation, self._post, self.blobs, limit, self.outages)
            self._tasks.create_task(seeking, name="client: seek a warm start")
        name = self.identity.name
        serving = warm.serve(name, lambda: self.incarnation, self._post, self.blobs)
        self._helping = self._tasks.create_task(serving, name="client: help others to a warm start")

    async def _register(self) -> None:
        """Ask for an incarnation, knocking until welcomed; then read the state and adopt."""
        self.joined.clear()
        self._number = 0
        self._timeline = ""
        # Settings may have changed, and the schema with whoever leads now.
        self.record = await self._persist(lambda: read_run(self._redis, self.keys), "read the run") or self.record
        self._new_learner()
        self._broadcast.rewind(self.keys.broadcast, await self._persist(self._tail, "read the run"))
        self.incarnation = await self._ask_to_join()
        self._open_outbox()
        await self._catch_up()
        self.joined.set()
        self.supply.hungry()

    async def _tail(self) -> bytes:
        return await last_id(self._redis, self.keys.broadcast)

    async def _ask_to_join(self) -> int:
        assert self.record is not None
        identity = self.identity
        request = messages.Register(
            nonce=self._nonce,
            name=identity.name,
            label=identity.label,
            role=identity.role,
            layout_hash=self._layout.hash,
            can_init=True,
            device=identity.device,
            release=VERSION,
        )
        heartbeat_s = self.record.spec.workers.heartbeat_s
        match await Registration(request, heartbeat_s, self._post, self._knock).answer():
            case messages.Welcome(name=name, incarnation=incarnation):
                log.info("joined run %s as %s, incarnation %d", self.keys.run, name, incarnation)
                return incarnation
            case messages.Refused() as refused:
                await self._refused(refused)
            case messages.Stop(reason=reason):
                self._stop(reason)
        raise _Left

    async def _knock(self) -> list[messages.Message]:
        """Make the synchronizer look into our inbox, and read what it says soon after that."""
        await self._persist(lambda: self._redis.publish(self.keys.knock, self.identity.name), "knock")
        entries = await self._persist(lambda: self._read(int(KNOCK_S * 1000)), "wait", reading=True)
        if self._cut_off:
            self._cut_off = False
            self._broadcast.rewind(self.keys.broadcast, await self._persist(self._tail, "read the run"))
        return [message for _, message in entries]

    async def _refused(self, message: messages.Refused) -> None:
        """Raise what the synchronizer said, or better: which tensor is to blame."""
        record = await self._persist(lambda: read_run(self._redis, self.keys), "read the run")
        if record is not None and record.layout is not None:
            difference = self._layout.first_difference(record.layout)
            if difference is not None:
                raise LayoutMismatch(f"this model is not the run's: {difference}")
        raise MemberRefused(f"run {self.keys.run!r} refused {self.identity.name!r}: {message.reason}")

    def _new_learner(self) -> None:
        assert self.record is not None
        spec = self.record.spec
        self._books = Books(len(self._layout.fragments))
        self.learner = Learner(self._store, adoption_of(spec.workers), self._books, spec.workers.codec)
        self.supply.begin(self._books)

    def _standing(self) -> int:
        """Our incarnation; 0 while we have none that may ask for anything."""
        return self.incarnation if self.joined.is_set() and not self._leaving else 0

    def feed(self, feed: Feed) -> None:
        """Ask for data ranges from now on. Call it in the I/O thread, once the run is joined."""
        assert self._books is not None
        self.supply.use(feed, self._books)

    def _open_outbox(self) -> None:
        assert self.record is not None
        assert self._books is not None
        if self._sending is not None:
            self._sending.cancel()
        self._bytes_before = self.bytes_sent
        ttl_s = self.record.spec.limits.blob_ttl_s
        self._outbox = Outbox(
            self.identity.name, self.incarnation, self._books, self.blobs, self._post, ttl_s, self.outages
        )
        self._sending = self._tasks.create_task(self._outbox.run(), name="client: send")

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of contributions."""
        return self._bytes_before + (self._outbox.bytes_sent if self._outbox is not None else 0)

    # --- following the broadcast --------------------------------------------------------------------------

    async def _follow(self) -> None:
        while self.stopped is None:
            entries = await self._persist(lambda: self._read(BLOCK_MS), "read the broadcast", reading=True)
            if self._cut_off:  # the server may have been started again with less than we have read
                self._cut_off = False
                await self._start_over()
                continue
            for number, message in entries:
                if number > self._number + 1 or getattr(message, "timeline", self._timeline) != self._timeline:
                    log.info("broadcast jumped from %d to %d: reading the state again", self._number, number)
                    await self._start_over()
                    break
                if number > self._number or isinstance(message, messages.Call):
                    await self._take(message)  # else: what was read from `state` contains it; calls it does not
                self._number = max(self._number, number)
                if self._books is not None:
                    self._books.read(number)

    async def _start_over(self) -> None:
        """Take everything from `state`, and follow the broadcast from there: what was read before is in it."""
        self._broadcast.rewind(self.keys.broadcast, await self._persist(self._tail, "read the run"))
        await self._catch_up()

    async def _read(self, block_ms: int) -> list[tuple[int, messages.Message]]:
        entries = await self._broadcast.read(self._reading, block_ms)
        result = []
        for entry in entries:
            try:
                message = messages.decode(entry.fields.get(b"m", b""), self.keys.run)
            except MessageError as error:
                log.warning("broadcast entry not understood: %s", error)
                continue
            result.append((int(entry.fields.get(b"n", b"0")), message))
        return result

    async def _take(self, message: messages.Message) -> None:
        match message:
            case messages.Call():
                self._for_learner(message)
            case messages.Merged() if message.timeline != self._timeline:
                await self._catch_up()
            case messages.Merged():
                self.tokens = message.tokens
                self._settle(message.verdicts)
                self._fetcher.want(message.fragment, FragmentRecord(message.version, message.claim, message.timeline))
            case messages.Verdicts():
                self._settle(message.verdicts)
            case messages.Resend() if message.incarnation == self.incarnation:
                assert self._outbox is not None
                await self._outbox.send_again(message.fragment, message.base)
            case messages.Leases() if message.incarnation == self.incarnation:
                self.supply.answered(message)
            case messages.SendState() | messages.PeerState():
                self.warm_start.heard(message, self.incarnation)
            case messages.SendInit() if message.incarnation == self.incarnation:
                self._answer_init()
            case messages.Born():
                await self._catch_up()
            case messages.Refused() if message.nonce == self._nonce:
                await self._refused(message)
            case messages.Closed() if self.incarnation in message.incarnations and not self._leaving:
                await self._come_back(message.reason)
            case messages.Pause() | messages.Resume():
                self.paused = isinstance(message, messages.Pause)
            case messages.Stop():
                self._stop(message.reason)

    def _for_learner(self, call: messages.Call) -> None:
        assert self.learner is not None
        self.learner.heard(call)
        if self.incarnation not in call.called:
            return
        answer = self.learner.call(call)
        if answer is not None and self._outbox is not None:
            self._outbox.submit(answer)
        else:
            self._on_change()

    def _stop(self, reason: str) -> None:
        self.stopped = reason
        self._on_change()

    async def _come_back(self, reason: str, *, farewell: bool = False) -> None:
        """Our incarnation is over though we live: register anew and overwrite everything.

        `farewell`: the run does not know yet that it is over.
        """
        log.warning("incarnation %d is over (%s): joining again", self.incarnation, reason)
        if self._sending is not None:
            self._sending.cancel()
        if farewell:
            await self._post(messages.Farewell(incarnation=self.incarnation, reason=reason[:_REASON_LIMIT]))
        self._nonce = secrets.token_bytes(16)
        await self._register()

    async def _catch_up(self) -> None:
        """After joining and after any gap: read `state`, take outcomes, versions and calls from it, send again the
        rest."""
        snapshot = await self._persist(self._snapshot, "read state")
        if snapshot is None:
            return
        self.tokens, self.paused = snapshot.tokens, snapshot.paused
        if snapshot.stopped:
            self._stop("the run has stopped")
        reason = self.learner.lost_to(snapshot, self._timeline) if self.joined.is_set() and self.learner else None
        if reason is not None:
            if self._leaving:
                return
            await self._come_back(reason, farewell=snapshot.outcomes is not None)
            return
        assert self.learner is not None
        assert self._outbox is not None
        same, self._timeline = self._timeline == snapshot.timeline, snapshot.timeline
        self.learner.go_on_under(snapshot.timeline)
        self._take_outcomes(snapshot)
        if same:
            self._number = max(self._number, snapshot.broadcast)
        else:  # numbers of a stretch that was lost may be higher than the run's are now
            self._number = snapshot.broadcast
            self.learner.books.read_anew(snapshot.broadcast)
        self.supply.caught_up(snapshot.leases, same_timeline=same)
        if snapshot.asked_init == self.incarnation and not snapshot.fragments:
            self._answer_init()
        for fragment, record in enumerate(snapshot.fragments):
            held = self.learner.books.version(fragment)
            went_back = same and record.version < held  # lost, and the leader has not seen it yet: it will say so
            if not went_back and not self.learner.holds(fragment, record.version, record.theta.digest):
                self._fetcher.want(fragment, record)
        await self._outbox.send_all_again()
        for call in snapshot.rounds:  # their entries may be among those that were missed
            if self.joined.is_set() and not self._outbox.sent(call.fragment, call.base):
                self._for_learner(call)

    async def _snapshot(self) -> Snapshot | None:
        return await read_snapshot(self._redis, self.keys, self.incarnation, self._nonce)

    def _take_outcomes(self, snapshot: Snapshot) -> None:
        assert self._books is not None
        verdicts = [
            messages.Verdict(incarnation=self.incarnation, fragment=f, base=base, applied=applied, tokens=tokens)
            for f, outcomes in (snapshot.outcomes or {}).items()
            for base, applied, tokens in outcomes
        ]
        self._settle(verdicts)
        self._books.read(snapshot.broadcast)

    def _settle(self, verdicts: list[messages.Verdict]) -> None:
        assert self._outbox is not None
        if done := self._outbox.settle(verdicts):
            self._tasks.create_task(self._outbox.discard(done), name="client: drop payloads")

    # --- payloads -----------------------------------------------------------------------------------------

    async def _newest(self, fragment: int) -> FragmentRecord | None:
        snapshot = await self._persist(self._snapshot, "read state")
        if snapshot is None or fragment >= len(snapshot.fragments):
            return None
        return snapshot.fragments[fragment]

    def _deliver(self, version: NewVersion) -> None:
        assert self.learner is not None
        self.learner.offer(version)
        self._on_change()

    def _answer_init(self) -> None:
        """We were asked for version 0 (perhaps twice: by message and in `state`)."""
        if self._init_sent != self.incarnation:
            self._init_sent = self.incarnation
            self._tasks.create_task(self._send_init(), name="client: send version 0")

    async def _send_init(self) -> None:
        assert self.record is not None
        ttl_s = self.record.spec.limits.blob_ttl_s

        async def upload(data: memoryview, codec: str) -> messages.Claim:
            put = partial(self.blobs.put, self.identity.name, data, codec, ttl_s)
            return await self._persist(put, "upload version 0", bounded=False)

        layout, fragments = await upload_initial(self._store, self._layout, upload)
        await self._post(messages.Init(incarnation=self.incarnation, layout=layout, fragments=fragments))

    def submit(self, learner: Learner, item: Outgoing | Refusal) -> None:
        """Hand over what `learner` gave. Call it in the I/O thread (`loop.call_soon_threadsafe`)."""
        if learner is self.learner and self._outbox is not None:  # else it belongs to an incarnation that is over
            self._outbox.submit(item)

    async def _post(self, message: messages.Message) -> None:
        inbox = self.keys.contributions(self.identity.name)
        data = self._encode(message)
        await self._persist(lambda: self._redis.xadd(inbox, {"m": data}), f"send a {message.type}")

    def _encode(self, message: messages.Message) -> bytes:
        assert self.record is not None
        return messages.encode(message, self.keys.run, self.record.schema)

    # --- heartbeats ---------------------------------------------------------------------------------------

    def progressed(self) -> None:
        """The training side made a step: report soon. Call it in the I/O thread."""
        self._due.set()

    async def _beat(self) -> None:
        assert self.record is not None
        heartbeat_s = self.record.spec.workers.heartbeat_s

        async def insist(report: Callable[[], Awaitable[None]]) -> None:
            """Three heartbeats after an outage we are taken for gone: no longer may we hesitate."""
            await persist(report, "send a heartbeat", log, outages=self.outages, longest_s=heartbeat_s)

        await self._heart.beat(heartbeat_s, insist)

    def _progress(self) -> bytes | None:
        if not self.joined.is_set() or self._books is None:
            return None
        return self._encode(
            messages.Progress(
                incarnation=self.incarnation,
                role=self.identity.role,
                bytes_sent=self.bytes_sent,
                device=self.identity.device,
                timeline=self.learner.timeline if self.learner is not None else "",
                **self.vitals.fields(),
                **self._books.report(),
            )
        )

    async def leave(self, reason: str, within_s: float = LEAVE_S) -> None:
        """Send what was handed over, then say farewell with final figures: what was not sent is discarded.

        Takes at most about `within_s`: an upload that is not done by then is given up.
        """
        if not self.joined.is_set() or self._books is None or self._outbox is None:
            return
        self._leaving = True
        if self._helping is not None:
            self._helping.cancel()  # its upload would be in the way
        await self._send_the_rest(within_s - farewell_s(within_s))
        figures, leases = self._books.farewell(), self._books.parting()
        message = messages.Farewell(
            incarnation=self.incarnation, figures=figures, reason=reason[:_REASON_LIMIT], leases=leases
        )
        try:
            async with asyncio.timeout(farewell_s(within_s)):
                await self._heart.report()
                await self._post(message)
        except STALL as error:
            log.warning("no farewell: %s", str(error) or "the server does not answer")

    async def _send_the_rest(self, within_s: float) -> None:
        """Until everything that was handed over is sent, or nothing sends any more."""
        assert self._outbox is not None
        assert self._sending is not None
        flushing = asyncio.create_task(self._outbox.flush(), name="client: send the rest")
        try:
            await asyncio.wait({flushing, self._sending}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if not flushing.done() and self.stopped is None:
                log.warning("leaving without the last contributions: they could not be sent in %.1f s", within_s)
        finally:
            flushing.cancel()
            await asyncio.gather(flushing, return_exceptions=True)

    async def _persist(
        self, action: Callable[[], Awaitable[T]], what: str, *, bounded: bool = True, reading: bool = False
    ) -> T:
        """`bounded` False: a payload, which bounds itself chunk by chunk. `reading`: the broadcast."""
        timeout_s = REPLY_S if bounded else None
        on_state = self._note_cut if reading else None
        return await persist(action, what, log, timeout_s=timeout_s, on_state=on_state, outages=self.outages)

    def _note_cut(self, hearing: bool) -> None:
        self._cut_off = self._cut_off or not hearing


class _Left(Exception):
    """Unwinds the task group when the run is over."""
