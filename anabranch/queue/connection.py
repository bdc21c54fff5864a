"""Connections, and the check that a server is fit to hold a run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, NoScriptError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from anabranch.errors import CommandRefused, ServerChanged, ServerUnreachable, UnsuitableServer
from anabranch.queue.refusals import NO_ANSWER, is_passing, largest, perhaps_too_large, refused, too_large, words
from anabranch.queue.url import RunUrl

#: What a lost or silent connection raises; everybody who talks to Redis retries on these.
OUTAGE = (RedisConnectionError, RedisTimeoutError, OSError)

CONNECT_S = 10.0
OLDEST_REDIS = (7, 0)
LEAST_BULK_BYTES = 512 * 1024  # every server takes values of this length: its limits are at least 1 MiB
_AROUND_BYTES = 64 * 1024  # of a command besides its value; a query buffer has to hold all of it


async def _greet(connection: Any) -> None:
    """redis-py's greeting, without the connection's name for a user that may not give one."""
    try:
        await connection.on_connect()
    except NoPermissionError:
        if connection.client_name is None:
            raise
        connection.client_name = None
        await connection.on_connect()


class ServerLife:
    """One life of a server process, told by its `run_id`.

    Connections bound to it refuse to talk to a later one: a server that was started again, or another that took
    over, may lack writes it acknowledged, and whoever leads has to look at that before it writes anything.
    """

    def __init__(self) -> None:
        self.run_id: str | None = None  # None: not connected yet, or the server does not say

    async def greet(self, connection: Any) -> None:
        """redis-py's `redis_connect_func`: the usual greeting, then the question who answers."""
        await _greet(connection)
        await connection.send_command("INFO", "server")
        try:
            reply = await connection.read_response()
        except NoPermissionError:  # then lives are not told apart
            reply = b""
        found = re.search(rb"^run_id:(\w+)", reply, re.MULTILINE) if isinstance(reply, bytes) else None
        run_id = found[1].decode() if found is not None else None
        if self.run_id is None:
            self.run_id = run_id
        elif run_id != self.run_id:
            await connection.disconnect()
            raise ServerChanged("the server was started again, or another one took its place")


class _Client(Redis):
    """The border: an error reply that does not pass by itself leaves as `CommandRefused`."""

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        except NoScriptError:  # redis-py loads the script, and tries again
            raise
        except ResponseError as error:
            if is_passing(error):
                raise
            await self._check_size(args)
            raise refused(error, args) from None
        except OUTAGE as error:
            if largest(args) <= LEAST_BULK_BYTES:
                raise
            # A server closes the connection on a value it does not take, often before its reply is read.
            await self._check_size(args)
            raise RedisConnectionError(f"{error}; {perhaps_too_large(args)}") from None

    async def _check_size(self, args: tuple[Any, ...]) -> None:
        if largest(args) > LEAST_BULK_BYTES:
            limit = await value_limit(self)
            if limit is not None and largest(args) > limit.bytes:
                raise too_large(args, limit.bytes, limit.setting)


class Limit(NamedTuple):
    """The longest value that a server takes, and which setting of it says so."""

    bytes: int
    setting: str


async def value_limit(redis: Redis) -> Limit | None:
    """None if the server does not say."""
    try:
        async with asyncio.timeout(CONNECT_S):
            found: Any = await redis.config_get("proto-max-bulk-len", "client-query-buffer-limit")
    except (CommandRefused, RedisError, OSError):
        return None
    said = {_plain(name): int(_plain(value)) for name, value in found.items()}
    limits = [
        Limit(size - (_AROUND_BYTES if name == "client-query-buffer-limit" else 0), name)
        for name, size in said.items()
        if size > 0
    ]
    return min(limits, default=None)


def _plain(word: bytes | str) -> str:
    return word.decode() if isinstance(word, bytes) else word


@contextmanager
def plainly(url: RunUrl) -> Iterator[None]:
    """For whoever waits for nothing: in this block an outage is a `ServerError` of one line, too."""
    try:
        yield
    except (RedisError, TimeoutError, ConnectionResetError) as error:
        said = " ".join(str(error).split()) or "no answer"
        if (what := words(error)) == NO_ANSWER:
            what = f"{said.rstrip('.')}; is the server running, and the address right?"
        raise ServerUnreachable(f"{url.redacted}: {what}") from None


