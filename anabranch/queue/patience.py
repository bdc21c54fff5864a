"""Repeating a command through outages: backoff with jitter, one log line per change of state."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import ResponseError

from anabranch.queue.connection import OUTAGE, is_passing

FIRST_S, LONGEST_S = 0.05, 2.0
REPLY_S = 15.0  # a server that has not answered by then is out; blocking reads ask for far less
#: What may be worth waiting for; of a `ResponseError` only those that `is_passing`.
STALL = (*OUTAGE, ResponseError)

T = TypeVar("T")


async def persist(
    action: Callable[[], Awaitable[T]],
    what: str,
    log: logging.Logger,
    *,
    timeout_s: float | None = REPLY_S,
    on_state: Callable[[bool], None] | None = None,
) -> T:
    """Await `action()` until it gives a result. `on_state(True)` after one, `on_state(False)` after a stall.

    `timeout_s` bounds each try (None: the action bounds itself). It is asyncio's timeout, not redis-py's
    `socket_timeout`: that one sends through `asyncio.wait_for`, which on Python 3.11 loses a cancellation that
    arrives in the same turn of the loop as its result, and then a loop of commands never ends.
    """
    delay, failing = FIRST_S, False
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                result = await action()
        except STALL as error:
            if isinstance(error, ResponseError) and not is_passing(error):
                raise
            if not failing:
                log.warning("cannot %s: %s; trying again", what, str(error) or f"no answer in {timeout_s} s")
            failing = True
            if on_state is not None:
                on_state(False)
            await asyncio.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(delay * 2, LONGEST_S)
        else:
            if failing:
                log.info("can %s again", what)
            if on_state is not None:
                on_state(True)
            return result
