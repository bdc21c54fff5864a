"""Reading streams with cursors of our own (no consumer group: a commit deletes what it consumed)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redis.asyncio import Redis

START = b"0-0"
_COUNT = 256  # entries per stream and read: bounds what one reply can hold


@dataclass(frozen=True)
class Entry:
    """One stream entry."""

    stream: str
    id: bytes
    fields: dict[bytes, bytes]


class StreamReader:
    """Several streams read together, each from its own cursor.

    Reads may overlap (a blocking one and a drain): an entry at or before the cursor is dropped, so each is
    handed out once.
    """

    def __init__(self) -> None:
        self._cursors: dict[str, bytes] = {}

    @property
    def streams(self) -> frozenset[str]:
        return frozenset(self._cursors)

    def follow(self, stream: str, after: bytes = START) -> None:
        """Add a stream; its entries after `after` will be read. A stream already followed keeps its cursor."""
        self._cursors.setdefault(stream, after)

    def rewind(self, stream: str, after: bytes) -> None:
        self._cursors[stream] = after

    def forget(self, stream: str) -> None:
        self._cursors.pop(stream, None)

    async def forget_damaged(self, redis: Redis) -> list[str]:
        """Forget streams whose key is something else by now; one of those fails the read of all."""
        damaged = [s for s in self._cursors if await redis.type(s) not in (b"stream", b"none")]
        for stream in damaged:
            self.forget(stream)
        return damaged

    async def read(self, redis: Redis, block_ms: int | None) -> list[Entry]:
        """New entries of all streams; waits up to `block_ms` for the first (None: not at all)."""
        if not self._cursors:
            return []
        cursors: dict[Any, Any] = dict(self._cursors)
        reply: Any = await redis.xread(cursors, count=_COUNT, block=block_ms)
        entries: list[Entry] = []
        for raw_stream, items in reply or []:
            stream = raw_stream.decode()
            for entry_id, fields in items:
                cursor = self._cursors.get(stream)
                if cursor is None or order(entry_id) <= order(cursor):
                    continue
                self._cursors[stream] = entry_id
                entries.append(Entry(stream, entry_id, fields or {}))
        return entries


def order(entry_id: bytes) -> tuple[int, int]:
    """A sortable form of a stream id."""
    milliseconds, _, sequence = entry_id.partition(b"-")
    return int(milliseconds), int(sequence or 0)


async def last_id(redis: Redis, stream: str) -> bytes:
    """Id of a stream's last entry, `START` if it has none: note it first, then read state, then follow."""
    items: Any = await redis.xrevrange(stream, count=1)
    return bytes(items[0][0]) if items else START
