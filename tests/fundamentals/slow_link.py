"""A TCP proxy with the bandwidth of a slow line, shared fairly by all connections and both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit, urlunsplit

PIECE = 16 * 1024  # bytes: what others wait for at most, each


class _Line:
    def __init__(self, upstream: tuple[str, int], bytes_per_s: float) -> None:
        self.carried = 0
        self._upstream = upstream
        self._bytes_per_s = bytes_per_s
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        server_reader, server_writer = await asyncio.open_connection(*self._upstream)
        try:
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(self._pump(reader, server_writer), name="slow line: up")
                pumps.create_task(self._pump(server_reader, writer), name="slow line: down")
        except* OSError:
            pass
        finally:
            self._tasks.discard(task)
            for end in (writer, server_writer):
                end.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(PIECE):
            async with self._turn:
                await asyncio.sleep(len(data) / self._bytes_per_s)
            self.carried += len(data)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError  # ends the other direction, too

    async def hang_up(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def slow_line(run_url: str, bits_per_s: float) -> AsyncIterator[tuple[str, _Line]]:
    """The run's URL through the line, and the line."""
    parts = urlsplit(run_url)
    assert parts.hostname is not None
    assert parts.port is not None
    line = _Line((parts.hostname, parts.port), bits_per_s / 8)
    server = await asyncio.start_server(line.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    credentials, at, _ = parts.netloc.rpartition("@")
    try:
        yield urlunsplit(parts._replace(netloc=f"{credentials}{at}127.0.0.1:{port}")), line
    finally:
        server.close()
        await line.hang_up()
        await server.wait_closed()
