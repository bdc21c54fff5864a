"""Running coroutines: uvloop where it exists (it writes large buffers several times faster), plain exceptions."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def run_async(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on uvloop, in whichever thread calls it."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


async def in_daemon_thread(function: Callable[[], T]) -> T:
    """The result of `function`, run in a thread that does not hold up the end of the process.

    `asyncio.to_thread` would: its threads are waited for. Use this for work that may take long and whose half-done
    remains are harmless.
    """
    done: Future[T] = Future()
    done.set_running_or_notify_cancel()  # whoever waits may be cancelled, the work is not

    def work() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=work, name="anabranch work", daemon=True).start()
    return await asyncio.wrap_future(done)


def leaf(error: BaseException) -> BaseException:
    """The first exception in a group that is none: what a caller of ours expects to catch."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their end, even if we are cancelled meanwhile: what they use is closed next."""
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while pending := [task for task in tasks if not task.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    await asyncio.gather(*tasks, return_exceptions=True)  # their errors are seen
    if cancelled is not None:
        raise cancelled
