"""One incarnation: a member's life in a run, from its welcome to its end. In the I/O thread.

It follows the broadcast, brings versions in, sends what the training side hands over, and keeps the books of both.
Its process may live on: then `follow` raises `Over`, and the client asks for another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from anabranch.errors import MalformedMessage
from anabranch.merge.codecs import encode
from anabranch.merge.fragments import Layout
from anabranch.queue import messages
from anabranch.queue.records import FragmentRecord, Snapshot, read_snapshot
from anabranch.workers.member.adoption import ParameterStore, adoption_of
from anabranch.workers.member.books import Books
from anabranch.workers.member.fetching import Fetcher
from anabranch.workers.member.learner import Learner, NewVersion
from anabranch.workers.member.line import Line
from anabranch.workers.member.outbox import Outbox
from anabranch.workers.member.registration import Admission, refusal
from anabranch.workers.member.supply import Supply
from anabranch.workers.member.warm_start import WarmStart, limit_bytes

log = logging.getLogger("anabranch.worker")

BLOCK_MS = 1000
REASON_LIMIT = 200
UNREADABLE_HEARTBEATS = 3


class Over(Exception):
    """Ends an incarnation with all its tasks; its process may live on."""

    def __init__(self, reason: str, *, unknown: bool = False) -> None:
        """`unknown`: the run does not know yet that it is over."""
        super().__init__(reason)
        self.unknown = unknown


@dataclass
class Process:
    """What outlives an incarnation: what its process last heard of the run, and who in it listens."""

    on_change: Callable[[], None]  # a call, a version or the end of the run arrived
    wants_warm_start: bool  # a peer's optimizer state, when it joins a run that is under way
    joined: asyncio.Event = field(default_factory=asyncio.Event)  # an incarnation takes part, or did to the end
    supply: Supply = field(default_factory=Supply)
    tokens: int = 0  # global tokens applied
    paused: bool = False
    stopped: str | None = None  # reason, once the run is over
    bytes_sent: int = 0  # payloads of contributions

    def stop(self, reason: str) -> None:
        self.stopped = reason
        self.on_change()

    def sent(self, size: int) -> None:
        self.bytes_sent += size


class Incarnation:
    """Begins to send at once; `follow` does the rest."""

    def __init__(
        self,
        line: Line,
        process: Process,
        admission: Admission,
        store: ParameterStore,
        layout: Layout,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """`tasks` end with it."""
        self.number = admission.number
        self.nonce = admission.nonce
        self.record = admission.record
        spec = self.record.spec
        self.books = Books(len(layout.fragments))
        exact = [fragment.size - fragment.weights for fragment in layout.fragments]
        self.learner = Learner(store, adoption_of(spec.workers), self.books, spec.workers.codec, exact=exact)
        self.outbox = Outbox(line, self.number, self.books, self.post, spec.limits.blob_ttl_s, process.sent)
        self.warm_start = WarmStart(line, self.number, self.post, process.on_change, wished=process.wants_warm_start)
        self._line = line
        self._process = process
        self._broadcast = admission.broadcast
        self._store, self._layout = store, layout
        self._tasks = tasks
        sizes = [fragment.size for fragment in layout.fragments]
        self._fetcher = Fetcher(line, sizes, self._newest, self._deliver, tasks)
        self._timeline = ""  # of the versions we follow
        self._asked_init = False  # for version 0
        self._leaving = False
        self._sending = tasks.create_task(self.outbox.run(), name="client: send")
        self._aside: list[asyncio.Task[None]] = []  # work that a farewell does not wait for
        process.supply.begin(self.books)

    async def post(self, message: messages.Message) -> None:
        await self._line.post(message, self.record.schema)

    # --- following the broadcast --------------------------------------------------------------------------

    async def follow(self) -> None:
        """Adopt what `state` says, then take part until the run has stopped. `Over` if the life ends before."""
        if (snapshot := await self._snapshot()) is not None:
            await self._take_state(snapshot)
        self._process.joined.set()
        self._begin_aside()
        while self._process.stopped is None:
            entries = await self._broadcast.read(BLOCK_MS)
            if self._broadcast.cut_off:
                await self._start_over()
                continue
            for number, message in entries:
                read = self.books.last_read
                if number > read + 1 or getattr(message, "timeline", self._timeline) != self._timeline:
                    log.debug("broadcast went from %d to %d: reading the state again", read, number)
                    await self._start_over()
                    break
                if number > read or isinstance(message, messages.Call):
                    await self._take(message)  # else: what was read from `state` contains it; calls it does not
                self.books.read(number)

    def _begin_aside(self) -> None:
        process, warm = self._process, self.warm_start
        process.supply.hungry()
        asking = process.supply.ask(self.number, self.post, self.record.spec.workers.heartbeat_s)
        self._do_aside("ask for data", asking)
        warm.over = warm.over or not process.tokens
        if not warm.over:
            tensors = sum(len(fragment.tensors) for fragment in self._layout.fragments)
            limit = limit_bytes(sum(fragment.size for fragment in self._layout.fragments), tensors)
            self._do_aside("seek a warm start", warm.seek(limit))
        self._do_aside("help others to a warm start", warm.serve())

    def _do_aside(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        self._aside.append(self._tasks.create_task(work, name=f"client: {what}"))

    async def _start_over(self) -> None:
        """Take everything from `state`, and follow the broadcast from there: what was read before is in it."""
        await self._broadcast.to_end()
        await self._catch_up()

    async def _take(self, message: messages.Message) -> None:
        process = self._process
        match message:
            case messages.Call():
                self._hear_call(message)
            case messages.Merged() if message.timeline != self._timeline:
                await self._catch_up()
            case messages.Merged():
                process.tokens = message.tokens
                self._settle(message.verdicts)
                self._fetcher.want(message.fragment, FragmentRecord(message.version, message.claim, message.timeline))
            case messages.Verdicts():
                self._settle(message.verdicts)
            case messages.Resend() if message.incarnation == self.number:
                await self.outbox.send_again(message.fragment, message.base)
            case messages.Leases() if message.incarnation == self.number:
                process.supply.answered(message)
            case messages.SendState() | messages.PeerState():
                self.warm_start.heard(message)
            case messages.SendInit() if message.incarnation == self.number:
                self._answer_init()
            case messages.Born():
                await self._catch_up()
            case messages.Refused() if message.nonce == self.nonce:
                raise await refusal(self._line, self._layout, message)
            case messages.Closed() if self.number in message.incarnations and not self._leaving:
                raise Over(message.reason)
            case messages.Pause() | messages.Resume():
                process.paused = isinstance(message, messages.Pause)
            case messages.Stop():
                process.stop(message.reason)

    def _hear_call(self, call: messages.Call) -> None:
        self.learner.heard(call)
        if self.number not in call.called:
            return
        if (answer := self.learner.call(call)) is not None:
            self.outbox.submit(answer)
        else:
            self._process.on_change()

    async def _snapshot(self) -> Snapshot | None:
        """`state` as it is. What is damaged is waited for: the leader stores it again with the next change, and what
        is only ours with the next incarnation."""
        keys, count, heartbeat_s = self._line.keys, len(self._layout.fragments), self.record.spec.workers.heartbeat_s
        read = partial(read_snapshot, self._line.redis, keys, count, self.number, self.nonce)
        for attempt in range(2 * UNREADABLE_HEARTBEATS):
            try:
                return await self._line.persist(read, "read state")
            except MalformedMessage as error:
                damage = error
            if attempt == 0:
                log.warning("what the run stores for its members is damaged (%s): looking until it is whole", damage)
            await asyncio.sleep(heartbeat_s / 2)
        raise Over(f"what the run stores for its members stays damaged: {damage}", unknown=True)

    async def _catch_up(self) -> None:
        """After a gap: read `state`, take outcomes, versions and calls from it, send again the rest."""
        if (snapshot := await self._snapshot()) is None:
            return
        if (reason := self.learner.lost_to(snapshot, self._timeline)) is None:
            await self._take_state(snapshot)
            for call in snapshot.head.calls:  # their entries may be among those that were missed
                if not self.outbox.sent(call.fragment, call.base):
                    self._hear_call(call)
            return
        self._hear_head(snapshot.head)
        if not self._leaving:
            raise Over(reason, unknown=snapshot.own is not None)

    def _hear_head(self, head: messages.Head) -> None:
        self._process.tokens, self._process.paused = head.tokens, head.paused
        if head.stopped:
            self._process.stop("the run has stopped")

    async def _take_state(self, snapshot: Snapshot) -> None:
        head, own = snapshot.head, snapshot.own
        self._hear_head(head)
        same, self._timeline = self._timeline == head.timeline, head.timeline
        self.learner.go_on_under(head.timeline)
        self._settle(own.outcomes if own is not None else [])
        self.books.read(snapshot.broadcast, anew=not same)
        self._process.supply.caught_up(own.leases if own is not None else [], same_timeline=same)
        if head.asked_init == self.number and not snapshot.fragments:
            self._answer_init()
        for fragment, record in enumerate(snapshot.fragments):
            held = self.books.version(fragment)
            went_back = same and record.version < held  # lost, and the leader has not seen it yet: it will say so
            if not went_back and not self.learner.holds(fragment, record.version, record.theta.digest):
                self._fetcher.want(fragment, record)
        await self.outbox.send_all_again()

    def _settle(self, verdicts: list[messages.Verdict]) -> None:
        if done := self.outbox.settle(verdicts):
            self._tasks.create_task(self.outbox.discard(done), name="client: drop payloads")

    # --- payloads -----------------------------------------------------------------------------------------

    async def _newest(self, fragment: int) -> FragmentRecord | None:
        snapshot = await self._snapshot()
        return snapshot.fragments[fragment] if snapshot is not None and snapshot.fragments else None

    def _deliver(self, version: NewVersion) -> None:
        self.learner.offer(version)
        self._process.on_change()

    def _answer_init(self) -> None:
        """We were asked for version 0 (perhaps twice: by message and in `state`)."""
        if not self._asked_init:
            self._asked_init = True
            self._tasks.create_task(self._send_init(), name="client: send version 0")

    async def _send_init(self) -> None:
        """From the worker's own model. The layout and the list of claims are uploaded, too: both may be large."""
        ttl_s = self.record.spec.limits.blob_ttl_s

        async def upload(data: memoryview, codec: str) -> messages.Claim:
            put = partial(self._line.blobs.put, self._line.name, data, codec, ttl_s)
            return await self._line.persist(put, "upload version 0", bounded=False)

        def initial(fragment: int) -> memoryview:
            return encode("fp32", self._store.initial(fragment))

        layout = await upload(memoryview(messages.pack(self._layout.to_wire())), "msgpack")
        claims = [await upload(await asyncio.to_thread(initial, f.index), "fp32") for f in self._layout.fragments]
        listed = await upload(memoryview(messages.pack([claim.model_dump() for claim in claims])), "msgpack")
        await self.post(messages.Init(incarnation=self.number, layout=layout, fragments=listed))

    # --- leaving ------------------------------------------------------------------------------------------

    async def finish(self, within_s: float) -> None:
        """Before a farewell: until everything that was handed over is sent, or nothing sends any more."""
        self._leaving = True
        for task in self._aside:
            task.cancel()  # an upload of it would be in the way
        flushing = asyncio.create_task(self.outbox.flush(), name="client: send the rest")
        try:
            await asyncio.wait({flushing, self._sending}, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
            if not flushing.done() and self._process.stopped is None:
                log.warning("leaving without the last contributions: they could not be sent in %.1f s", within_s)
        finally:
            flushing.cancel()
            await asyncio.gather(flushing, return_exceptions=True)

    def farewell(self, reason: str) -> messages.Farewell:
        """With final figures: what was not sent is discarded."""
        figures, leases = self.books.farewell(), self.books.parting()
        return messages.Farewell(
            incarnation=self.number, figures=figures, reason=reason[:REASON_LIMIT], leases=leases
        )
