"""Running coroutines: uvloop where it exists (it writes large buffers several times faster), plain exceptions."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop, in whichever thread calls it."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def leaf(error: BaseException) -> BaseException:
    """The first exception in a group that is none: what a caller of ours expects to catch."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
