"""What an operator does to a run from anywhere: look at it, and put commands on its control stream."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from anabranch._version import VERSION
from anabranch.orchestrator.core.view import ledger_rows
from anabranch.queue.connection import check_server, connect
from anabranch.queue.control import send_command
from anabranch.queue.keys import Keys
from anabranch.queue.messages import unpack
from anabranch.queue.records import read_run
from anabranch.queue.url import RunUrl

EVENTS_SHOWN = 12


async def command(url: RunUrl, action: str, *, key: str = "", value: Any = None, by: str = "command line") -> None:
    """Send one command; the leader obeys it when it reads it."""
    async with AsyncExitStack() as stack:
        redis = connect(url, name="anabranch-operator")
        stack.push_async_callback(redis.aclose)
        await check_server(redis, url)
        await send_command(redis, Keys(url.run), action, key=key, value=value, by=by)


async def status(url: RunUrl) -> dict[str, Any]:
    """The same picture as the page's, read from what the leader stored (at most about a second old)."""
    keys = Keys(url.run)
    async with AsyncExitStack() as stack:
        redis = connect(url, name="anabranch-operator")
        stack.push_async_callback(redis.aclose)
        await check_server(redis, url)
        record = await read_run(redis, keys)
        holder: Any = await redis.get(keys.lease)
        stored: Any = await redis.hget(keys.state, "picture")
        if stored is None:
            return {"release": VERSION, "run": url.run, "phase": "no such run on this server", "leader": False}
        entries: Any = await redis.xrevrange(keys.tape, count=EVENTS_SHOWN)
    shown = unpack(stored)
    if holder is None and shown["phase"] != "stopped":
        shown["phase"] = "no synchronizer leads this run"
    events = [unpack(fields[b"e"]) for _, fields in reversed(entries)]
    spoken = {"release": record.release, "schema": record.schema} if record is not None else {"release": VERSION}
    return {**spoken, **shown, "leader": holder is not None, "ledger": ledger_rows(shown), "events": events}
