"""What one incarnation sends: contributions, kept until they have an outcome, and refusals.

An outbox lives as long as its incarnation. Uploads carry a TTL that is refreshed while the outcome is unknown;
after a gap everything without an outcome is sent again (a repeat is harmless).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial

from anabranch.errors import ServerError
from anabranch.faults import fail_at
from anabranch.queue import messages
from anabranch.queue.patience import REPLY_S, STALL
from anabranch.workers.member.books import Books
from anabranch.workers.member.learner import Outgoing, Refusal
from anabranch.workers.member.line import Line

log = logging.getLogger("anabranch.worker")

Post = Callable[[messages.Message], Awaitable[None]]


def finite(loss: float | None) -> float | None:
    """A loss as messages take it: training that diverges is no reason to fall silent."""
    return loss if loss is not None and math.isfinite(loss) else None


class Outbox:
    """Sends in the order submitted, one at a time, so that a fragment's contributions arrive in order."""

    def __init__(
        self, line: Line, incarnation: int, books: Books, post: Post, ttl_s: float, on_sent: Callable[[int], None]
    ) -> None:
        """`post` puts a message into the worker's inbox; `ttl_s` is that of uploads. `on_sent` is told bytes."""
        self._line = line
        self._blobs = line.blobs
        self._incarnation = incarnation
        self._books = books
        self._post = post
        self._ttl_s = ttl_s
        self._on_sent = on_sent
        self._queue: asyncio.Queue[Outgoing | Refusal] = asyncio.Queue()
        self._unsettled: dict[tuple[int, int], tuple[messages.Contribution, memoryview]] = {}

    def submit(self, item: Outgoing | Refusal) -> None:
        """Hand over what the learner gave. Call it in the I/O thread (`loop.call_soon_threadsafe`)."""
        self._queue.put_nowait(item)

    async def run(self) -> None:
        """Send and refresh until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._refresh(), name="outbox: refresh payloads")
            while True:
                item = await self._queue.get()
                if isinstance(item, Outgoing):
                    await self._contribute(item)
                else:
                    await self._decline(item)
                self._queue.task_done()

    async def flush(self) -> None:
        """Return once everything that was submitted is sent."""
        await self._queue.join()

    async def _decline(self, item: Refusal) -> None:
        number, call = self._incarnation, item.call
        await self._post(
            messages.Decline(incarnation=number, fragment=call.fragment, round=call.round, reason=item.reason)
        )

    async def _contribute(self, item: Outgoing) -> None:
        snapshot = item.snapshot
        fail_at("worker before upload")
        put = partial(self._blobs.put, self._line.name, item.data, item.codec, self._ttl_s)
        claim = await self._line.persist(put, "upload a contribution", bounded=False)
        fail_at("worker after upload")
        if self._books.has_outcome(item.fragment, snapshot.base):  # an earlier one was merged during the upload
            await self._discard(claim)
            return
        message = messages.Contribution(
            incarnation=self._incarnation,
            fragment=item.fragment,
            timeline=item.timeline,
            base=snapshot.base,
            base_digest=item.base_digest,
            round=item.round,
            tokens=snapshot.tokens,
            steps=snapshot.steps,
            loss=finite(item.loss),
            figures=snapshot.figures,
            claim=claim,
        )
        earlier = self._unsettled.get((item.fragment, snapshot.base))
        self._unsettled[item.fragment, snapshot.base] = (message, item.data)
        await self._post(message)
        self._on_sent(claim.bytes)
        if earlier is not None:
            await self._discard(earlier[0].claim)

    def sent(self, fragment: int, base: int) -> bool:
        """Whether a contribution on this base waits for its outcome."""
        return (fragment, base) in self._unsettled

    def settle(self, verdicts: Sequence[messages.Verdict]) -> list[messages.Claim]:
        """Take outcomes into the books; returns payloads that nobody needs any more."""
        done = []
        for verdict in verdicts:
            if verdict.incarnation != self._incarnation:
                continue
            if not verdict.applied and not self._books.has_outcome(verdict.fragment, verdict.base):
                late = verdict.reason.startswith(("late", "stale"))  # happens to the best; the share merged tells
                level = logging.DEBUG if late else logging.WARNING
                log.log(level, "fragment %d on %d rejected: %s", verdict.fragment, verdict.base, verdict.reason)
            self._books.outcome(verdict)
            if (sent := self._unsettled.pop((verdict.fragment, verdict.base), None)) is not None:
                done.append(sent[0].claim)
        return done

    async def discard(self, claims: Sequence[messages.Claim]) -> None:
        """Delete payloads; if that fails their TTL does it."""
        for claim in claims:
            await self._discard(claim)

    async def send_all_again(self) -> None:
        """After a gap: whatever has no outcome."""
        for fragment, base in list(self._unsettled):
            await self.send_again(fragment, base)

    async def send_again(self, fragment: int, base: int) -> None:
        """Its outcome is unknown and its payload or message may be lost."""
        if (sent := self._unsettled.get((fragment, base))) is None:
            return
        message, data = sent
        if not await self._refreshed(message.claim):
            put = partial(self._blobs.put_again, message.claim, data, self._ttl_s)
            await self._line.persist(put, "upload again", bounded=False)
        await self._post(message)

    async def _refresh(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            for message, _ in list(self._unsettled.values()):
                await self._refreshed(message.claim)

    async def _refreshed(self, claim: messages.Claim) -> bool:
        """Restart a payload's TTL; False if it is gone. Bounded, unlike an upload: its connection may be dead."""
        return await self._line.persist(partial(self._blobs.refresh, claim, self._ttl_s), "refresh a payload")

    async def _discard(self, claim: messages.Claim) -> None:
        with suppress(ServerError, *STALL):  # it runs out by itself
            async with asyncio.timeout(REPLY_S):
                await self._blobs.delete(claim)
