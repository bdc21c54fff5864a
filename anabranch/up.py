"""`anabranch up`: a run directory, an embedded server, the synchronizer and its page, as one.

The directory (mode 0700) holds `data/` (the server's append-only file), `checkpoints/`, `tape.jsonl` and its older
parts, `journal/`, `token` (for the page's control API), `password`, `port` and `page-port` (so that a repeated `up`
goes on under the same address), `url` (what others join with).
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from anabranch.errors import UsageError
from anabranch.loops import end_tasks
from anabranch.orchestrator import journal, tape
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.orchestrator.web.app import PageOptions, picture, serve_page
from anabranch.queue.embedded import EmbeddedServer, ServerOptions
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec
from anabranch.terminal import report

LOOPBACK = "127.0.0.1"
LEAVE_S = 15.0  # for members to hear that the run has stopped, and to leave
_LOOK_S = 0.05


@dataclass(frozen=True)
class LeadOptions:
    """How this machine leads a run. `checkpoints`: a folder or an fsspec URL instead of the run directory's own."""

    page: PageOptions | None = field(default_factory=PageOptions)  # None: no page
    init: Path | None = None
    checkpoints: str | None = None
    drain_s: float = 0.0
    journal_mb: int = journal.DEFAULT_MB
    tape_mb: int = tape.DEFAULT_MB


@dataclass(frozen=True)
class Led:
    """What is running. `page`: its address, "" without one."""

    url: RunUrl
    page: str
    synchronizer: Synchronizer
    task: asyncio.Task[None]


@dataclass(frozen=True)
class Up(Led):
    server: EmbeddedServer


class RunDirectory:
    """Creates and locks the directory; small secrets are files of mode 0600 in it."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.chmod(0o700)
        except OSError as error:
            raise self._unusable(error) from None
        self._lock: int | None = None

    def lock(self) -> None:
        descriptor = self._open("lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UsageError(f"--dir {self.path}: another `anabranch up` is using it; stop that one first") from None
        self._lock = descriptor

    def unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def secret(self, name: str) -> str:
        """The secret in the file, made up at the first call."""
        return self.remember(name, lambda: secrets.token_urlsafe(24))

    def remember(self, name: str, make: Callable[[], str]) -> str:
        """The text in file `name`; if there is none yet, what `make()` gives is written there."""
        path = self.path / name
        if not path.exists():
            self.write(name, make())
        return path.read_text(encoding="ascii").strip()

    def _unusable(self, error: OSError) -> UsageError:
        return UsageError(
            f"--dir {self.path}: {error.strerror or error}; choose a folder that can be made, and written to"
        )

    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(self.path / name, flags, 0o600)
        except OSError as error:
            raise self._unusable(error) from None

    def write(self, name: str, text: str) -> None:
        descriptor = self._open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(text + "\n")

    def stored_port(self, name: str = "port") -> int | None:
        """A port of the last `up` (`port`: the server's, `page-port`), if nobody else listens there now."""
        path = self.path / name
        text = path.read_text(encoding="ascii").strip() if path.exists() else ""
        if not text.isdecimal():
            return None
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((LOOPBACK, int(text)))
            return int(text)
        return None


@asynccontextmanager
async def bring_up(
    path: Path,
    spec: RunSpec | None,
    run: str,
    options: LeadOptions,
    host: str = LOOPBACK,
    port: int | None = None,
) -> AsyncIterator[Up]:
    """Start everything; on leaving the block the synchronizer stores what is decided and the server stops.

    `host`: where the server listens; anything but loopback makes the run joinable from other machines."""
    directory = RunDirectory(path)
    directory.lock()
    try:
        place = ServerOptions(
            directory.path / "data", host, port or directory.stored_port(), password=directory.secret("password")
        )
        async with EmbeddedServer(place) as server:
            directory.write("port", str(server.port))
            url = RunUrl.parse(f"{server.url}?run={run}")
            directory.write("url", reachable_url(url, host))
            async with lead(url, spec, directory, options) as led:
                yield Up(**vars(led), server=server)
    finally:
        directory.unlock()


@asynccontextmanager
async def lead(
    url: RunUrl, spec: RunSpec | None, directory: RunDirectory | None, options: LeadOptions
) -> AsyncIterator[Led]:
    """Synchronizer and page, against a server that is there."""
    synchronizer = Synchronizer(
        url,
        spec,
        directory=directory.path if directory is not None else None,
        init=options.init,
        checkpoints=options.checkpoints,
        journal_mb=options.journal_mb,
        tape_mb=options.tape_mb,
    )
    task = asyncio.create_task(synchronizer.run(), name="synchronizer")
    try:
        async with AsyncExitStack() as stack:
            address = ""
            if options.page is not None:
                page = options.page
                if directory is not None:  # where it was the last time, unless said otherwise
                    port = page.port or directory.stored_port("page-port") or 0
                    page = replace(page, port=port, token=directory.secret("token"))
                address = await stack.enter_async_context(serve_page(synchronizer, page))
                if directory is not None:
                    directory.write("page-port", str(urlsplit(address).port))
            reporting = asyncio.create_task(report(partial(picture, synchronizer)), name="report")
            stack.push_async_callback(end_tasks, reporting)
            yield Led(url, address, synchronizer, task)
    finally:
        synchronizer.end(options.drain_s)
        with suppress(asyncio.CancelledError):
            await task


def reachable_url(url: RunUrl, host: str) -> str:
    """The URL another machine can use: with the machine's own address where the server listens on all."""
    families = {"0.0.0.0": (socket.AF_INET, "192.0.2.1"), "::": (socket.AF_INET6, "2001:db8::1")}
    if host not in families:
        return str(url)
    for family, elsewhere in (families[host], families["0.0.0.0"]):  # `::` takes both
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((elsewhere, 9))  # a documentation address: only chooses a route, nothing is sent
            address = probe.getsockname()[0]
            shown = f"[{address}]" if family == socket.AF_INET6 else address
            return re.sub(r"@(127\.0\.0\.1|0\.0\.0\.0|\[::1?\]):", f"@{shown}:", str(url))
    return str(url)


def stored_url(directory: Path) -> str:
    """What others join the run in this directory with, as `up` wrote it; `UsageError` if there was none."""
    try:
        return (directory / "url").read_text(encoding="ascii").strip()
    except OSError:
        raise UsageError(f"--dir {directory}: no run was ever brought up there (`anabranch up --dir`)") from None


async def members_left(synchronizer: Synchronizer, within_s: float = LEAVE_S) -> None:
    """Return once nobody is a member of a stopped run any more: a member that has not heard of it by the time its
    server is gone would wait for that to come back."""
    with suppress(TimeoutError):
        async with asyncio.timeout(within_s):
            while (core := synchronizer.core) is not None and any(m.live for m in core.state.members.values()):  # noqa: ASYNC110
                await asyncio.sleep(_LOOK_S)
