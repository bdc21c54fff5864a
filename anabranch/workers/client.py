"""The torch-free member of a run: registration, heartbeats, broadcast, payloads. Hundreds fit into one process.

The client owns every connection. What it learns it leaves with its `Learner`; what the training side hands over
it sends. It never blocks the training side and is never blocked by it.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeVar

from anabranch._version import VERSION
from anabranch.errors import LayoutMismatch, MemberRefused, MessageError, UsageError
from anabranch.loops import leaf, run_async
from anabranch.merge.codecs import encode
from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.connection import check_server, connect
from anabranch.queue.keys import SYNCHRONIZER, Keys
from anabranch.queue.patience import REPLY_S, STALL, Outages, persist
from anabranch.queue.records import FragmentRecord, RunRecord, Snapshot, read_run, read_snapshot
from anabranch.queue.streams import StreamReader, last_id
from anabranch.queue.url import RunUrl
from anabranch.spec import ID_PATTERN
from anabranch.workers.adoption import POLICIES, ParameterStore
from anabranch.workers.books import Books
from anabranch.workers.fetching import Fetcher
from anabranch.workers.learner import Learner, NewVersion, Outgoing, Refusal
from anabranch.workers.outbox import Outbox, finite

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.merge.fragments import Layout

log = logging.getLogger("anabranch.worker")

LEAST_PROGRESS_S = 0.1  # reports are coalesced to 10 per second
BLOCK_MS = 1000
KNOCK_S = 0.25
REFUSED_HEARTBEATS = 6.0  # how long a passing refusal is waited for
LEAVE_S = 10.0  # for the last contributions and the farewell
FAREWELL_S = 3.0  # of it, for the farewell alone; less if there is less than twice that
LABEL_LIMIT = 200  # characters: what a message takes
_REASON_LIMIT = 200
_PROGRESS_KEPT = 16
_PROGRESS_TTL_S = 3600

T = TypeVar("T")


def default_name() -> str:
    """A name for a worker nobody named."""
    return f"worker-{secrets.token_hex(3)}"


def farewell_s(within_s: float) -> float:
    """Of the time to leave in, what is kept for the farewell."""
    return min(FAREWELL_S, within_s / 2)


def read_run_record(url: RunUrl) -> RunRecord:
    """The run's definition; waits until a synchronizer has written it. Not inside an event loop."""

    async def read() -> RunRecord:
        async with AsyncExitStack() as stack:
            return await Client(url, Identity("reader")).open(stack)

    return run_async(read())


@dataclass
class Vitals:
    """What the training side measures and heartbeats carry. Written by the training side only."""

    step_s: float = 0.0
    loss: float | None = None
    train_s: float = 0.0
    rest_s: float = 0.0
    life_s: float = 0.0
    heldout_loss: float | None = None
    measured: list[int] = field(default_factory=list)
    measured_tokens: int = 0


@dataclass(frozen=True)
class Identity:
    """Who joins. `layout_hash` None: takes the run's layout as it is; `initial`: can give version 0."""

    name: str
    label: str = ""
    role: Literal["worker", "evaluator"] = "worker"
    device: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(ID_PATTERN, self.name) or self.name.startswith(SYNCHRONIZER):
            raise UsageError(f"--name {self.name!r}: 1 to 64 of A-Z a-z 0-9 . _ - are allowed, the first not a _")
        if len(self.label) > LABEL_LIMIT:
            raise UsageError(f"--label: {len(self.label)} characters, at most {LABEL_LIMIT} are allowed")


