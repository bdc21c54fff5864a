"""What runs beside the loop, and what ends with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from anabranch.loops import end_tasks, in_daemon_thread, leaf
from tests.wait import PATIENCE_S


async def test_the_result_comes_back() -> None:
    assert await in_daemon_thread(threading.current_thread) is not threading.current_thread()


async def test_an_error_comes_back_as_itself() -> None:
    def fails() -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        await in_daemon_thread(fails)


async def test_who_is_cancelled_does_not_wait() -> None:
    release = threading.Event()
    task = asyncio.create_task(in_daemon_thread(release.wait), name="waiting")
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()


def test_it_does_not_hold_up_the_end_of_the_process() -> None:
    code = (
        "import asyncio, threading\n"
        "from anabranch.loops import in_daemon_thread, run_async\n"
        "async def main():\n"
        "    asyncio.create_task(in_daemon_thread(threading.Event().wait))\n"
        "    await asyncio.sleep(0)\n"
        "run_async(main())\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S, check=False).returncode == 0


def test_the_leaf_of_nested_groups_is_the_first_plain_error() -> None:
    inner = ValueError("here")
    assert leaf(ExceptionGroup("outer", [ExceptionGroup("middle", [inner]), OSError()])) is inner


async def test_tasks_have_ended_even_if_we_are_cancelled_while_we_wait() -> None:
    ended = []

    async def slow_to_end(name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):
                await asyncio.sleep(0)
            ended.append(name)

    tasks = [asyncio.create_task(slow_to_end(name)) for name in ("a", "b")]
    await asyncio.sleep(0)
    ending = asyncio.create_task(end_tasks(*tasks))
    await asyncio.sleep(0)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert ended == ["a", "b"]
