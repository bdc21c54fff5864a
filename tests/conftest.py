"""Fixtures of all tests: a real server, a fresh run per test, guards against what a test leaves behind."""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
import inspect
import os
import re
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings

from anabranch.queue.embedded import EmbeddedServer, ServerOptions
from tests.leaks import changes, look

ServerFactory = Callable[..., EmbeddedServer]

_SEED = pytest.StashKey[int]()
_SEED_FROM_MAIN = "anabranch_seed"
_TIDY_S = 15.0  # an async test ends so much before its limit: by itself, with its servers and processes

# An example may take its time: on a loaded machine 0.2 s say nothing about it.
settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")

if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under nohup: what we start would ignore it, too
    signal.signal(signal.SIGHUP, lambda *_: None)

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports transformers, in whatever order tests run
os.environ["OMP_NUM_THREADS"] = "1"  # several test processes, with processes of their own, share few cores


def pytest_configure(config: pytest.Config) -> None:
    given = os.environ.get("ANABRANCH_SEED") or getattr(config, "workerinput", {}).get(_SEED_FROM_MAIN)
    config.stash[_SEED] = int(given) if given else secrets.randbelow(2**31)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist's workers draw no seeds of their own."""
    node.workerinput[_SEED_FROM_MAIN] = str(node.config.stash[_SEED])


def pytest_report_header(config: pytest.Config) -> str:
    return f"anabranch seed: {config.stash[_SEED]} (ANABRANCH_SEED={config.stash[_SEED]} repeats it)"


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    if exitstatus != 0:  # the header is not shown with -q
        terminalreporter.write_line(pytest_report_header(config))


def pytest_itemcollected(item: pytest.Item) -> None:
    """An async test that takes too long is cancelled from within its loop. An alarm's exception may be raised in any
    task, and then ends that one and not the test."""
    if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
        marker = item.get_closest_marker("timeout")
        limit_s = float(marker.args[0] if marker else item.config.getini("timeout"))
        item.obj = _bounded(item.obj, limit_s - _TIDY_S)


def _bounded(test: Callable[..., Any], limit_s: float) -> Callable[..., Any]:
    @functools.wraps(test)
    async def bounded(*args: Any, **kwargs: Any) -> None:
        try:
            async with asyncio.timeout(limit_s) as limit:
                await test(*args, **kwargs)
        except TimeoutError:
            if limit.expired():
                raise AssertionError(f"not done after {limit_s:g} s") from None
            raise

    return bounded


def pytest_collection_finish() -> None:
    """What was imported stays: looking through it for garbage after every test would take longer than the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """ANABRANCH_SEED, or a random number that the report shows."""
    return pytestconfig.stash[_SEED]


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """One server for the whole session, on a loopback port, with an append-only file."""
    server = EmbeddedServer(ServerOptions(tmp_path_factory.mktemp("valkey")))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server_factory(tmp_path: Path) -> Iterator[ServerFactory]:
    """Started servers of the test's own, to kill and restart: `server_factory(password="x", ...)`."""
    servers: list[EmbeddedServer] = []

    def start(**options: Any) -> EmbeddedServer:
        standard = ServerOptions(tmp_path / f"valkey-{len(servers)}")
        server = EmbeddedServer(replace(standard, **options))
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    """A run's name of this test's own."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:50].strip("-")
    return f"{readable}-{hashlib.sha256(request.node.nodeid.encode()).hexdigest()[:8]}"


@pytest.fixture
def run_url(valkey_server: EmbeddedServer, run_name: str) -> str:
    """The URL of a run of this test's own on the session's server."""
    return f"{valkey_server.url}?run={run_name}"


@pytest.fixture(autouse=True)
def _no_keys_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Delete all runs' keys after the test; a key outside `anabranch:` fails it."""
    if "valkey_server" not in request.fixturenames:
        yield
        return
    server: EmbeddedServer = request.getfixturevalue("valkey_server")
    yield
    gc.collect()  # a connection that is not closed fails this test, and not whichever runs when it is noticed
    with redis.Redis.from_url(server.url) as client:
        keys: list[bytes] = list(client.scan_iter(count=1000))
        if keys:
            client.delete(*keys)
    strays = sorted(key.decode(errors="replace") for key in keys if not key.startswith(b"anabranch:"))
    if strays:
        pytest.fail(f"the test left keys outside `anabranch:`: {', '.join(strays[:5])}")


@pytest.fixture(autouse=True)
def _process_stays_as_it_was() -> Iterator[None]:
    """What a test changes in the process it shares with others, and does not put back, fails it."""
    before = look()
    yield
    if changed := changes(before, look()):
        pytest.fail(f"the test left changed: {'; '.join(changed)}")


@pytest.fixture(autouse=True)
def _async_guards(request: pytest.FixtureRequest) -> None:
    """Async tests only: an async fixture would make an event loop for every plain test, too."""
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("_no_tasks_left")


@pytest.fixture
async def _no_tasks_left() -> AsyncIterator[None]:
    """An asyncio task still running at the end of a test fails it."""
    before = asyncio.all_tasks()
    yield
    for _ in range(5):  # what was cancelled ends within a few turns of the loop
        await asyncio.sleep(0)
    current = asyncio.current_task()
    left = {task for task in asyncio.all_tasks() - before if task is not current and not task.done()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    if left:
        names = ", ".join(sorted(f"{task.get_name()} ({task.get_coro()!r})" for task in left))
        pytest.fail(f"the test left tasks running: {names}")
