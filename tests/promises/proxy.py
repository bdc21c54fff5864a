"""A TCP proxy between a client and the server that loses chosen replies together with their connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field

from tests.between import between


@dataclass
class _Wire:
    """One client's connection and ours to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    marked: bool = False  # the request under way contains the marker
    losing: bool = False  # and its reply is to be lost

    def abort(self) -> None:
        for end in (self.client, self.server):
            end.transport.abort()


@dataclass
class LosingProxy:
    """Forwards everything, but of the requests that contain `marker` the n-th's reply is lost if `loses(n)`.

    The request has reached the server by then: the next reply on its connection is the one to it, as clients of
    ours never have two commands on one connection.
    """

    upstream: tuple[str, int]
    marker: bytes
    loses: Callable[[int], bool]
    seen: int = 0  # marked requests
    lost: int = 0  # replies
    _wires: dict[asyncio.Task[None], _Wire] = field(default_factory=dict)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, until either side ends it or its reply is lost."""
        server_reader, server_writer = await asyncio.open_connection(*self.upstream)
        wire = _Wire(writer, server_writer)
        task = asyncio.current_task()
        assert task is not None
        self._wires[task] = wire
        pumps = [
            asyncio.create_task(self._requests(reader, wire), name="proxy: requests"),
            asyncio.create_task(self._replies(server_reader, wire), name="proxy: replies"),
        ]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        wire.abort()
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in (writer, server_writer):
            with suppress(OSError):
                await end.wait_closed()
        del self._wires[task]

    async def _requests(self, reader: asyncio.StreamReader, wire: _Wire) -> None:
        tail = b""
        while data := await reader.read(1 << 16):
            window = tail + data
            tail = window[-len(self.marker) + 1 :]
            if self.marker in window and not wire.marked:
                wire.marked, wire.losing = True, self.loses(self.seen)
                self.seen += 1
            wire.server.write(data)
            await wire.server.drain()

    async def _replies(self, reader: asyncio.StreamReader, wire: _Wire) -> None:
        while data := await reader.read(1 << 16):
            if wire.losing:
                self.lost += 1
                return
            wire.marked = False
            wire.client.write(data)
            await wire.client.drain()

    async def hang_up(self) -> None:
        """End every connection."""
        tasks = list(self._wires)
        for wire in self._wires.values():
            wire.abort()
        await asyncio.gather(*tasks)


def losing_proxy(
    run_url: str, marker: bytes, loses: Callable[[int], bool]
) -> AbstractAsyncContextManager[tuple[str, LosingProxy]]:
    """The run's URL through a proxy, and the proxy."""
    return between(run_url, lambda upstream: LosingProxy(upstream, marker, loses))
