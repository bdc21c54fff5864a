"""The synchronizer: stands by until it may lead, leads for one term after another, and ends in order.

It is crash-only: a term begins by loading everything from Redis, whether the process is new, was fenced by another
leader, or found that the server had been restarted. What happens within a term is in `term.py`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from anabranch.errors import AnabranchError, Fenced, LeadershipLost, SchemaMismatch, ServerChanged
from anabranch.loops import leaf
from anabranch.orchestrator.checkpoint import Checkpoints, Restored
from anabranch.orchestrator.clock import SteadyClock
from anabranch.orchestrator.tape import Tape
from anabranch.orchestrator.term import Term, TermEnded
from anabranch.queue.connection import OUTAGE, ServerLife, check_server, connect
from anabranch.queue.keys import Keys, fragment_field
from anabranch.queue.patience import REPLY_S, STALL, Outages, persist
from anabranch.queue.records import read_run
from anabranch.queue.scripts import FencedWriter, Holder
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.orchestrator.core import Core
    from anabranch.orchestrator.vault import Vault

log = logging.getLogger("anabranch.synchronizer")

T = TypeVar("T")

RELEASE_S = 2.0  # to give the lease back when ending; it runs out by itself otherwise
CHECKPOINTS = "checkpoints"  # folder in the run directory


class Synchronizer:
    """Leads one run, or stands by while another process does."""

    def __init__(
        self,
        url: RunUrl,
        spec: RunSpec | None = None,
        *,
        directory: Path | None = None,
        init: Path | None = None,
        clock: SteadyClock | None = None,
        checkpoints: str | None = None,
    ) -> None:
        """`directory`: run directory for tape and checkpoints; `checkpoints`: another folder or an fsspec URL for
        them; `init`: safetensors file with version 0."""
        self.url = url
        self.keys = Keys(url.run)
        self.clock = clock or SteadyClock()
        self.tape = Tape(directory)
        self.owner = secrets.token_hex(8)
        self.standby_for: str | None = None
        self.stopped = asyncio.Event()  # the run was stopped by an operator and everything is stored
        self.changed = asyncio.Event()  # something happened: pages refresh
        self.outages = Outages(log)
        self.spec = spec
        self.init = init
        keep = (spec or RunSpec()).checkpoint.keep
        where = checkpoints or (str(directory / CHECKPOINTS) if directory is not None else None)
        self.checkpoints = Checkpoints(where, keep) if where is not None else None
        self.term: Term | None = None  # None: standby, or between two terms
        self.fresh = True  # this process has neither led nor stood by
        self.saw_model = False  # the run was born: if the server holds none of it, that is a loss
        self._memory: Restored | None = None  # what we held when the server lost it
        self._hearing = True
        self._ending = asyncio.Event()
        self._drain_s = 0.0

    @property
    def core(self) -> Core | None:
        """The decision core while leading."""
        return self.term.core if self.term is not None else None

    @property
    def vault(self) -> Vault | None:
        return self.term.vault if self.term is not None else None

    @property
    def hearing(self) -> bool:
        """Whether Redis answers."""
        return self._hearing and (self.term is None or self.term.hearing)

    async def run(self) -> None:
        """Stand by, lead, stand by again …, until `end` or a stop.

        Raises `ServerError` and `SpecError` at the start, `CheckpointError` when a run is lost for good.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self.tape.close)
            redis = connect(self.url, name="anabranch-start")
            stack.push_async_callback(redis.aclose)
            await check_server(redis, self.url)
            await self._check_schema(redis)
            while not self._ending.is_set():
                try:
                    await self._one_term()
                except Fenced as error:
                    log.warning("no longer leading: %s; standing by", error)
                except ServerChanged as error:
                    log.error("%s: loading the run again", error)
                finally:
                    self.changed.set()

    async def _check_schema(self, redis: Redis) -> None:
        """`SchemaMismatch` for a run of a release too new or too old: now, not when this standby is needed."""
        try:
            async with asyncio.timeout(REPLY_S):
                await read_run(redis, self.keys)
        except SchemaMismatch:
            raise
        except (AnabranchError, *STALL) as error:  # loading the run deals with it
            log.debug("the run's definition cannot be read yet: %s", error)

    def end(self, drain_s: float = 0.0) -> None:
        """Ask `run` to return, within `drain_s` after what is being merged and saved is stored.

        What was decided but not stored is decided again by whoever leads next.
        """
        self._drain_s = drain_s
        self._ending.set()

    async def _one_term(self) -> None:
        """From standing by to the end of leading; returns when `end` was called."""
        async with AsyncExitStack() as stack:
            life = ServerLife()
            redis = connect(self.url, name="anabranch-leader", life=life)
            stack.push_async_callback(redis.aclose)
            writer = FencedWriter(redis, self.keys, self.owner)
            lease_s = (self.spec or RunSpec()).leader.lease_s
            try:
                if not await self._lead_unless_ending(redis, writer, lease_s):
                    return
            except ServerChanged:  # while standing by, where nothing is at stake
                return
            stack.push_async_callback(self._release, writer)
            self.term = Term(self, redis, life, writer, lease_s, self._memory)
            try:
                await self._lead(self.term, stack)
            except LeadershipLost as error:
                self.saw_model = self.saw_model or (self.core is not None and self.core.state.born)
                if isinstance(error, ServerChanged):
                    self._memory = self.term.memory() or self._memory
                self.term, self.fresh = None, False
                raise

    async def _lead(self, term: Term, stack: AsyncExitStack) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._end_term(term), name="synchronizer: watch for the end")
                await term.lead(tasks, stack)
                self._memory = None
        except BaseExceptionGroup as group:
            if not isinstance(leaf(group), TermEnded):
                raise leaf(group) from group
            await term.part()

    async def _end_term(self, term: Term) -> None:
        await self._ending.wait()
        await term.drain(self._drain_s)
        raise TermEnded

    async def _lead_unless_ending(self, redis: Redis, writer: FencedWriter, lease_s: float) -> bool:
        """Whether we lead; False if `end` was called first (a standby's outage must not hold up its end)."""
        leading = asyncio.create_task(self._stand_by(redis, writer, lease_s), name="synchronizer: take the lease")
        ending = asyncio.create_task(self._ending.wait(), name="synchronizer: watch for the end")
        try:
            await asyncio.wait({leading, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not leading.done():
                return False
            leading.result()
            return True
        finally:
            for task in (leading, ending):
                task.cancel()
            await asyncio.gather(leading, ending, return_exceptions=True)

    async def _stand_by(self, redis: Redis, writer: FencedWriter, lease_s: float) -> None:
        """Return once the lease is ours. The holder's renewals are awaited, not polled for."""

        async def acquire() -> Holder | None:
            return await writer.acquire(lease_s)

        while (holder := await self._persist(acquire)) is not None:
            self.fresh = False
            if self.standby_for != holder.owner:
                log.info("standby: run %s is led by %s", self.keys.run, holder.owner)
                self.standby_for = holder.owner
                self.changed.set()
            if not self.saw_model:
                self.saw_model = await self._persist(partial(self._is_born, redis))
            await asyncio.sleep(min(max(holder.left_s, 0.01), max(1.0, lease_s / 4)))
        self.standby_for = None
        log.info("leading run %s, epoch %d", self.keys.run, writer.epoch)

    async def _is_born(self, redis: Redis) -> bool:
        found: Any = await redis.hexists(self.keys.state, fragment_field(0))
        return bool(found)

    async def _release(self, writer: FencedWriter) -> None:
        with suppress(LeadershipLost, *OUTAGE):
            async with asyncio.timeout(RELEASE_S):
                await writer.renew(0)

    async def _persist(self, action: Callable[[], Awaitable[T]]) -> T:
        return await persist(
            action,
            "take the lease",
            log,
            timeout_s=REPLY_S,
            on_state=self._set_hearing,
            outages=self.outages,
        )

    def _set_hearing(self, hearing: bool) -> None:
        self._hearing = hearing
