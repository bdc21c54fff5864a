"""Work that the core orders and that takes its time: payloads, merges, version 0. Each ends as an event."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from anabranch.errors import BlobMissing, LeadershipLost, PayloadError, ServerError
from anabranch.orchestrator.context import Context
from anabranch.orchestrator.core.events import Event, Fetched, FetchFailed, InitFailed, InitReady, Merged, Offer
from anabranch.orchestrator.core.instructions import Fetch, FetchInit, Instruction, Merge
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.vault import Newborn, Vault

log = logging.getLogger("anabranch.synchronizer")

FETCHES = 8  # payloads fetched at the same time


class Working:
    """One term's."""

    def __init__(self, context: Context, events: asyncio.Queue[Event], vault: Vault, state: State) -> None:
        """`state` is looked at, to leave out what nobody wants any more."""
        self._context = context
        self._events = events
        self._vault = vault
        self._state = state
        self._slots = asyncio.Semaphore(FETCHES)

    def begin(self, work: Instruction) -> None:
        match work:
            case Fetch(offer=offer):
                self._context.spawn(self._fetch(offer), "fetch")
            case Merge():
                self._context.spawn(self._merge(work), "merge")
            case FetchInit():
                self._context.spawn(self._birth_from_worker(work), "fetch version 0")

    def birth_from_file(self, path: Path) -> None:
        self._context.spawn(self._birth_from_file(path), "read --init")

    async def _fetch(self, offer: Offer) -> None:
        where = offer.message.incarnation, offer.sender, offer.entry
        async with self._slots:
            member = self._state.members.get(offer.message.incarnation)
            if member is None or offer.entry not in member.fetching:  # replaced while it waited for its turn
                return
            try:
                await self._context.persist(lambda: self._vault.fetch(offer), "fetch a contribution", bounded=False)
            except BlobMissing as error:
                self._events.put_nowait(FetchFailed(*where, str(error), gone=True))
            except PayloadError as error:
                self._events.put_nowait(FetchFailed(*where, str(error)))
            else:
                self._events.put_nowait(Fetched(*where))

    async def _merge(self, order: Merge) -> None:
        claim, reason = await self._context.persist(lambda: self._vault.merge(order), "merge", bounded=False)
        if order.round not in self._state.rounds:  # a new timeline began meanwhile
            self._vault.prepared.pop(order.round, None)
        self._events.put_nowait(Merged(order.round, claim, reason))

    async def _birth_from_worker(self, order: FetchInit) -> None:
        try:
            newborn = await self._context.persist(
                lambda: self._vault.take_init(order.message), "fetch version 0", bounded=False
            )
        except (LeadershipLost, ServerError):
            raise
        except Exception as error:  # whatever a member sent may not end the run
            log.debug("version 0 refused", exc_info=True)
            reason = str(error) or type(error).__name__
            self._events.put_nowait(InitFailed(order.incarnation, reason, order.entry))
            return
        self._prepare_birth(newborn, order.incarnation, order.entry)

    async def _birth_from_file(self, path: Path) -> None:
        newborn = await self._context.persist(lambda: self._vault.take_file(path), "upload version 0", bounded=False)
        self._prepare_birth(newborn, 0, None)

    def _prepare_birth(self, newborn: Newborn, incarnation: int, entry: bytes | None) -> None:
        layout, versions = self._vault.newborn = newborn
        self._events.put_nowait(
            InitReady(
                incarnation,
                layout.hash,
                tuple(fragment.size for fragment in layout.fragments),
                tuple(version.theta_claim.digest for version in versions),
                entry,
            )
        )
