"""Asking the run for data ranges, and handing what it grants to the training side's `Feed`. In the I/O thread.

The dataset is the process's, the ranges are an incarnation's: each asks for its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from anabranch.queue import messages
from anabranch.workers.member.books import Books
from anabranch.workers.member.feed import Feed

REPEAT_HEARTBEATS = 3.0  # without an answer: ask again
REPEAT_IDLE_HEARTBEATS = 10.0  # everything is handed out: the run remembers what we want, unless it lost that


class Supply:
    """One process's. Nothing is asked for before `use`."""

    def __init__(self) -> None:
        self.feed: Feed | None = None
        self._hungry = asyncio.Event()
        self._heard = asyncio.Event()

    def use(self, feed: Feed, books: Books) -> None:
        self.feed = feed
        self.begin(books)

    def begin(self, books: Books) -> None:
        """A new incarnation, or a new feed."""
        if self.feed is not None:
            self.feed.restart(books)
            self._heard.set()
            self._hungry.set()

    def end(self) -> None:
        """The incarnation is over, and so are its ranges."""
        if self.feed is not None:
            self.feed.drop()

    def hungry(self) -> None:
        """The training side may need more."""
        self._hungry.set()

    def answered(self, message: messages.Leases) -> None:
        if self.feed is not None:
            self.feed.take(message.leases, exhausted=message.exhausted, refused=message.refused)
            self._heard.set()

    def caught_up(self, leases: Sequence[messages.Lease], *, same_timeline: bool) -> None:
        """`leases` are ours, says `state`."""
        if self.feed is not None:
            if not same_timeline:
                self.feed.keep(leases)
            self.feed.take(leases)
            self._heard.set()
            self._hungry.set()

    async def ask(
        self, incarnation: int, post: Callable[[messages.Message], Awaitable[None]], heartbeat_s: float
    ) -> None:
        """Ask on behalf of an incarnation when the training side needs more, until cancelled."""
        while True:
            await self._hungry.wait()
            self._hungry.clear()
            feed = self.feed
            if feed is None or not (wanted := feed.wanted):
                continue
            self._heard.clear()
            await post(
                messages.RangeRequest(
                    incarnation=incarnation,
                    items=feed.items,
                    fingerprint=feed.fingerprint,
                    wanted=wanted,
                    after=feed.after,
                )
            )
            await self._answer(feed, heartbeat_s)

    async def _answer(self, feed: Feed, heartbeat_s: float) -> None:
        """Return when it makes sense to ask again."""
        patience_s = REPEAT_HEARTBEATS * heartbeat_s
        while True:
            try:
                async with asyncio.timeout(patience_s):
                    await self._heard.wait()
            except TimeoutError:
                self._hungry.set()
                return
            self._heard.clear()
            if not feed.exhausted:
                return
            patience_s = REPEAT_IDLE_HEARTBEATS * heartbeat_s
