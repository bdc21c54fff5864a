"""Bringing new versions in: one download per fragment at a time, always the newest after that."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from anabranch.errors import BlobMissing, PayloadError
from anabranch.merge.codecs import decode, encoded_bytes
from anabranch.queue.records import FragmentRecord
from anabranch.workers.member.learner import NewVersion
from anabranch.workers.member.line import Line

log = logging.getLogger("anabranch.worker")

LOST_S = 0.25  # until a version that is not superseded but gone is looked for again


class Fetcher:
    """A download that is under way is finished before a newer one begins: a link slower than the run's rounds would
    otherwise never bring anything."""

    def __init__(
        self,
        line: Line,
        sizes: Sequence[int],
        newest: Callable[[int], Awaitable[FragmentRecord | None]],
        deliver: Callable[[NewVersion], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        """`sizes`: parameters per fragment; `newest` asks `state` for a fragment's record."""
        self._line = line
        self._sizes = sizes
        self._newest = newest
        self._deliver = deliver
        self._tasks = tasks
        self._wanted: dict[int, FragmentRecord] = {}
        self._running: dict[int, asyncio.Task[None]] = {}

    def want(self, fragment: int, record: FragmentRecord) -> None:
        """Fetch this version, or after the one under way."""
        self._wanted[fragment] = record
        running = self._running.get(fragment)
        if running is None or running.done():
            work = self._fetch_all(fragment)
            self._running[fragment] = self._tasks.create_task(work, name=f"fetch fragment {fragment}")

    async def _fetch_all(self, fragment: int) -> None:
        while (record := self._wanted.pop(fragment, None)) is not None:
            await self._fetch(fragment, record)

    async def _fetch(self, fragment: int, record: FragmentRecord) -> None:
        size = self._sizes[fragment]
        while True:
            record = self._wanted.pop(fragment, record)
            try:
                fetch = partial(self._line.blobs.get, record.theta, encoded_bytes("fp32", size))
                data = await self._line.persist(fetch, "fetch a fragment", bounded=False)
                break
            except BlobMissing:  # superseded meanwhile: `state` names the newer one
                newest = await self._newest(fragment)
                if newest is None or newest.theta == record.theta:
                    await asyncio.sleep(LOST_S)
                record = newest or record
            except PayloadError as error:
                log.error("fragment %d, version %d: %s", fragment, record.version, error)
                return
        theta = decode("fp32", data, size)
        self._deliver(NewVersion(fragment, record.version, record.theta.digest, theta, record.timeline))
