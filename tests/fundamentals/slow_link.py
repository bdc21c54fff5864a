"""A TCP proxy with the bandwidth of a slow line, shared fairly by all connections and both directions."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, suppress

from tests.between import between

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


def slow_line(run_url: str, bits_per_s: float) -> AbstractAsyncContextManager[tuple[str, _Line]]:
    """The run's URL through the line, and the line."""
    return between(run_url, lambda upstream: _Line(upstream, bits_per_s / 8))
