"""The status page as an aiohttp application: one static page, server-sent events, JSON, a health check.

Loopback by default. Requests must name the page's own host (a page elsewhere cannot reach it through a rebound
DNS name); whatever changes the run needs the control token.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from importlib import resources
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from aiohttp import web

from anabranch._version import VERSION
from anabranch.errors import CommandRefused, ServerError
from anabranch.orchestrator.core.view import ledger_rows, view
from anabranch.queue.connection import connect
from anabranch.queue.control import send_command
from anabranch.queue.patience import STALL

if TYPE_CHECKING:
    from anabranch.orchestrator.synchronizer import Synchronizer

REFRESH_S = 0.25  # at most four pictures per second and page
EVENTS_SENT = 60
RETRY_MS = 1000  # how soon a page that lost its stream asks again
MOST_STREAMS = 32  # pages watching at the same time
CONTROL_S = 5.0  # a command that Redis does not take for so long fails
SHUTDOWN_S = 1.0  # for requests under way; streams are ended
WRITE_S = 20.0  # a page that takes nothing for so long is gone
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "[::1]", "::1"})
_STATIC = resources.files("anabranch.orchestrator.web") / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

SYNCHRONIZER: web.AppKey[Synchronizer] = web.AppKey("synchronizer")
OPTIONS: web.AppKey[PageOptions] = web.AppKey("options")
STREAMS: web.AppKey[set[asyncio.Task[Any]]] = web.AppKey("streams")


@dataclass(frozen=True)
class PageOptions:
    """Where the page listens. `port` 0 picks a free one; `token` allows control through the page's API; `names`:
    hosts it answers to besides its own address and loopback, as behind a proxy."""

    host: str = "127.0.0.1"
    port: int = 0
    token: str | None = None
    names: tuple[str, ...] = ()


def picture(synchronizer: Synchronizer) -> dict[str, Any]:
    """What the page shows now."""
    shared = {"release": VERSION, "url": synchronizer.url.redacted, "hearing": synchronizer.hearing}
    if synchronizer.core is None:
        holder, trouble = synchronizer.standby_for, synchronizer.trouble
        waiting = trouble or (f"standby: {holder} leads" if holder else "starting")
        return {**shared, "run": synchronizer.keys.run, "phase": waiting, "leader": False}
    shown = view(synchronizer.core.state, synchronizer.clock.now)
    shown["phase"] = synchronizer.trouble or shown["phase"]
    checkpoint = synchronizer.checkpoints.latest if synchronizer.checkpoints is not None else None
    return {**shared, **shown, "leader": True, "ledger": ledger_rows(shown), "checkpoint": checkpoint}


def events_after(synchronizer: Synchronizer, number: int) -> list[dict[str, Any]]:
    """Tape events newer than `number`, oldest first."""
    return [event for event in synchronizer.tape.recent if event["number"] > number][-EVENTS_SENT:]


def make_app(synchronizer: Synchronizer, options: PageOptions) -> web.Application:
    """The application; it holds no state of its own."""
    app = web.Application(middlewares=[_guard], client_max_size=16 * 1024)
    app[SYNCHRONIZER], app[OPTIONS], app[STREAMS] = synchronizer, options, set()
    app.router.add_get("/", _static_page)
    app.router.add_get("/static/{name}", _static_page)
    app.router.add_get("/api/status", _status)
    app.router.add_get("/api/events", _events, allow_head=False)
    app.router.add_get("/healthz", _health)
    app.router.add_post("/api/control/{action}", _control)
    app.on_shutdown.append(_end_streams)
    return app


@asynccontextmanager
async def serve_page(synchronizer: Synchronizer, options: PageOptions) -> AsyncIterator[str]:
    """Serve until the block ends; yields the page's address. A taken port is a `ServerError`."""
    runner = web.AppRunner(make_app(synchronizer, options), access_log=None, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port)
        try:
            await site.start()
        except OSError as error:
            raise ServerError(
                f"the status page cannot listen on {options.host}:{options.port}: {error.strerror or error}; "
                "choose another port for the page: --page-port (in the demo --port); 0 picks a free one"
            ) from None
        host, port = runner.addresses[0][:2]
        yield f"http://{f'[{host}]' if ':' in host else host}:{port}/"
    finally:
        await runner.cleanup()


