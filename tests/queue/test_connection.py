"""Which servers may hold a run, and what is said about the others."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import ServerError, ServerUnreachable, UnsuitableServer
from anabranch.queue.connection import check_server, connect, judge_server
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace
from tests.conftest import ServerFactory
from tests.harness import bench, make_spec
from tests.tools import redis_server_path, require
from tests.wait import PATIENCE_S, wait_until_sync

LIMITED = {"maxmemory": 1 << 30}


@pytest.mark.parametrize(
    "info",
    [
        {"redis_version": "7.0.15"},
        {"redis_version": "8.2.0", "maxmemory_policy": "noeviction", **LIMITED},
        {"redis_version": "10.0"},
        {"redis_version": "7.2.4", "valkey_version": "8.0.1", "maxmemory_policy": "noeviction"},
        {"redis_version": "6.0.0", "valkey_version": "9.1.0"},
        {"redis_version": "7.4.0", "maxmemory_policy": "volatile-lru", "maxmemory": 0},
    ],
)
def test_these_servers_are_taken(info: dict[str, Any]) -> None:
    judge_server(info, "there")


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ({"redis_version": "6.2.14"}, "there: Redis 6.2.14 is too old; use Redis 7.0 or newer, or Valkey"),
        ({}, "Redis 0 is too old"),
        ({"redis_version": "7.0.0", "maxmemory_policy": "allkeys-lru"}, "maxmemory-policy is allkeys-lru"),
        ({"redis_version": "7.0.0", "maxmemory_policy": "allkeys-random", **LIMITED}, "set it to noeviction"),
        ({"redis_version": "7.0.0", "maxmemory_policy": "volatile-ttl", **LIMITED}, "which may delete the model"),
        ({"valkey_version": "9.1.0", "redis_version": "7.2.4", "maxmemory_policy": "allkeys-lfu"}, "allkeys-lfu"),
    ],
)
def test_these_are_refused_saying_why(info: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsuitableServer, match=words):
        judge_server(info, "there")


async def check(text: str) -> dict[str, Any]:
    url = RunUrl.parse(text)
    redis = connect(url, name="test")
    try:
        return await check_server(redis, url)
    finally:
        await redis.aclose()


async def test_our_own_server_is_suitable(run_url: str) -> None:
    assert "redis_version" in await check(run_url)


async def test_who_is_cancelled_while_closing_leaves_nothing_open(run_url: str) -> None:
    redis = connect(RunUrl.parse(run_url), name="test")
    await redis.ping()
    [connection] = redis.connection_pool._available_connections
    closing = asyncio.create_task(redis.aclose())
    await asyncio.sleep(0)  # it has begun, the tasks it starts have not
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not connection.is_connected


async def test_an_address_where_nobody_listens_is_named_quickly() -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        started = time.monotonic()
        with pytest.raises(
            ServerUnreachable, match=rf"redis://127\.0\.0\.1:{port}/0\?run=run: .*[^.]; is the server running"
        ):
            await check(f"redis://127.0.0.1:{port}/0")
    assert time.monotonic() - started < 8.0


async def test_a_name_nobody_knows_is_a_server_error() -> None:
    with pytest.raises(ServerUnreachable):
        await check("redis://no-such-host.invalid/0")


async def test_a_missing_socket_is_a_server_error(tmp_path: Path) -> None:
    with pytest.raises(ServerUnreachable, match=r"nothing\.sock"):
        await check(f"unix://{tmp_path}/nothing.sock")


@pytest.mark.parametrize("given", ["", ":wrong@"])
async def test_a_wrong_password_is_named_without_repeating_it(server_factory: ServerFactory, given: str) -> None:
    server = server_factory(password="right")
    with pytest.raises(ServerUnreachable, match="put user:password@ before the host") as raised:
        await check(server.url.replace(":right@", given))
    assert "wrong@" not in str(raised.value)
    assert "right" not in str(raised.value)


async def test_something_else_that_listens_is_a_server_error() -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    listener = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        with pytest.raises(ServerError):
            await check(f"redis://127.0.0.1:{port}/0")


async def test_clients_have_names(run_url: str) -> None:
    redis = connect(RunUrl.parse(run_url), name="anabranch-somebody")
    assert await redis.client_getname() in {b"anabranch-somebody", "anabranch-somebody"}
    await redis.aclose()


async def test_no_more_connections_than_asked_for(run_url: str) -> None:
    redis = connect(RunUrl.parse(run_url), name="few", connections=2)

    async def count() -> int:
        return sum(client["name"] == "few" for client in await redis.client_list())

    await asyncio.gather(*[redis.ping() for _ in range(20)])
    assert await count() <= 2
    await redis.aclose()


@contextmanager
def debians_redis(directory: Path) -> Iterator[str]:
    """Redis' own server on a Unix socket."""
    program = require(redis_server_path(), "redis-server")
    path = directory / "redis.sock"
    arguments = [
        "--port",
        "0",
        "--unixsocket",
        str(path),
        "--dir",
        str(directory),
        "--save",
        "",
        "--appendonly",
        "no",
    ]
    server = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
    try:
        wait_until_sync(path.exists, "redis-server listens")
        yield f"unix://{path}"
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


async def test_a_whole_run_works_on_redis_7(tmp_path: Path) -> None:
    with debians_redis(tmp_path) as url:
        info = await check(url)
        assert "valkey_version" not in info
        async with bench(f"{url}?run=debian", make_spec("debian", rounds={"quorum": 2})) as run:
            for name in ("a", "b"):
                run.add(name, Pace(step_s=0.003))
            await run.reach(3)
            assert run.tape("rejected") == []
            assert run.state.counts.get("ledger mismatches", 0) == 0