class _Pool(BlockingConnectionPool):
    async def disconnect(self, inuse_connections: bool = True) -> None:
        """Close them all even if we are cancelled meanwhile: redis-py closes each in a task of its own, and one that
        is cancelled before it has begun leaves its connection open."""
        try:
            await super().disconnect(inuse_connections)
        except asyncio.CancelledError:
            await super().disconnect(inuse_connections)
            raise


def connect(
    url: RunUrl, *, name: str, retries: int = 3, connections: int = 8, life: ServerLife | None = None
) -> Redis:
    """A client for `url` with at most so many connections; none is opened until the first command.

    Bytes in, bytes out. There is no socket timeout: `patience.persist` bounds every try (it says why). `life`: raise
    `ServerChanged` instead of talking to another life of the server.
    """
    pool = _Pool.from_url(
        url.server,
        client_name=name,
        max_connections=connections,
        timeout=None,  # of waiting for a free connection
        socket_timeout=None,
        socket_connect_timeout=CONNECT_S,
        protocol=2,
        retry=Retry(ExponentialWithJitterBackoff(base=0.05, cap=1.0), retries),
        **({} if url.server.startswith("unix:") else {"socket_keepalive": True}),
        redis_connect_func=_greet if life is None else life.greet,
    )
    return _Client.from_pool(pool)


async def check_server(redis: Redis, url: RunUrl) -> dict[str, Any]:
    """Read INFO (managed servers block CONFIG) and refuse a server that is too old or may evict keys.

    Whether it is cannot be told where INFO is not permitted: then {}.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            info: dict[str, Any] = await redis.info()
    except CommandRefused as error:
        if error.code != "NOPERM":
            raise
        return {}
    except AuthenticationError as error:
        raise ServerUnreachable(f"{url.redacted}: {error}; put user:password@ before the host") from None
    except (RedisError, OSError) as error:
        said = " ".join(str(error).split()) or f"no answer in {CONNECT_S:.0f} s"
        if (what := words(error)) == NO_ANSWER:
            what = f"{said.rstrip('.')}; is the server running, and the address right?"
        raise ServerUnreachable(f"{url.redacted}: {what}") from None
    judge_server(info, url.redacted)
    return info


async def look(redis: Redis) -> dict[str, Any]:
    """What INFO says about version, memory and clients; {} if it is not permitted."""
    try:
        info: dict[str, Any] = await redis.info("server", "memory", "clients")
    except CommandRefused as error:
        if error.code != "NOPERM":
            raise
        return {}
    return info


def judge_server(info: dict[str, Any], where: str) -> None:
    """Raise `UnsuitableServer` unless INFO describes Redis ≥ 7.0 or any Valkey, with `noeviction`."""
    if (reason := unfit(info)) is not None:
        raise UnsuitableServer(f"{where}: {reason}")


def unfit(info: dict[str, Any]) -> str | None:
    """Why the server that INFO describes must not hold a run, and what to set; None if it may."""
    version = str(info.get("redis_version", "0"))
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if "valkey_version" not in info and numbers < OLDEST_REDIS:
        return f"Redis {version} is too old; use Redis 7.0 or newer, or Valkey"
    policy = str(info.get("maxmemory_policy", "noeviction"))
    limited = int(info.get("maxmemory", 0)) > 0
    if policy != "noeviction" and (limited or policy.startswith("allkeys")):
        return (
            f"maxmemory-policy is {policy}, which may delete the model; "
            "set it to noeviction (CONFIG SET maxmemory-policy noeviction, or in your provider's console)"
        )
    return None


def crowded(info: dict[str, Any]) -> str | None:
    """That nobody else can connect; None if somebody can."""
    connected, most = int(info.get("connected_clients", 0)), int(info.get("maxclients", 0))
    return f"the server takes no more clients (maxclients {most})" if 0 < most <= connected else None
