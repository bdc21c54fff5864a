"""A command that is cancelled at a deadline never leaves its reply to a later one.

redis-py returns a connection to its pool when a command is cancelled; were the reply still to come, the next
command on it would get it. So: many commands through one small pool, every reply tells whose it is, and each
command's deadline is drawn from the seed so that it strikes before sending, while waiting, within the reply, or
too late.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import uvloop
from redis.asyncio import Redis

from anabranch.queue.connection import connect
from anabranch.queue.patience import persist
from anabranch.queue.streams import StreamReader
from anabranch.queue.url import RunUrl

log = logging.getLogger("tests.cancel")

CANCELLED = 1000
CONNECTIONS = 3  # fewer than those who want one: waiting for a connection is cancelled, too
CALLERS = 6
LARGE = 200_000  # bytes: a reply that arrives in several pieces
ENOUGH_S = 60.0
PREFIX = "anabranch:{cancel/0}:"

SCRIPT = "return {ARGV[1], redis.call('GET', KEYS[1])}"

Loops = Callable[[], asyncio.AbstractEventLoop]
#: Sends a command marked with this number; returns whether the reply is its own.
Kind = Callable[[int], Awaitable[bool]]


class Commands:
    """Commands whose replies tell whose they are."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._script = redis.register_script(SCRIPT)
        self.kinds: tuple[Kind, ...] = (self.echo, self.large, self.script, self.blocking, self.written)

    async def prepare(self) -> None:
        await self._redis.set(f"{PREFIX}large", b"x" * LARGE)

    async def echo(self, number: int) -> bool:
        reply: Any = await self._redis.echo(f"echo {number}")
        return bool(reply == b"echo %d" % number)

    async def large(self, number: int) -> bool:
        """A reply of a length of its own."""
        reply: Any = await self._redis.getrange(f"{PREFIX}large", 0, LARGE - 1 - number % 1000)
        return bool(reply == b"x" * (LARGE - number % 1000))

    async def script(self, number: int) -> bool:
        reply: Any = await self._script(keys=[f"{PREFIX}large"], args=[f"script {number}"])
        return bool(reply == [b"script %d" % number, b"x" * LARGE])

    async def blocking(self, number: int) -> bool:
        """Waits in the server for what never comes, or reads the one entry that is there: by turns."""
        stream = f"{PREFIX}stream:{number}"
        if number % 2:
            await self._redis.xadd(stream, {"n": number})
        reader = StreamReader()
        reader.follow(stream)
        entries = await reader.read(self._redis, 20)
        return [entry.fields[b"n"] for entry in entries] == ([b"%d" % number] if number % 2 else [])

    async def written(self, number: int) -> bool:
        """Two commands, the second of which shows the first."""
        await self._redis.set(f"{PREFIX}{number}", number, px=5000)
        reply: Any = await self._redis.get(f"{PREFIX}{number}")
        return bool(reply == b"%d" % number)


class Tally:
    """What became of the commands."""

    def __init__(self) -> None:
        self.begun = self.cancelled = self.answered = 0
        self.wrong: list[str] = []

    @property
    def enough(self) -> bool:
        return self.cancelled >= CANCELLED or bool(self.wrong)


async def call(commands: Commands, tally: Tally, generator: random.Random) -> None:
    """Commands one after the other: half of them with a deadline they rarely meet, half with none that notice."""
    usual_s = dict.fromkeys(commands.kinds, 0.001)
    while not tally.enough:
        kind = generator.choice(commands.kinds)
        deadline_s = generator.uniform(0, usual_s[kind]) if generator.random() < 0.5 else None
        tally.begun += 1
        number, started = tally.begun, time.monotonic()
        try:
            async with asyncio.timeout(deadline_s):
                own = await persist(partial(kind, number), "test", log)
        except TimeoutError:
            tally.cancelled += 1
            continue
        tally.answered += 1
        if deadline_s is None:
            usual_s[kind] += 0.25 * (time.monotonic() - started - usual_s[kind])
        if not own:
            tally.wrong.append(f"{kind.__name__} {number}")


async def cancel_often(url: RunUrl, seed: int) -> Tally:
    redis = connect(url, name="test", connections=CONNECTIONS)
    try:
        commands, tally = Commands(redis), Tally()
        await commands.prepare()
        async with asyncio.timeout(ENOUGH_S), asyncio.TaskGroup() as group:
            for caller in range(CALLERS):
                group.create_task(call(commands, tally, random.Random(f"{seed}/{caller}")))
        return tally
    finally:
        await redis.aclose()


@pytest.mark.parametrize("loops", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_a_cancelled_command_leaves_its_reply_to_nobody(run_url: str, seed: int, loops: Loops) -> None:
    with asyncio.Runner(loop_factory=loops) as runner:
        tally = runner.run(cancel_often(RunUrl.parse(run_url), seed))
    assert not tally.wrong, f"seed {seed}: {', '.join(tally.wrong)} got another's reply"
    assert tally.cancelled >= CANCELLED
    assert tally.answered >= CANCELLED // 2, "enough came through to notice"
