"""Inner optimizer state from a peer (`--warm-start`): asking as a joiner, giving as a peer. In the I/O thread.

The training thread looks at `wanted` and `arrived` at its step boundaries, and answers with `give` and `tried`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from anabranch.errors import PayloadError
from anabranch.queue import messages
from anabranch.queue.patience import Outages, persist

if TYPE_CHECKING:
    from anabranch.queue.blobs import BlobStore

log = logging.getLogger("anabranch.worker")

CODEC = "optimizer"  # of the payload: safetensors, see `optimizer_state`
TRIES = 3
PATIENCE_S = 20.0  # for one try: a peer answers at a step boundary, and uploads
SHARED_S = 30.0  # for so long a state is good enough for the next joiner, too
WAIT_S = 20.0  # a joiner waits at most so long before its first step
_MOST_REFUSALS = 16

Post = Callable[[messages.Message], Awaitable[None]]
Pack = Callable[[], memoryview]


def limit_bytes(parameters: int, tensors: int) -> int:
    """What a peer's state may have at most: four values of eight bytes per parameter, and a header."""
    return 32 * parameters + 4096 * tensors + 65_536


class WarmStart:
    """One member's part in it."""

    def __init__(self, wished: bool, on_change: Callable[[], None]) -> None:
        """`wished`: ask for a state when joining a run that is under way. `on_change` wakes the training thread."""
        self.wanted = False  # a copy of our state, at the next boundary
        self.arrived: memoryview | None = None  # a peer's, to be tried at the next boundary
        self.over = not wished  # nothing will arrive any more
        self._on_change = on_change
        self._offers: asyncio.Queue[messages.PeerState] = asyncio.Queue()
        self._tried: asyncio.Queue[str | None] = asyncio.Queue()
        self._asked: set[int] = set()  # incarnations that were asked on our behalf
        self._not_from: dict[int, None] = {}
        self._for: set[int] = set()  # incarnations that wait for ours
        self._given: tuple[messages.Claim, float] | None = None  # and when it was copied
        self._packs: asyncio.Queue[tuple[Pack | str, float]] = asyncio.Queue()

    # --- as a joiner --------------------------------------------------------------------------------------

    def heard(self, message: messages.SendState | messages.PeerState, incarnation: int) -> None:
        """What is broadcast about states, to whomever."""
        match message:
            case messages.SendState(to=to) if to == incarnation:
                self._asked.add(message.incarnation)
            case messages.SendState() if message.incarnation == incarnation:
                self._wish_of(message.to)
            case messages.PeerState(to=to) if to == incarnation and not self.over:
                if message.incarnation in self._asked or not message.incarnation:
                    self._offers.put_nowait(message)

    async def seek(self, incarnation: int, post: Post, blobs: BlobStore, limit: int, outages: Outages) -> None:
        """Until a peer's state was taken over, or nobody can help."""
        for _ in range(TRIES):
            not_from = list(self._not_from)[-_MOST_REFUSALS:]
            await post(messages.StateRequest(incarnation=incarnation, not_from=not_from))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    offer = await self._offers.get()
            except TimeoutError:
                self._not_from |= dict.fromkeys(self._asked)
                continue
            if not offer.incarnation:
                log.info("no warm start: %s", offer.reason)
                break
            reason = await self._try(offer, blobs, limit, outages)
            if reason is None:
                break
            log.warning("no warm start from incarnation %d: %s", offer.incarnation, reason)
            self._not_from[offer.incarnation] = None
        self.over = True
        self._on_change()

    async def _try(self, offer: messages.PeerState, blobs: BlobStore, limit: int, outages: Outages) -> str | None:
        """Fetch and take over; why that did not work, if it did not."""
        if offer.claim is None:
            return offer.reason
        try:
            get = partial(blobs.get, offer.claim, limit)
            data = await persist(get, "fetch a peer's optimizer state", log, timeout_s=None, outages=outages)
        except PayloadError as error:
            return str(error)
        self.arrived = data
        self._on_change()
        return await self._tried.get()

    def tried(self, reason: str | None) -> None:
        """What became of `arrived`: taken over (None), or why not."""
        self._tried.put_nowait(reason)

    # --- as a peer ----------------------------------------------------------------------------------------

    def _wish_of(self, joiner: int) -> None:
        self._for.add(joiner)
        if self._given is not None and time.monotonic() - self._given[1] < SHARED_S:
            self._packs.put_nowait(("", 0.0))
        elif not self.wanted:
            self.wanted = True
            self._on_change()

    def give(self, state: Pack | str) -> None:
        """What the training thread copied, to be packed elsewhere, or why there is nothing to copy."""
        self._packs.put_nowait((state, time.monotonic()))

    async def serve(
        self, name: str, incarnation: Callable[[], int], post: Post, blobs: BlobStore, ttl_s: float, outages: Outages
    ) -> None:
        """Upload what joiners ask for, until cancelled."""
        while True:
            state, copied_at = await self._packs.get()
            reason = ""
            if callable(state):
                await self._drop(blobs)
                data = await asyncio.to_thread(state)
                put = partial(blobs.put, name, data, CODEC, ttl_s)
                claim = await persist(put, "upload our optimizer state", log, timeout_s=None, outages=outages)
                self._given = claim, copied_at
            elif state:
                self._given, reason = None, state[:1000]
            joiners, self._for = sorted(self._for), set()
            for joiner in joiners:
                claim_ = self._given[0] if self._given is not None else None
                offer = messages.StateOffer(incarnation=incarnation(), to=joiner, claim=claim_, reason=reason)
                await post(offer)

    async def _drop(self, blobs: BlobStore) -> None:
        """The one before: whoever still fetches it will ask again."""
        if self._given is not None:
            claim, self._given = self._given[0], None
            await persist(partial(blobs.delete, claim), "drop an old optimizer state", log)
