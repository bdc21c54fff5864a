"""The torch-free member of a run: one process's membership, whatever its incarnation. Hundreds fit into one process.

The client owns every connection. What it learns it leaves with its incarnation's `Learner`; what the training side
hands over it sends. It never blocks the training side and is never blocked by it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

from anabranch.errors import MemberRefused, ServerError
from anabranch.loops import leaf, run_async
from anabranch.merge.fragments import Layout
from anabranch.queue import messages
from anabranch.queue.connection import check_server
from anabranch.queue.patience import STALL
from anabranch.queue.records import RunRecord, no_such_run
from anabranch.queue.url import RunUrl
from anabranch.workers.member.adoption import ParameterStore
from anabranch.workers.member.feed import Feed
from anabranch.workers.member.heart import Heart, Vitals
from anabranch.workers.member.identity import Identity
from anabranch.workers.member.incarnation import REASON_LIMIT, Incarnation, Over, Process
from anabranch.workers.member.line import Line
from anabranch.workers.member.registration import KNOCK_S, Registration
from anabranch.workers.member.telling import EVERY_S, Telling, Waiting

log = logging.getLogger("anabranch.worker")

LEAVE_S = 10.0  # for the last contributions and the farewell
FAREWELL_S = 3.0  # of it, for the farewell alone; less if there is less than twice that


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
    """One member. Use `open`, then `serve` until it returns."""

    def __init__(
        self,
        url: RunUrl,
        identity: Identity,
        *,
        on_change: Callable[[], None] = lambda: None,
        warm_start: bool = False,
    ) -> None:
        """`on_change` is called (in the I/O thread) when a call, a version or the end of the run arrived.
        `warm_start`: ask for a peer's optimizer state when joining a run that is under way."""
        self.identity = identity
        self.line = Line.to(url, identity.name)
        self.vitals = Vitals()
        self.waiting = Waiting()
        self._telling = Telling(self.vitals)
        self._sizes: list[int] = []
        self.life: Incarnation | None = None  # the newest; while `joined` is not set it is over
        self._process = Process(on_change, warm_start)
        self.joined = self._process.joined
        self.supply = self._process.supply
        self._begin = partial(Incarnation, self.line, self._process)
        self._heart = Heart(self.line, self._progress)

    @property
    def incarnation(self) -> int:
        """Number of the newest; 0 before the first."""
        return self.life.number if self.life is not None else 0

    @property
    def tokens(self) -> int:
        """Global tokens applied, as last heard."""
        return self._process.tokens

    @property
    def paused(self) -> bool:
        return self._process.paused

    @property
    def stopped(self) -> str | None:
        """The reason, once the run is over."""
        return self._process.stopped

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of contributions."""
        return self._process.bytes_sent

    # --- life ---------------------------------------------------------------------------------------------

    async def open(self, stack: AsyncExitStack) -> RunRecord:
        """Connect, check the server and read the run's definition; waits until a synchronizer has written it."""
        line = self.line
        line.close_with(stack)
        await check_server(line.redis, line.url)
        while (record := await line.read_run()) is None:
            if not self.waiting.what or self.waiting.due:  # the others are listed when it is said
                there = await line.persist(partial(no_such_run, line.redis, line.keys.run), "look for runs")
                self.waiting.on(f"{there}. It begins with `anabranch up` or `orchestrator`; or ?run= is misspelt")
            await asyncio.sleep(KNOCK_S)
        self.waiting.over()
        return record

    async def serve(self, record: RunRecord, store: ParameterStore, layout: Layout) -> None:
        """Register, adopt, and take part until the run stops or `leave` is called.

        `record` is what `open` gave, `store` holds the model, `layout` is its layout under the run's spec. Raises
        `MemberRefused`.
        """
        self._sizes = [fragment.size for fragment in layout.fragments]
        try:
            async with asyncio.TaskGroup() as tasks:
                beating = tasks.create_task(self._beat(record.spec.workers.heartbeat_s), name="client: heart")
                telling = tasks.create_task(self._tell(), name="client: tell how it goes")
                while await self._live(record, store, layout):
                    pass
                beating.cancel()
                telling.cancel()
        except BaseExceptionGroup as group:
            raise leaf(group) from group
        finally:
            if self.stopped is None:  # else a last step may be under way, and `leave` comes after it
                self._sum_up("ended")

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            if (life := self.life) is not None and self.joined.is_set():
                line = self._telling.line(life.books, self._sizes, run_tokens=self.tokens, paused=self.paused)
                if line is not None:
                    log.info("%s", line)

    def _sum_up(self, why: str) -> None:
        books = self.life.books if self.life is not None and self.joined.is_set() else None
        self._telling.summary(books, self._sizes, self.bytes_sent, why)

    async def _live(self, record: RunRecord, store: ParameterStore, layout: Layout) -> bool:
        """One incarnation, from asking for it to its end; False once the run has stopped."""
        # Settings may have changed since `record` was read, and the schema with whoever leads now.
        record = await self._same_run(record)
        admission = await Registration(self.line, record, self.identity, layout, self.waiting).answer()
        if isinstance(admission, messages.Stop):
            self._process.stop(admission.reason)
            return False
        await self._same_run(record)
        try:
            async with asyncio.TaskGroup() as tasks:
                self.life = life = self._begin(admission, store, layout, tasks)
                await life.follow()
                raise Over("the run has stopped")
        except BaseExceptionGroup as group:
            if not isinstance(over := leaf(group), Over):
                raise
        if self.stopped is not None:
            return False
        self.joined.clear()
        self._telling.over(life.books, self._sizes)
        log.warning("incarnation %d is over (%s): joining again", life.number, over)
        self.supply.end()
        self._process.wants_warm_start = not life.warm_start.over
        if over.unknown:
            await life.post(messages.Farewell(incarnation=life.number, reason=str(over)[:REASON_LIMIT]))
        return True

    async def _same_run(self, record: RunRecord) -> RunRecord:
        """The run's record as it is now. `MemberRefused` if it has another definition than what we were built for."""
        current = await self.line.read_run() or record
        if current.spec.hash != record.spec.hash:
            raise MemberRefused(
                f"run {self.line.keys.run!r} has another definition now than when {self.line.name!r} began to join: "
                "start it again"
            )
        return current

    def feed(self, feed: Feed) -> None:
        """Ask for data ranges from now on. Call it in the I/O thread, once the run is joined."""
        if self.life is not None:
            self.supply.use(feed, self.life.books)

    async def leave(self, reason: str, within_s: float = LEAVE_S) -> None:
        """Send what was handed over, then say farewell with final figures: what was not sent is discarded.

        Takes at most about `within_s`: an upload that is not done by then is given up.
        """
        life = self.life
        if life is None or not self.joined.is_set():
            return
        await life.finish(within_s - farewell_s(within_s))
        message = life.farewell(reason)
        try:
            async with asyncio.timeout(farewell_s(within_s)):
                await self._heart.report()
                await life.post(message)
        except (ServerError, *STALL) as error:
            log.warning("no farewell: %s", str(error) or "the server does not answer")
        self._sum_up(f"left ({reason})")

    # --- heartbeats ---------------------------------------------------------------------------------------

    def progressed(self) -> None:
        """The training side made a step: report soon. Call it in the I/O thread."""
        self._heart.due.set()

    async def _beat(self, heartbeat_s: float) -> None:
        await self.joined.wait()
        await self._heart.beat(heartbeat_s)

    def _progress(self) -> bytes | None:
        life = self.life
        if life is None or not self.joined.is_set():
            return None
        message = messages.Progress(
            incarnation=life.number,
            bytes_sent=self.bytes_sent,
            timeline=life.learner.timeline,
            **self.vitals.fields(),
            **life.books.report(),
        )
        return self.line.encode(message, life.record.schema)
