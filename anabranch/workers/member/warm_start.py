"""Inner optimizer state from a peer (`--warm-start`): asking as a joiner, giving as a peer. In the I/O thread.

The training thread looks at `wanted` and `arrived` at its step boundaries, and answers with `give` and `tried`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

from anabranch.errors import PayloadError
from anabranch.queue import messages
from anabranch.workers.member.line import Line

log = logging.getLogger("anabranch.worker")

CODEC = "optimizer"  # of the payload: safetensors, see `optimizer_state`
TRIES = 3
PATIENCE_S = 20.0  # for one try: a peer answers at a step boundary, and uploads
SHARED_S = 30.0  # for so long a state is good enough for the next joiner, too
UPLOAD_S = 60.0  # what takes longer is not sent
TTL_S = 180.0  # of a payload, after it was uploaded
WAIT_S = 20.0  # a joiner waits at most so long before its first step
_MOST_REFUSALS = 16
_LATE = 2  # times without an answer until a peer is not asked again
_REASON_LIMIT = 300

Post = Callable[[messages.Message], Awaitable[None]]
Pack = Callable[[], memoryview]


def limit_bytes(parameters: int, tensors: int) -> int:
    """What a peer's state may have at most: four values of eight bytes per parameter, and a header."""
    return 32 * parameters + 4096 * tensors + 65_536


class WarmStart:
    """One incarnation's part in it."""

    def __init__(
        self, line: Line, incarnation: int, post: Post, on_change: Callable[[], None], *, wished: bool
    ) -> None:
        """`wished`: ask for a state when joining a run that is under way. `on_change` wakes the training thread."""
        self._line = line
        self._incarnation = incarnation
        self._post = post
        self.wanted = False  # a copy of our state, at the next boundary
        self.arrived: memoryview | None = None  # a peer's, to be tried at the next boundary
        self.over = not wished  # nothing will arrive any more
        self._on_change = on_change
        self._offers: asyncio.Queue[messages.PeerState] = asyncio.Queue()
        self._tried: asyncio.Queue[str | None] = asyncio.Queue()
        self._asked: dict[int, int] = {}  # incarnations that were asked on our behalf: times without an answer
        self._not_from: dict[int, None] = {}
        self._for: set[int] = set()  # incarnations that wait for ours
        self._busy = False  # from wanting a copy to the end of its upload
        self._claim: messages.Claim | None = None  # the last upload
        self._uploaded_at = 0.0
        self._work: asyncio.Queue[Pack | str | None] = asyncio.Queue()

    # --- as a joiner --------------------------------------------------------------------------------------

    def heard(self, message: messages.SendState | messages.PeerState) -> None:
        """What is broadcast about states, to whomever."""
        match message:
            case messages.SendState(to=to) if to == self._incarnation:
                self._asked.setdefault(message.incarnation, 0)
            case messages.SendState() if message.incarnation == self._incarnation:
                self._wish_of(message.to)
            case messages.PeerState(to=to, incarnation=peer) if to == self._incarnation and not self.over:
                if not peer or (peer in self._asked and peer not in self._not_from):
                    self._offers.put_nowait(message)

    async def seek(self, limit: int) -> None:
        """Until a peer's state of at most `limit` bytes was taken over, or nobody can help."""
        for _ in range(TRIES):
            not_from = list(self._not_from)[-_MOST_REFUSALS:]
            await self._post(messages.StateRequest(incarnation=self._incarnation, not_from=not_from))
            try:
                async with asyncio.timeout(PATIENCE_S):
                    offer = await self._offers.get()
            except TimeoutError:
                self._note_silence()
                continue
            if not offer.incarnation:
                log.info("no warm start: %s", offer.reason)
                break
            reason = await self._try(offer, limit)
            if reason is None:
                break
            log.warning("no warm start from incarnation %d: %s", offer.incarnation, reason)
            self._not_from[offer.incarnation] = None
        self.over = True
        self._on_change()

    def _note_silence(self) -> None:
        for peer in self._asked:
            self._asked[peer] += 1
            if self._asked[peer] >= _LATE:
                self._not_from[peer] = None

    async def _try(self, offer: messages.PeerState, limit: int) -> str | None:
        """Fetch and take over; why that did not work, if it did not."""
        if offer.claim is None:
            return offer.reason
        try:
            get = partial(self._line.blobs.get, offer.claim, limit)
            data = await self._line.persist(get, "fetch a peer's optimizer state", bounded=False)
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
        """One copy at a time: who asks meanwhile gets the same."""
        self._for.add(joiner)
        if self._busy:
            return
        self._busy = True
        if self._claim is not None and time.monotonic() - self._uploaded_at < SHARED_S:
            self._work.put_nowait(None)
        else:
            self.wanted = True
            self._on_change()

    def give(self, state: Pack | str) -> None:
        """What the training thread copied, to be packed elsewhere, or why there is nothing to copy."""
        self._work.put_nowait(state)

    async def serve(self) -> None:
        """Upload what joiners ask for, until cancelled."""
        while True:
            reason = await self._prepare()
            self._busy = False
            joiners, self._for = sorted(self._for), set()
            claim = self._claim if not reason else None
            for joiner in joiners:
                await self._post(
                    messages.StateOffer(incarnation=self._incarnation, to=joiner, claim=claim, reason=reason)
                )

    async def _prepare(self) -> str:
        """Have an upload ready; why there is none, if so. An older one expires: somebody may still fetch it."""
        state = await self._work.get()
        if state is None:
            return ""
        if isinstance(state, str):
            return state[:_REASON_LIMIT]
        try:
            async with asyncio.timeout(UPLOAD_S):  # and no second try: training does not depend on it
                data = await asyncio.to_thread(state)
                self._claim = await self._line.blobs.put(self._line.name, data, CODEC, TTL_S)
        except Exception as error:
            log.warning("our optimizer state could not be given to a joiner: %r", error)
            return f"its state could not be uploaded ({type(error).__name__})"
        self._uploaded_at = time.monotonic()
        return ""