# --- handlers ---------------------------------------------------------------------------------------------


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    options = request.app[OPTIONS]
    name = request.host.rsplit(":", 1)[0] if not request.host.endswith("]") else request.host
    own = {options.host.lower(), f"[{options.host.lower()}]", *(name.lower() for name in options.names)}
    wildcard = options.host in {"0.0.0.0", "::"}  # whoever binds everything has chosen to be reachable by any name
    try:
        if name.lower() not in _LOOPBACK | own and not wildcard:
            reason = f"host {name!r} is not this page's: open it by its address, or start it with --page-name {name}"
            raise web.HTTPForbidden(text=reason + "\n")
        response = await handler(request)
    except web.HTTPException as answer:
        answer.headers.update(_HEADERS)
        raise
    if not response.prepared:
        response.headers.update(_HEADERS)
    return response


async def _static_page(request: web.Request) -> web.Response:
    name = request.match_info.get("name", "index.html")
    files, kind = {file.name: file for file in _STATIC.iterdir()}, _TYPES.get(PurePath(name).suffix)
    if name not in files or kind is None:
        raise web.HTTPNotFound
    return web.Response(body=files[name].read_bytes(), content_type=kind, charset="utf-8")


async def _status(request: web.Request) -> web.Response:
    return web.json_response(picture(request.app[SYNCHRONIZER]))


async def _health(request: web.Request) -> web.Response:
    synchronizer = request.app[SYNCHRONIZER]
    why = synchronizer.trouble
    answer = {"ok": why is None, "why": why, "leader": synchronizer.core is not None, "release": VERSION}
    return web.json_response(answer, status=200 if why is None else 503)


async def _events(request: web.Request) -> web.StreamResponse:
    """Server-sent events: `status` with the whole picture, `tape` with new events. Resumes by Last-Event-ID."""
    synchronizer, streams = request.app[SYNCHRONIZER], request.app[STREAMS]
    if len(streams) >= MOST_STREAMS:
        raise web.HTTPServiceUnavailable(text=f"{MOST_STREAMS} pages are watching already\n")
    task = asyncio.current_task()
    assert task is not None
    streams.add(task)
    sent = _resume(synchronizer, request.headers.get("Last-Event-ID", ""))
    response = web.StreamResponse(headers={**_HEADERS, "Content-Type": "text/event-stream; charset=utf-8"})
    try:
        await response.prepare(request)
        await response.write(f"retry: {RETRY_MS}\n".encode())
        while True:
            events = events_after(synchronizer, sent)
            sent = events[-1]["number"] if events else sent
            identity = f"{synchronizer.owner}-{sent}"
            parts = [_sse("tape", events, identity)] if events else []
            async with asyncio.timeout(WRITE_S):
                await response.write(b"".join([*parts, _sse("status", picture(synchronizer), identity)]))
            await _next_change(synchronizer)
    except (ConnectionResetError, asyncio.CancelledError):
        return response
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
        return response
    finally:
        streams.discard(task)


def _resume(synchronizer: Synchronizer, last: str) -> int:
    """The tape number a page has seen. Numbers begin anew with every synchronizer, so an id names its owner."""
    owner, _, number = last.partition("-")
    known = owner == synchronizer.owner and number.isdecimal() and len(number) < 16
    return int(number) if known else 0


async def _next_change(synchronizer: Synchronizer) -> None:
    await asyncio.sleep(REFRESH_S)
    synchronizer.changed.clear()
    with suppress(TimeoutError):
        async with asyncio.timeout(REFRESH_S):  # ages and countdowns move without an event, too
            await synchronizer.changed.wait()


def _sse(event: str, data: Any, identity: str) -> bytes:
    return f"event: {event}\nid: {identity}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()


async def _control(request: web.Request) -> web.Response:
    options, synchronizer = request.app[OPTIONS], request.app[SYNCHRONIZER]
    given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode(errors="surrogateescape")
    if not options.token or not hmac.compare_digest(given, options.token.encode()):
        raise web.HTTPUnauthorized(text="needs the run's control token: Authorization: Bearer $(cat DIR/token)\n")
    action = request.match_info["action"]
    if action not in {"pause", "resume", "stop", "checkpoint"}:
        raise web.HTTPNotFound(text="actions: pause, resume, stop, checkpoint\n")
    try:
        async with aclosing(connect(synchronizer.url, name="anabranch-page")) as redis, asyncio.timeout(CONTROL_S):
            await send_command(redis, synchronizer.keys, action, by="page")
    except (CommandRefused, *STALL) as error:
        said = str(error) or "Redis does not answer"
        raise web.HTTPServiceUnavailable(text=f"{said}; nothing was asked for\n") from None
    return web.json_response({"ok": True, "action": action}, status=202)


async def _end_streams(app: web.Application) -> None:
    streams = app[STREAMS]
    for task in tuple(streams):
        task.cancel()
