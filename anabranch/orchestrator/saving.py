"""Checkpoints of one term: begun at a moment, written beside everything else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from anabranch.errors import CheckpointError
from anabranch.orchestrator.checkpoint import Snapshot
from anabranch.orchestrator.context import Context
from anabranch.orchestrator.core.events import Event, Troubled

log = logging.getLogger("anabranch.synchronizer")


class Saving:
    """See the module's docstring."""

    def __init__(
        self, context: Context, events: asyncio.Queue[Event], snapshot: Callable[[], Snapshot | None]
    ) -> None:
        """`snapshot`: this moment; None while there is no model."""
        self._context = context
        self._events = events
        self._snapshot = snapshot
        self._running: set[asyncio.Task[None]] = set()

    def begin(self, then: asyncio.Event | None = None) -> None:
        """A checkpoint of this moment, if there is a model and a place for it; then set `then`."""
        snapshot = self._snapshot() if self._context.checkpoints is not None else None
        task = self._context.spawn(self._save(snapshot, then), "checkpoint")
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def keep(self, every_s: float | None) -> None:
        """One every so often."""
        if every_s is not None:
            self._context.spawn(self._keep(every_s), "keep checkpoints")

    async def finish(self) -> None:
        """Wait for all that were begun."""
        while self._running:
            await asyncio.wait(self._running)

    async def _keep(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            self.begin()

    async def _save(self, snapshot: Snapshot | None, then: asyncio.Event | None) -> None:
        checkpoints = self._context.checkpoints
        if snapshot is not None and checkpoints is not None:
            try:
                log.info("%-10s %s", "checkpoint", await checkpoints.write(snapshot))
            except (OSError, CheckpointError) as error:  # a full disk or an unreachable store must not stop training
                self._events.put_nowait(Troubled(f"no checkpoint was written: {error}"))
        if then is not None:
            then.set()
