"""The synchronizer: stands by until it may lead, leads for one term after another, and ends in order.

It is crash-only: a term begins by loading everything from Redis, whether the process is new, was fenced by another
leader, or found that the server had been restarted. A term is a `Context`
(what it is given), then what was loaded, then `Leading`.
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

from anabranch.errors import (
    AnabranchError,
    CommandRefused,
    Fenced,
    LeadershipLost,
    SchemaMismatch,
    ServerChanged,
    ServerError,
    ServerUnfit,
)
from anabranch.loops import leaf
from anabranch.orchestrator import journal, tape
from anabranch.orchestrator.checkpoint import Checkpoints, Restored
from anabranch.orchestrator.clock import SteadyClock
from anabranch.orchestrator.context import Context
from anabranch.orchestrator.journal import Journal
from anabranch.orchestrator.leading import Leading
from anabranch.orchestrator.loading import load_run
from anabranch.orchestrator.tape import Tape
from anabranch.queue.connection import ServerLife, check_server, connect, look, unfit
from anabranch.queue.keys import Keys, fragment_field
from anabranch.queue.patience import REPLY_S, STALL, Outages, persist
from anabranch.queue.records import read_run
from anabranch.queue.refusals import NO_ANSWER
from anabranch.queue.scripts import FencedWriter, Holder
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.orchestrator.core.port import Core
    from anabranch.orchestrator.vault import Vault

log = logging.getLogger("anabranch.synchronizer")

T = TypeVar("T")

UNFIT_S = 1.0  # between two looks at a server that is not fit
QUICK_S = 10.0  # a term that ends sooner with a server that changed is waited after, from the third on
FIRST_WAIT_S, LONGEST_WAIT_S = 0.5, 30.0
SILENT_HEARTBEATS = 2.0  # without an answer: said within three
SILENT_LEAST_S = 0.5  # a read waits for up to 0.2 s
RELEASE_S = 2.0  # to give the lease back when ending; it runs out by itself otherwise
CHECKPOINTS = "checkpoints"  # folder in the run directory


class _Ended(Exception):
    """Unwinds a term's task group when the synchronizer is to end."""


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
        journal_mb: int = journal.DEFAULT_MB,
        tape_mb: int = tape.DEFAULT_MB,
    ) -> None:
        """`directory`: run directory for tape, journal and checkpoints; `checkpoints`: another folder or an fsspec
        URL for them; `init`: safetensors file with version 0; `journal_mb`: what the journal may grow to, 0: none;
        `tape_mb`: what the tape's files may, 0: without end."""
        self.url = url
        self.keys = Keys(url.run)
        self.clock = clock or SteadyClock()
        self.tape = Tape(directory, tape_mb * 2**20)
        self.journal = Journal(directory, journal_mb * 2**20) if directory is not None and journal_mb else None
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
        self.leading: Leading | None = None  # None: standby, loading, or between two terms
        self.fresh = True  # this process has neither led nor stood by
        self.saw_model = False  # the run was born: if the server holds none of it, that is a loss
        self._memory: Restored | None = None  # what we held when the server lost it
        self._lost = False  # the last term found that the server lost something, or was started again
        self._quick = 0  # terms that ended so one after another, each sooner than `QUICK_S`
        self._standing_still: str | None = None  # why no term begins
        self._ending = asyncio.Event()
        self._drain_s = 0.0

    @property
    def core(self) -> Core | None:
        """The decision core while leading."""
        return self.leading.core if self.leading is not None else None

    @property
    def vault(self) -> Vault | None:
        return self.leading.vault if self.leading is not None else None

    @property
    def hearing(self) -> bool:
        """Whether Redis answers."""
        return self.clock.hearing and not self._silent

    @property
    def trouble(self) -> str | None:
        """What keeps this process from leading or standing by, in one sentence; None if nothing does."""
        if self._standing_still is not None:
            return self._standing_still
        return self.outages.why or (NO_ANSWER if not self.hearing else None)

    @property
    def _silent(self) -> bool:
        """No answer for a while, though no command has failed yet (those wait longer)."""
        if self.leading is None:
            return False
        longest_s = SILENT_HEARTBEATS * self.leading.core.state.spec.workers.heartbeat_s
        return self.clock.silent_s > max(SILENT_LEAST_S, longest_s)

    async def run(self) -> None:
        """Stand by, lead, stand by again …, until `end` or a stop.

        Raises `ServerError` and `SpecError` at the start, `CheckpointError` when a run is lost for good.
        """
        async with AsyncExitStack() as stack:
            stack.callback(self.tape.close)
            if self.journal is not None:
                stack.callback(self.journal.close)
            redis = connect(self.url, name="anabranch-start")
            stack.push_async_callback(redis.aclose)
            await check_server(redis, self.url)
            await self._check_schema(redis)
            while not self._ending.is_set():
                began = self._loop_s()
                try:
                    await self._one_term()
                except Fenced as error:
                    log.warning("no longer leading: %s; standing by", error)
                except ServerUnfit as error:
                    log.error("%s; standing still until then", error)
                except ServerChanged as error:
                    log.error("%s: loading the run again", error)
                    await self._back_off(self._loop_s() - began)
                finally:
                    self.changed.set()

    @staticmethod
    def _loop_s() -> float:
        return asyncio.get_running_loop().time()

    async def _back_off(self, lasted_s: float) -> None:
        """A server that changes again and again is not written to as fast as it loses things."""
        self._quick = self._quick + 1 if lasted_s < QUICK_S else 1
        if self._quick < 3:
            return
        wait_s = min(FIRST_WAIT_S * 2 ** (self._quick - 3), LONGEST_WAIT_S)
        self._stand_still(
            f"the server lost what it acknowledged, or was started again, {self._quick} times in short order: "
            f"waiting up to {wait_s:g} s"
        )
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._ending.wait()
        self._stand_still(None)

    def _stand_still(self, why: str | None) -> None:
        if why != self._standing_still:
            if why is not None:
                log.error("%s", why)
            self._standing_still = why
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
            try:
                await self._lead(redis, life, writer, lease_s, stack)
            except LeadershipLost as error:
                if self.leading is not None:
                    self.saw_model = self.saw_model or self.leading.core.state.born
                    if isinstance(error, ServerChanged | ServerUnfit):
                        self._memory = self.leading.memory() or self._memory
                self._lost = self._lost or isinstance(error, ServerChanged)
                self.leading, self.fresh = None, False
                raise

    async def _lead(
        self, redis: Redis, life: ServerLife, writer: FencedWriter, lease_s: float, stack: AsyncExitStack
    ) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                context = Context(
                    url=self.url,
                    spec=self.spec,
                    init=self.init,
                    clock=self.clock,
                    tape=self.tape,
                    journal=self.journal,
                    checkpoints=self.checkpoints,
                    outages=self.outages,
                    stopped=self.stopped,
                    changed=self.changed,
                    fresh=self.fresh,
                    saw_model=self.saw_model,
                    lost=self._lost,
                    life=life,
                    redis=redis,
                    writer=writer,
                    stack=stack,
                    tasks=tasks,
                )
                context.spawn(self._end_term(), "watch for the end")
                context.spawn(self._keep_lease(context, lease_s), "keep lease")  # loading a large model outlasts it
                self.leading = Leading(context, await load_run(context, self._memory))
                self.leading.begin()
                self._memory, self._lost = None, False
        except BaseExceptionGroup as group:
            if not isinstance(leaf(group), _Ended):
                raise leaf(group) from group
            if self.leading is not None:
                await self.leading.part()

    async def _end_term(self) -> None:
        await self._ending.wait()
        if self.leading is not None:
            await self.leading.drain(self._drain_s)
        raise _Ended

    async def _keep_lease(self, context: Context, lease_s: float) -> None:
        while True:
            await asyncio.sleep(lease_s / 3)
            if self.leading is not None:  # the stored run may say another
                lease_s = self.leading.core.state.spec.leader.lease_s
            await context.persist(partial(context.writer.renew, lease_s), "renew the lease")

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

    async def _wait_until_fit(self, redis: Redis) -> None:
        """A server may come to be unfit at any time: then nobody leads, and nothing is written."""
        while (info := await self._persist(partial(look, redis))) and (reason := unfit(info)) is not None:
            self._stand_still(reason)
            await asyncio.sleep(UNFIT_S)
        if self._standing_still is not None:
            log.info("the server is fit again")
        self._stand_still(None)

    async def _stand_by(self, redis: Redis, writer: FencedWriter, lease_s: float) -> None:
        """Return once the lease is ours. The holder's renewals are awaited, not polled for."""

        async def acquire() -> Holder | None:
            return await writer.acquire(lease_s)

        await self._wait_until_fit(redis)
        while (holder := await self._persist(acquire)) is not None:
            self.fresh = False
            if self.standby_for != holder.owner:
                log.info("standby: run %s is led by %s", self.keys.run, holder.owner)
                self.standby_for = holder.owner
                self.changed.set()
            if not self.saw_model:
                self.saw_model = await self._persist(partial(self._is_born, redis))
            await asyncio.sleep(min(max(holder.left_s, 0.01), max(1.0, lease_s / 4)))
            await self._wait_until_fit(redis)
        self.standby_for = None
        log.info("leading run %s, epoch %d", self.keys.run, writer.epoch)

    async def _is_born(self, redis: Redis) -> bool:
        try:
            found: Any = await redis.hexists(self.keys.state, fragment_field(0))
        except CommandRefused as error:
            if error.code != "WRONGTYPE":
                raise
            return True  # something was there: whoever leads next finds out what
        return bool(found)

    async def _release(self, writer: FencedWriter) -> None:
        with suppress(LeadershipLost, ServerError, *STALL):
            async with asyncio.timeout(RELEASE_S):
                await writer.renew(0)

    async def _persist(self, action: Callable[[], Awaitable[T]]) -> T:
        return await persist(
            action,
            "take the lease",
            log,
            timeout_s=REPLY_S,
            on_state=self.clock.hear,
            outages=self.outages,
        )
