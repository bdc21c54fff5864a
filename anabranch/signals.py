"""How a process is asked to end: the only place with signal handlers, for the command line alone.

SIGINT (Ctrl-C), SIGTERM and SIGHUP (the terminal is gone) are one wish: finish what is in flight and leave. A second
one ends the process at once, and with it every child. SIGHUP stays ignored where `nohup` says so.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def call_on_signals(ask: Callable[[str], None]) -> None:
    """`ask(name of the signal)` in the main thread, in the middle of whatever it does, from now on."""
    handle = _once(ask)
    for number in _numbers():
        signal.signal(number, lambda number, _frame: handle(number))


@contextmanager
def set_on_signals(ending: asyncio.Event) -> Iterator[None]:
    """Set `ending` in the running event loop, until the block ends."""
    loop, numbers, handle = asyncio.get_running_loop(), _numbers(), _once(lambda _: ending.set())
    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _numbers() -> list[signal.Signals]:
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def _once(ask: Callable[[str], None]) -> Callable[[int], None]:
    asked = False

    def handle(number: int) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        ask(signal.Signals(number).name)

    return handle
