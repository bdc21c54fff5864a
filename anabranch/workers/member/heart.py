"""A member's heartbeats: what the training side measured, at least once per heartbeat, on a connection of its own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.workers.member.line import Line
from anabranch.workers.member.outbox import finite

FACTOR = 0.25  # of the step-time average
LEAST_S = 0.1  # reports are coalesced to 10 per second
_KEPT = 16  # entries of the stream
_TTL_S = 3600  # a stream nobody reads any more must not stay for ever


@dataclass
class Vitals:
    """What the training side measures and heartbeats carry. Written by the training side only."""

    step_s: float = 0.0
    loss: float | None = None
    train_s: float = 0.0
    rest_s: float = 0.0
    life_s: float = 0.0
    idle: bool = False  # no data is left for us
    heldout_loss: float | None = None
    measured_tokens: int = 0

    def stepped(self, whole_s: float) -> None:
        """A step took `whole_s`, from the end of the one before to its own."""
        self.step_s += (whole_s - self.step_s) * (FACTOR if self.step_s else 1.0)

    def fields(self) -> dict[str, Any]:
        """As a progress message has them. Called in the I/O thread."""
        losses = {"loss": finite(self.loss), "heldout_loss": finite(self.heldout_loss)}
        return {**vars(self), **losses, "memory_bytes": resident_bytes()}


def resident_bytes() -> int:
    """What this process has in memory now; 0 where the system does not say (it does on Linux)."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


class Heart:
    """Beats until cancelled."""

    def __init__(self, line: Line, message: Callable[[], bytes | None]) -> None:
        """`message` gives an envelope, or None while there is nothing to report."""
        self.beats = 0
        self.due = asyncio.Event()  # asks for a report before the next heartbeat
        self._line = line
        self._key = line.keys.progress(line.name)
        self._message = message

    async def beat(self, heartbeat_s: float) -> None:
        """Report at least once per heartbeat, at most ten times per second."""
        least_s = min(LEAST_S, heartbeat_s / 2)
        while True:
            started = time.monotonic()
            # Three heartbeats after an outage we are taken for gone: no longer may we hesitate.
            await self._line.persist(lambda: self.report(), "send a heartbeat", longest_s=heartbeat_s)
            await asyncio.sleep(max(0.0, least_s - (time.monotonic() - started)))
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, heartbeat_s * 0.9 - least_s)):
                    await self.due.wait()
            self.due.clear()

    async def report(self) -> None:
        """One report, now."""
        if (data := self._message()) is None:
            return
        await self._line.pulse.xadd(self._key, {"m": data}, maxlen=_KEPT, approximate=True)
        if self.beats % 64 == 0:
            await self._line.pulse.expire(self._key, _TTL_S)
        self.beats += 1
