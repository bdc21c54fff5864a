"""Everything a leader hears: members' streams and knocks, operators, and how full the server is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from redis.exceptions import ResponseError

from anabranch.errors import CommandRefused, ServerUnfit
from anabranch.faults import fail_at
from anabranch.orchestrator.context import Context
from anabranch.orchestrator.core.events import Event, MemorySeen, Troubled
from anabranch.orchestrator.inboxes import Inboxes
from anabranch.queue.connection import OUTAGE, crowded, look, unfit
from anabranch.queue.patience import LONGEST_S, REPLY_S, STALL
from anabranch.queue.refusals import is_passing, refused
from anabranch.queue.streams import Entry

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("anabranch.synchronizer")

BLOCK_S = 0.2  # a read that waits sees streams that were followed meanwhile no later
LOOK_EVERY_S = 1.0  # between two looks at the server
KNOCKS_SILENT_S = 10.0  # without a word on the knock channel its connection is tried


class Listening:
    """Puts events on a queue, in tasks of the term's group."""

    def __init__(self, context: Context, events: asyncio.Queue[Event], members: Callable[[], set[str]], most: int):
        """`members`: names that are registered; `most`: how many members' streams are read."""
        self._context = context
        self._events = events
        self._members = members
        self.inboxes = Inboxes(context.keys, most)
        for name in members():
            self.inboxes.follow(name, members())

    def begin(self) -> None:
        context = self._context
        context.clock.hear(True)  # the run has just been loaded
        context.spawn(self._read(context.open("reader")), "read streams")
        context.spawn(self._listen(context.open("knocks")), "listen for knocks")
        context.spawn(self._watch_server(), "watch the server")

    async def drain(self) -> None:
        """Read what is there before a timer may fire."""
        with suppress(CommandRefused, *STALL):  # the reading task deals with those
            async with asyncio.timeout(REPLY_S):
                self._take(await self.inboxes.read(self._context.redis, None))

    def _take(self, entries: list[Entry]) -> None:
        for event in self.inboxes.events(entries):
            self._events.put_nowait(event)

    async def _read(self, redis: Redis) -> None:
        """Follow every inbox and progress stream; blocks briefly so that new streams are picked up."""
        while True:
            try:
                entries = await self._context.persist(
                    lambda: self.inboxes.read(redis, int(BLOCK_S * 1000)), "read streams", reading=True
                )
            except CommandRefused as error:
                await self._drop_damaged(error)
                continue
            fail_at("after read")
            self._take(entries)

    async def _drop_damaged(self, error: CommandRefused) -> None:
        """A member made something else of its stream: it is not read any more, the others are."""
        context = self._context
        if error.code != "WRONGTYPE":
            raise error
        damaged = await context.persist(lambda: self.inboxes.drop_damaged(context.redis), "look for a damaged stream")
        if not damaged:
            raise error
        for sender in damaged:
            self._events.put_nowait(Troubled(f"a stream of {sender} is no stream any more: it is not read"))

    async def _listen(self, redis: Redis) -> None:
        """Knocks name inboxes we may not know yet; they are repeated until the member is welcomed."""
        while True:
            pubsub = redis.pubsub()
            try:
                await pubsub.subscribe(self._context.keys.knock)
                while True:
                    message = await pubsub.get_message(timeout=KNOCKS_SILENT_S)
                    if message is None:  # perhaps nobody knocks, perhaps the connection is dead
                        await pubsub.ping()
                        if await pubsub.get_message(timeout=REPLY_S) is None:
                            break
                    elif message["type"] == "message":
                        self.inboxes.knocked(message["data"].decode(errors="replace"), self._members())
            except STALL as error:
                if isinstance(error, ResponseError) and not is_passing(error):
                    raise refused(error, ("SUBSCRIBE", self._context.keys.knock)) from None
                await asyncio.sleep(LONGEST_S / 4)
            finally:
                with suppress(*OUTAGE):
                    await pubsub.aclose()  # type: ignore[no-untyped-call]

    async def _watch_server(self) -> None:
        """How full it is, and whether it is still fit: somebody may change its settings at any time."""
        context = self._context
        while info := await context.persist(partial(look, context.redis), "look at the server"):
            if (reason := unfit(info)) is not None:
                raise ServerUnfit(reason)
            context.outages.note("clients", crowded(info))
            limit = int(info.get("maxmemory", 0))
            used = int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0))
            self._events.put_nowait(MemorySeen(used / limit if limit else 0.0))
            await asyncio.sleep(LOOK_EVERY_S)
        log.info("INFO is not permitted: how full the server is, and whether it evicts keys, cannot be seen")
