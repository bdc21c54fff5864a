"""One process's line to a run: what every part of a member needs to speak and to hear, whatever its incarnation."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from redis.asyncio import Redis

from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.connection import connect
from anabranch.queue.keys import Keys
from anabranch.queue.patience import REPLY_S, Outages, persist
from anabranch.queue.records import RunRecord, read_run
from anabranch.queue.streams import Entry, StreamReader, last_id
from anabranch.queue.url import RunUrl

log = logging.getLogger("anabranch.worker")

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Line:
    """Connections and who uses them. Nothing is connected before the first command."""

    url: RunUrl
    keys: Keys
    name: str  # of the member
    redis: Redis
    pulse: Redis  # heartbeats wait for nothing else
    reading: Redis  # the broadcast
    blobs: RedisBlobs
    outages: Outages

    @classmethod
    def to(cls, url: RunUrl, name: str) -> Self:
        def connection(purpose: str, retries: int = 3) -> Redis:
            return connect(url, name=f"anabranch-{purpose}-{name}"[:64], connections=4, retries=retries)

        keys, redis, pulse = Keys(url.run), connection("member"), connection("heart")
        # redis-py would hide a lost connection of the reader: after each the state has to be read again.
        reading = connection("reader", retries=0)
        return cls(url, keys, name, redis, pulse, reading, RedisBlobs(redis, keys), Outages(log))

    def close_with(self, stack: AsyncExitStack) -> None:
        """Each by itself: who is cancelled while closing one closes the others all the same."""
        for redis in (self.redis, self.pulse, self.reading):
            stack.push_async_callback(redis.aclose)

    async def persist(
        self,
        action: Callable[[], Awaitable[T]],
        what: str,
        *,
        bounded: bool = True,
        on_state: Callable[[bool], None] | None = None,
        longest_s: float = math.inf,
    ) -> T:
        """`patience.persist`. `bounded` False: a payload, which bounds itself chunk by chunk."""
        timeout_s = REPLY_S if bounded else None
        return await persist(
            action, what, log, timeout_s=timeout_s, on_state=on_state, outages=self.outages, longest_s=longest_s
        )

    async def post(self, message: messages.Message, schema: int) -> None:
        """Put a message into our inbox at the synchronizer's."""
        inbox, data = self.keys.contributions(self.name), self.encode(message, schema)
        await self.persist(lambda: self.redis.xadd(inbox, {"m": data}), f"send a {message.type}")

    def encode(self, message: messages.Message, schema: int) -> bytes:
        return messages.encode(message, self.keys.run, schema)

    async def read(self, broadcast: StreamReader, block_ms: int) -> list[Entry]:
        """One try; `Broadcast` repeats it."""
        return await broadcast.read(self.reading, block_ms)

    async def tail(self) -> bytes:
        """Where the broadcast ends at the moment."""
        return await self.persist(lambda: last_id(self.redis, self.keys.broadcast), "read the run")

    async def term(self) -> Any:
        """Which term of which synchronizer it is: another answer means that another term began."""
        return await self.persist(lambda: self.redis.get(self.keys.epoch), "read the run")

    async def read_run(self) -> RunRecord | None:
        return await self.persist(lambda: read_run(self.redis, self.keys), "read the run")
