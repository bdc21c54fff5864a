"""Registering: ask for an incarnation and knock until there is an answer. In the I/O thread."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Awaitable, Callable

from anabranch.queue import messages

log = logging.getLogger("anabranch.worker")

REFUSED_HEARTBEATS = 6.0  # how long a passing refusal is waited for
JITTER = 0.75, 1.25  # of the time until it is asked again: many may have come at the same moment


class Registration:
    """One registration. Nothing is kept of it afterwards."""

    def __init__(
        self,
        request: messages.Register,
        heartbeat_s: float,
        post: Callable[[messages.Message], Awaitable[None]],
        listen: Callable[[], Awaitable[list[messages.Message]]],
    ) -> None:
        """`listen` knocks, and gives what was broadcast within a moment after that."""
        self._request = request
        self._heartbeat_s = heartbeat_s
        self._post = post
        self._listen = listen
        self._refused_at: float | None = None
        self._refused_s = 0.0

    async def answer(self) -> messages.Welcome | messages.Refused | messages.Stop:
        """What the synchronizer says to it. A refusal that may pass is waited for a while: whoever was killed and
        started again under its name has to outlive its former self, which ages only while somebody leads."""
        ask_at = 0.0
        while True:
            if time.monotonic() >= ask_at:
                await self._post(self._request)
                ask_at = time.monotonic() + self._heartbeat_s * random.uniform(*JITTER)
            for message in await self._listen():
                match message:
                    case messages.Welcome() if message.nonce == self._request.nonce:
                        return message
                    case messages.Stop():  # nobody may be left who could answer
                        return message
                    case messages.Refused() if message.nonce == self._request.nonce:
                        if self._is_final(message):
                            return message
                        log.debug("not let in yet: %s", message.reason)

    def _is_final(self, message: messages.Refused) -> bool:
        now = time.monotonic()
        if self._refused_at is not None:
            self._refused_s += min(now - self._refused_at, 2 * self._heartbeat_s)
        self._refused_at = now
        return not message.retry or self._refused_s > REFUSED_HEARTBEATS * self._heartbeat_s
