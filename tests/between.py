"""Putting something between a run's members and its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit


class Between(Protocol):
    """A TCP proxy."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection, until it ends."""
        ...

    async def hang_up(self) -> None:
        """End every connection."""
        ...


B = TypeVar("B", bound=Between)


@asynccontextmanager
async def between(run_url: str, make: Callable[[tuple[str, int]], B]) -> AsyncIterator[tuple[str, B]]:
    """The run's URL through the proxy that `make` makes for the server's (host, port), and the proxy."""
    parts = urlsplit(run_url)
    assert parts.hostname is not None
    assert parts.port is not None
    proxy = make((parts.hostname, parts.port))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    credentials, at, _ = parts.netloc.rpartition("@")
    try:
        yield urlunsplit(parts._replace(netloc=f"{credentials}{at}127.0.0.1:{port}")), proxy
    finally:
        server.close()
        await proxy.hang_up()
        await server.wait_closed()
