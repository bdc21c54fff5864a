"""What a term of leading is given: frozen, so that nothing of one term reaches into another."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from redis.asyncio import Redis

from anabranch.orchestrator.checkpoint import Checkpoints
from anabranch.orchestrator.clock import SteadyClock
from anabranch.orchestrator.journal import Journal
from anabranch.orchestrator.tape import Tape
from anabranch.queue.connection import ServerLife, connect
from anabranch.queue.keys import Keys
from anabranch.queue.patience import REPLY_S, Outages, persist
from anabranch.queue.scripts import FencedWriter
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

log = logging.getLogger("anabranch.synchronizer")

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """One term's surroundings. The first ones outlive it; connections and tasks are its own."""

    url: RunUrl
    spec: RunSpec | None
    init: Path | None
    clock: SteadyClock
    tape: Tape
    journal: Journal | None
    checkpoints: Checkpoints | None
    outages: Outages
    stopped: asyncio.Event  # the run was stopped by an operator and everything is stored
    changed: asyncio.Event  # something happened: pages refresh
    fresh: bool  # this process has neither led nor stood by
    saw_model: bool  # the run was born: if the server holds none of it, that is a loss
    lost: bool  # the term before this one found that the server lost writes, or was started again
    life: ServerLife
    redis: Redis
    writer: FencedWriter
    stack: AsyncExitStack  # closes what the term opens
    tasks: asyncio.TaskGroup

    @property
    def keys(self) -> Keys:
        return Keys(self.url.run)

    def open(self, name: str) -> Redis:
        """A connection of its own, to this life of the server only."""
        redis = connect(self.url, name=f"anabranch-{name}", life=self.life)
        self.stack.push_async_callback(redis.aclose)
        return redis

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self.tasks.create_task(work, name=f"synchronizer: {name}")

    async def persist(
        self, action: Callable[[], Awaitable[T]], what: str, *, reading: bool = False, bounded: bool = True
    ) -> T:
        """Await an action through outages. `reading`: of the streams, without which the clock stands still;
        `bounded` False: payloads, which bound themselves chunk by chunk."""
        return await persist(
            action,
            what,
            log,
            timeout_s=REPLY_S if bounded else None,
            on_state=self.clock.hear if reading else None,
            outages=self.outages,
        )
