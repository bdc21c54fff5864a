"""Checkpoints of one term: begun at a moment, written beside everything else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from anabranch.errors import CheckpointError
from anabranch.orchestrator.checkpoint import Snapshot
from anabranch.orchestrator.context import Context
from anabranch.orchestrator.core.events import Event, Saved

NO_PLACE = "this synchronizer has no place for one; give it --dir or --checkpoints"


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
        self._said = ""

    def begin(self, command: str = "", *, last: bool = False) -> None:
        """A checkpoint of this moment, if there is a model and a place for it; the core hears of it as `Saved`."""
        task = self._context.spawn(self._save(self._snapshot(), command, last), "checkpoint")
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

    async def _save(self, snapshot: Snapshot | None, command: str, last: bool) -> None:
        checkpoints, where = self._context.checkpoints, ""
        reason = "there is no model yet" if snapshot is None else NO_PLACE
        if checkpoints is None or snapshot is None:
            if not command and not last:
                return  # nobody asked
        else:
            try:
                where = str(await checkpoints.write(snapshot))
            except (OSError, CheckpointError) as error:  # a full disk or an unreachable store must not stop training
                reason = str(error)
        if command or last or where != self._said:  # a moment that is saved already is said once
            self._events.put_nowait(Saved(where, reason, command, last))
        self._said = where