class Client:
    """One member. Use `open`, then `serve` until it returns; `learner` exists once the run is born."""

    def __init__(self, url: RunUrl, identity: Identity, *, on_change: Callable[[], None] | None = None) -> None:
        """`on_change` is called (in the I/O thread) when a call, a version or the end of the run arrived."""
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
        self.outages = Outages(log)
        self._on_change = on_change or (lambda: None)
        self._nonce = secrets.token_bytes(16)
        self._books: Books | None = None
        self._outbox: Outbox | None = None
        self._sending: asyncio.Task[None] | None = None
        self._bytes_before = 0  # sent by earlier incarnations of this process
        self._broadcast = StreamReader()
        self._number = 0  # of the last broadcast entry read
        self._timeline = ""  # of the versions we follow
        self._fetcher: Fetcher
        self._init_sent = 0  # incarnation that was asked for version 0 and answered
        self._leaving = False
        self._cut_off = False  # the connection was lost since the broadcast was last read
        self._progress_due = asyncio.Event()
        self._beats = 0
        self._tasks: asyncio.TaskGroup

    # --- joining ------------------------------------------------------------------------------------------

    async def open(self, stack: AsyncExitStack) -> RunRecord:
        """Connect, check the server and read the run's definition; waits until a synchronizer has written it."""
        self._redis = await self._connect(stack, "member")
        self._pulse = await self._connect(stack, "heart")
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
                await self._follow()
                raise _Left
        except BaseExceptionGroup as group:
            if not isinstance(leaf(group), _Left):
                raise leaf(group) from group

    async def _register(self) -> None:
        """Ask for an incarnation, knocking until welcomed; then read the state and adopt."""
        self.joined.clear()
        self._number = 0
        self._timeline = ""
        # Settings may have changed, and the schema with whoever leads now.
        self.record = await self._persist(lambda: read_run(self._redis, self.keys), "read the run") or self.record
        self._new_learner()
        self._broadcast.rewind(self.keys.broadcast, await self._persist(self._tail, "read the run"))
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
        self.incarnation = await self._await_welcome(request)
        self._open_outbox()
        await self._catch_up()
        self.joined.set()

    async def _tail(self) -> bytes:
        return await last_id(self._redis, self.keys.broadcast)

    async def _await_welcome(self, request: messages.Register) -> int:
        """Register and knock until welcomed. A refusal that may pass is waited for a while: whoever was killed and
        started again under its name has to outlive its former self."""
        assert self.record is not None
        patience_s = REFUSED_HEARTBEATS * self.record.spec.workers.heartbeat_s
        started, asked_at = time.monotonic(), -patience_s
        while True:
            if time.monotonic() - asked_at >= self.record.spec.workers.heartbeat_s:
                await self._post(request)
                asked_at = time.monotonic()
            await self._persist(lambda: self._redis.publish(self.keys.knock, self.identity.name), "knock")
            entries = await self._persist(lambda: self._read(int(KNOCK_S * 1000)), "wait", reading=True)
            if self._cut_off:
                self._cut_off = False
                self._broadcast.rewind(self.keys.broadcast, await self._persist(self._tail, "read the run"))
            for _number, message in entries:
                if isinstance(message, messages.Welcome) and message.nonce == self._nonce:
                    log.info("joined run %s as %s, incarnation %d", self.keys.run, message.name, message.incarnation)
                    return message.incarnation
                if isinstance(message, messages.Refused) and message.nonce == self._nonce:
                    if not message.retry or time.monotonic() - started > patience_s:
                        await self._refused(message)
                    log.debug("not let in yet: %s", message.reason)

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
        self.learner = Learner(self._store, POLICIES[spec.workers.adoption](), self._books, spec.workers.codec)

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
                self._broadcast.rewind(self.keys.broadcast, await self._persist(self._tail, "read the run"))
                await self._catch_up()
                continue  # what was read is in the state
            for number, message in entries:
                if number > self._number + 1:
                    log.info("broadcast jumped from %d to %d: reading the state again", self._number, number)
                    await self._catch_up()
                if number > self._number or isinstance(message, messages.Call):
                    await self._take(message)  # else: what was read from `state` contains it; calls it does not
                self._number = max(self._number, number)
                if self._books is not None:
                    self._books.read(number)

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
        snapshot = await self._persist(lambda: read_snapshot(self._redis, self.keys, self.incarnation), "read state")
        if snapshot is None:
            return
        self.tokens, self.paused = snapshot.tokens, snapshot.paused
        if snapshot.stopped:
            self._stop("the run has stopped")
        if self.joined.is_set() and (reason := self._lost_ground(snapshot)) is not None:
            if self._leaving:
                return
            await self._come_back(reason, farewell=snapshot.outcomes is not None)
            return
        assert self.learner is not None
        assert self._outbox is not None
        same, self._timeline = self._timeline == snapshot.timeline, snapshot.timeline
        self.learner.go_on_under(snapshot.timeline)
        self._number = max(self._number, snapshot.broadcast)
        self._take_outcomes(snapshot)
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

    def _lost_ground(self, snapshot: Snapshot) -> str | None:
        """Why nothing of ours can go on: the run does not know us, or went back to before what we have seen."""
        if snapshot.outcomes is None:
            return "unknown to the run"
        if snapshot.timeline == self._timeline:
            return None
        assert self.learner is not None
        books = self.learner.books
        for fragment, record in enumerate(snapshot.fragments):
            held = books.version(fragment)
            other_bits = held == record.version and not self.learner.holds(fragment, held, record.theta.digest)
            if other_bits or max([held, *books.waiting(fragment)]) > record.version:
                return f"a new timeline ({snapshot.timeline}) does not have what fragment {fragment} is based on"
            known = {base for base, _, _ in snapshot.outcomes.get(fragment, [])}
            if (settled := books.settled_on(fragment)) is not None and settled not in known:
                return f"a new timeline ({snapshot.timeline}) lost an outcome of fragment {fragment}"
        return None

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
        snapshot = await self._persist(lambda: read_snapshot(self._redis, self.keys, self.incarnation), "read state")
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
        owner = self.identity.name

        async def upload(data: memoryview, codec: str) -> messages.Claim:
            return await self._persist(
                lambda: self.blobs.put(owner, data, codec, ttl_s), "upload version 0", bounded=False
            )

        layout = await upload(memoryview(messages.pack(self._layout.to_wire())), "msgpack")
        claims = [
            await upload(await asyncio.to_thread(self._initial, fragment.index), "fp32")
            for fragment in self._layout.fragments
        ]
        listed = await upload(memoryview(messages.pack([claim.model_dump() for claim in claims])), "msgpack")
        await self._post(messages.Init(incarnation=self.incarnation, layout=layout, fragments=listed))

    def _initial(self, fragment: int) -> memoryview:
        return encode("fp32", self._store.initial(fragment))

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
        self._progress_due.set()

    async def _beat(self) -> None:
        """Report at least once per heartbeat, at most ten times per second, on a connection of its own."""
        assert self.record is not None
        heartbeat_s = self.record.spec.workers.heartbeat_s
        least_s = min(LEAST_PROGRESS_S, heartbeat_s / 2)
        while True:
            started = time.monotonic()
            await self._persist(self._report, "send a heartbeat")
            await asyncio.sleep(max(0.0, least_s - (time.monotonic() - started)))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, heartbeat_s * 0.9 - least_s)):
                    await self._progress_due.wait()
            self._progress_due.clear()

    async def _report(self) -> None:
        if not self.joined.is_set():
            return
        key = self.keys.progress(self.identity.name)
        data = self._encode(self._progress())
        await self._pulse.xadd(key, {"m": data}, maxlen=_PROGRESS_KEPT, approximate=True)
        if self._beats % 64 == 0:  # a stream nobody reads any more must not stay for ever
            await self._pulse.expire(key, _PROGRESS_TTL_S)
        self._beats += 1

    def _progress(self) -> messages.Progress:
        assert self._books is not None
        vitals = self.vitals
        return messages.Progress(
            incarnation=self.incarnation,
            role=self.identity.role,
            step_s=vitals.step_s,
            loss=finite(vitals.loss),
            train_s=vitals.train_s,
            rest_s=vitals.rest_s,
            life_s=vitals.life_s,
            bytes_sent=self.bytes_sent,
            device=self.identity.device,
            heldout_loss=finite(vitals.heldout_loss),
            measured=vitals.measured,
            measured_tokens=vitals.measured_tokens,
            timeline=self.learner.timeline if self.learner is not None else "",
            **self._books.report(),
        )

    async def leave(self, reason: str, within_s: float = LEAVE_S) -> None:
        """Send what was handed over, then say farewell with final figures: what was not sent is discarded.

        Takes at most about `within_s`: an upload that is not done by then is given up.
        """
        if not self.joined.is_set() or self._books is None or self._outbox is None:
            return
        self._leaving = True
        await self._send_the_rest(within_s - farewell_s(within_s))
        figures = self._books.farewell()
        message = messages.Farewell(incarnation=self.incarnation, figures=figures, reason=reason[:_REASON_LIMIT])
        try:
            async with asyncio.timeout(farewell_s(within_s)):
                await self._report()
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
