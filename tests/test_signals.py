"""Asking a process to end: three signals are one wish, a second one is an order."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from anabranch.signals import call_on_signals, set_on_signals
from tests.wait import PATIENCE_S, wait_until

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _handlers_are_put_back() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in ALL}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", ALL)
def test_each_of_them_asks(number: signal.Signals) -> None:
    asked: list[str] = []
    call_on_signals(asked.append)
    os.kill(os.getpid(), number)
    assert asked == [number.name]


@pytest.mark.parametrize("number", ALL)
async def test_each_of_them_sets_an_event(number: signal.Signals) -> None:
    ending = asyncio.Event()
    with set_on_signals(ending):
        os.kill(os.getpid(), number)
        await wait_until(ending.is_set, "it was heard")


@pytest.mark.parametrize(
    "install", ["call_on_signals(print)", "held = set_on_signals(asyncio.Event()); held.__enter__()"]
)
def test_the_second_one_ends_the_process_at_once(install: str) -> None:
    code = f"""
import asyncio, os, signal
from anabranch.signals import *

async def main():
    {install}
    for number in (signal.SIGHUP, signal.SIGTERM):
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.01)
    await asyncio.sleep(60)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=PATIENCE_S, capture_output=True)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


async def test_a_closed_terminal_means_nothing_under_nohup() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    asked: list[str] = []
    call_on_signals(asked.append)
    os.kill(os.getpid(), signal.SIGHUP)
    with set_on_signals(asyncio.Event()):
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    assert not asked
