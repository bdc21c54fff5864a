"""Waiting for something to become true: the only place in the tests that sleeps."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

POLL_S = 0.01
PATIENCE_S = (
    60.0  # says nothing about speed: only a test that fails waits so long. Where speed is promised, measure it
)


async def wait_until(
    predicate: Callable[[], object] | Callable[[], Awaitable[object]], what: str, timeout_s: float = PATIENCE_S
) -> None:
    """Return once `predicate()`, plain or async, is true; AssertionError naming `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        outcome = predicate()
        if inspect.isawaitable(outcome):
            outcome = await outcome
        if outcome:
            return
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain until {what}")
        await asyncio.sleep(POLL_S)


def wait_until_sync(predicate: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
    """The same without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() >= deadline:
            raise AssertionError(f"waited {timeout_s:g} s in vain until {what}")
        time.sleep(POLL_S)
