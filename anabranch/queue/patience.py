"""Repeating a command through outages: backoff with jitter, one log line per change of state."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from redis.exceptions import ResponseError

from anabranch.queue.connection import OUTAGE
from anabranch.queue.refusals import is_passing, words

FIRST_S, LONGEST_S = 0.05, 2.0
REPLY_S = 15.0  # a server that has not answered by then is out; blocking reads ask for far less
#: What may be worth waiting for; of a `ResponseError` only those that `is_passing`.
STALL = (*OUTAGE, ResponseError)

T = TypeVar("T")


class Outages:
    """What one process cannot do at the moment: many tasks meet the same outage, the log says it once."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._failing: dict[object, str] = {}
        self._noted: dict[str, str] = {}

    def __bool__(self) -> bool:
        return bool(self._failing)

    @property
    def why(self) -> str | None:
        """What the trouble is, in one sentence; None while there is none."""
        return next(iter([*self._failing.values(), *self._noted.values()]), None)

    def note(self, what: str, trouble: str | None) -> None:
        """Something that was looked at and found wrong, without a command that fails; None: it is well."""
        if trouble is None:
            if self._noted.pop(what, None) is not None:
                self._log.info("%s: well again", what)
        elif self._noted.get(what) != trouble:
            self._log.warning("%s", trouble)
            self._noted[what] = trouble

    def begin(self, who: object, what: str, error: BaseException, timeout_s: float | None) -> None:
        if not self._failing:
            self._log.warning("cannot %s: %s; trying again", what, str(error) or f"no answer in {timeout_s} s")
        self._failing[who] = words(error)

    def end(self, who: object, what: str) -> None:
        if who in self._failing:
            self._failing.pop(who)
            if not self._failing:
                self._log.info("can %s again", what)

    def forget(self, who: object) -> None:
        """Its task was cancelled or met another error."""
        self._failing.pop(who, None)


async def persist(
    action: Callable[[], Awaitable[T]],
    what: str,
    log: logging.Logger,
    *,
    timeout_s: float | None = REPLY_S,
    on_state: Callable[[bool], None] | None = None,
    outages: Outages | None = None,
    longest_s: float = math.inf,
) -> T:
    """Await `action()` until it gives a result. `on_state(True)` after one, `on_state(False)` after a stall.

    `outages` is shared by the tasks of a process, so that an outage is logged once. `longest_s`: between two tries
    (give or take a half), where that has to be less than `LONGEST_S`.

    `timeout_s` bounds each try (None: the action bounds itself). It is asyncio's timeout, not redis-py's
    `socket_timeout`: that one sends through `asyncio.wait_for`, which on Python 3.11 loses a cancellation that
    arrives in the same turn of the loop as its result, and then a loop of commands never ends.
    """
    known = outages if outages is not None else Outages(log)
    who, delay = object(), FIRST_S
    try:
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    result = await action()
            except STALL as error:
                if isinstance(error, ResponseError) and not is_passing(error):
                    raise
                known.begin(who, what, error, timeout_s)
                if on_state is not None:
                    on_state(False)
                await asyncio.sleep(delay * random.uniform(0.5, 1.5))
                delay = min(delay * 2, LONGEST_S, longest_s)
            else:
                known.end(who, what)
                if on_state is not None:
                    on_state(True)
                return result
    finally:
        known.forget(who)
