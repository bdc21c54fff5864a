"""Everything the synchronizer reads: members' inboxes and progress, and the operators' control stream."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from anabranch.orchestrator import ingest
from anabranch.orchestrator.core.events import Event
from anabranch.queue.keys import SYNCHRONIZER, Keys
from anabranch.queue.streams import Entry, StreamReader
from anabranch.spec import ID_PATTERN

if TYPE_CHECKING:
    from redis.asyncio import Redis

log = logging.getLogger("anabranch.synchronizer")


class Inboxes:
    """Which streams are read and who speaks in each; at most `most` members' worth."""

    def __init__(self, keys: Keys, most: int) -> None:
        self._keys = keys
        self._most = most
        self._reader = StreamReader()
        self._names: set[str] = set()
        self._senders: dict[str, tuple[str, str]] = {keys.control: ("control stream", "")}  # stream: kind, sender
        self._reader.follow(keys.control)

    def follow(self, name: str, members: set[str]) -> None:
        """Read a member's streams from their start. `members`: names that are registered and keep their place."""
        if name in self._names:
            return
        if len(self._names) >= self._most:
            for silent in self._names - members:  # knocked but never registered; an honest one knocks again
                self.forget(silent)
        if len(self._names) >= self._most:
            log.warning("%s knocks, but limits.max_members = %d inboxes are read", name, self._most)
            return
        self._names.add(name)
        streams = {"inbox": self._keys.contributions(name), "progress stream": self._keys.progress(name)}
        for kind, stream in streams.items():
            self._senders[stream] = (kind, name)
            self._reader.follow(stream)

    def knocked(self, name: str, members: set[str]) -> None:
        """A name from the knock channel, which anybody may write."""
        if re.fullmatch(ID_PATTERN, name) and not name.startswith(SYNCHRONIZER):
            self.follow(name, members)

    def forget(self, name: str) -> None:
        self._names = self._names - {name}
        for stream in (self._keys.contributions(name), self._keys.progress(name)):
            self._senders.pop(stream, None)
            self._reader.forget(stream)

    async def read(self, redis: Redis, block_ms: int | None) -> list[Entry]:
        return await self._reader.read(redis, block_ms)

    def events(self, entries: list[Entry]) -> list[Event]:
        """What the entries say, in their order."""
        return [
            ingest.read_entry(entry, *self._senders[entry.stream], self._keys.run)
            for entry in entries
            if entry.stream in self._senders
        ]

    async def drop_damaged(self, redis: Redis) -> list[str]:
        """Stop reading streams that somebody made something else of; returns whose they were."""
        return [self._senders.pop(stream, ("", stream))[1] for stream in await self._reader.forget_damaged(redis)]
