"""Fault injection: named points in the code where a test may make the process die or fail.

In production `fail_at` is one dictionary look-up. A test arms a point in its own process with `armed`, or in a
child process through the environment: `ANABRANCH_FAIL_AT="before commit:3:kill"` kills with SIGKILL at the third
passage; `stop` freezes with SIGSTOP, `raise` raises `InjectedFault` instead.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from anabranch.errors import UsageError

POINTS = frozenset(
    {
        "after read",
        "after fetch",
        "after merge",
        "before commit",
        "after commit",
        "during checkpoint",
        "worker before upload",
        "worker after upload",
    }
)
VARIABLE = "ANABRANCH_FAIL_AT"

_armed: dict[str, Callable[[], None]] = {}


class InjectedFault(Exception):
    """Raised by an armed point; deliberately not an AnabranchError, so nothing handles it by accident."""


def fail_at(point: str) -> None:
    """Pass a named point; does nothing unless a test armed it."""
    if _armed and (action := _armed.get(point)) is not None:
        action()


@contextmanager
def armed(point: str, action: Callable[[], None] | None = None, *, passage: int = 1) -> Iterator[None]:
    """Arm `point` in this process: at the given passage call `action`, by default raise `InjectedFault`."""
    _armed[_known(point)] = _at_passage(passage, action or (lambda: _raise(point)))
    try:
        yield
    finally:
        _armed.pop(point, None)


def arm_from_environment(environment: Mapping[str, str] = os.environ) -> None:
    """Arm what `ANABRANCH_FAIL_AT` names; called once by the command line."""
    if text := environment.get(VARIABLE):
        point, _, rest = text.partition(":")
        passage, _, action = rest.partition(":")
        actions: dict[str, Callable[[], None]] = {
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "raise": lambda: _raise(point),
        }
        if not passage.isdecimal() or action not in actions:
            raise UsageError(f"{VARIABLE}={text!r}: expected 'point:passage:kill', ':stop' or ':raise'")
        _armed[_known(point)] = _at_passage(int(passage), actions[action])


def _at_passage(passage: int, action: Callable[[], None]) -> Callable[[], None]:
    seen = 0

    def act() -> None:
        nonlocal seen
        seen += 1
        if seen == passage:
            action()

    return act


def _known(point: str) -> str:
    if point not in POINTS:
        raise UsageError(f"fault point {point!r} is unknown; allowed: {', '.join(sorted(POINTS))}")
    return point


def _raise(point: str) -> None:
    raise InjectedFault(point)
