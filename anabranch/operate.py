"""What an operator does to a run from anywhere: look at it, and put commands on its control stream."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from redis.exceptions import ResponseError

from anabranch._version import VERSION
from anabranch.errors import CommandRefused, UsageError
from anabranch.orchestrator.core.view import ledger_rows
from anabranch.queue.connection import check_server, connect, plainly
from anabranch.queue.control import send_command
from anabranch.queue.keys import Keys
from anabranch.queue.records import no_such_run, read_event, read_picture, read_run
from anabranch.queue.refusals import words
from anabranch.queue.url import RunUrl

if TYPE_CHECKING:
    from redis.asyncio import Redis

EVENTS_SHOWN = 12
SAY_EVERY_S = 3.0  # what is waited for
LOOK_MS = 200


async def command(
    url: RunUrl, action: str, *, key: str = "", value: Any = None, by: str = "command line", begun: bool = True
) -> None:
    """Send one command; the leader obeys it when it reads it. `UsageError` if there is no such run; `begun` False:
    there will be, at once."""
    async with _operator(url) as redis:
        if begun:
            await _send(redis, url, action, key, value, by)
        else:
            await send_command(redis, Keys(url.run), action, key=key, value=value, by=by)


async def obeyed(
    url: RunUrl,
    action: str,
    say: Callable[[str], None],
    *,
    key: str = "",
    value: Any = None,
    by: str = "command line",
) -> None:
    """Send one command and wait until the leader has done it: `say` gets a line for whatever comes of it, and what
    is waited for. `UsageError` if it is refused."""
    async with _operator(url) as redis:
        keys = Keys(url.run)
        newest: Any = await redis.xrevrange(keys.tape, count=1)
        after = newest[0][0].decode() if newest else "0-0"
        identity = await _send(redis, url, action, key, value, by)
        expected = 2 if action == "stop" else 1  # what is announced, then the last checkpoint
        said_at, started = time.monotonic(), time.monotonic()
        while expected:
            # Not polled for: after a stop the server itself may end within a moment.
            found: Any = await redis.xread({keys.tape: after}, block=LOOK_MS)
            for entry, fields in found[0][1] if found else ():
                after, event = entry.decode(), read_event(fields)
                if event is None or event.get("command") != identity:
                    continue
                if event["kind"] == "refused":
                    raise UsageError(event["reason"])
                say(event["reason"] if event["kind"] != "checkpoint" else f"checkpoint: {event['reason']}")
                expected -= 1
            if expected and time.monotonic() - said_at >= SAY_EVERY_S:
                said_at = time.monotonic()
                say(f"{await _waits_for(redis, keys)} (for {said_at - started:.0f} s; Ctrl-C: wait no longer)")


async def _waits_for(redis: Redis, keys: Keys) -> str:
    if await redis.exists(keys.lease):
        return "waiting for the synchronizer to do it"
    return f"no synchronizer leads run {keys.run}: one does it as soon as it is started"


@asynccontextmanager
async def _operator(url: RunUrl) -> AsyncIterator[Redis]:
    async with AsyncExitStack() as stack:
        redis = connect(url, name="anabranch-operator")
        stack.push_async_callback(redis.aclose)
        await check_server(redis, url)
        with plainly(url):
            yield redis


async def _send(redis: Redis, url: RunUrl, action: str, key: str, value: Any, by: str) -> str:
    keys = Keys(url.run)
    if (record := await read_run(redis, keys)) is None:  # it must not wait there for a run that is begun later
        raise UsageError(await no_such_run(redis, url.run))
    if action == "set":
        record.spec.changed(key, value)
    return await send_command(redis, keys, action, key=key, value=value, by=by)


async def _refuses_writes(redis: Redis, keys: Keys) -> str | None:
    """Why the leader cannot write: what it stored before says nothing of that. Asked with a write of nothing."""
    try:
        await redis.hdel(keys.state, "no such field")
    except ResponseError as error:
        return words(error)
    except CommandRefused:  # our user may only read
        pass
    return None


async def status(url: RunUrl) -> dict[str, Any]:
    """The same picture as the page's, read from what the leader stored (at most about a second old)."""
    keys = Keys(url.run)
    async with _operator(url) as redis:
        record = await read_run(redis, keys)
        holder: Any = await redis.get(keys.lease)
        stored: Any = await redis.hget(keys.state, "picture")
        if stored is None:
            phase = await no_such_run(redis, url.run)
            return {"release": VERSION, "run": url.run, "phase": phase, "leader": False}
        entries: Any = await redis.xrevrange(keys.tape, count=EVENTS_SHOWN)
        trouble = await _refuses_writes(redis, keys)
    shown = read_picture(stored)
    if trouble is not None:
        shown["phase"] = trouble
    elif holder is None and shown["phase"] != "stopped":
        shown["phase"] = "no synchronizer leads this run"
    events = [event for _, fields in reversed(entries) if (event := read_event(fields)) is not None]
    spoken = {"release": record.release, "schema": record.schema} if record is not None else {"release": VERSION}
    return {**spoken, **shown, "leader": holder is not None, "ledger": ledger_rows(shown), "events": events}
