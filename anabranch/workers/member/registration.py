"""Registering: ask for an incarnation and knock until there is an answer. In the I/O thread."""

from __future__ import annotations

import logging
import random
import secrets
import time
from dataclasses import dataclass

from anabranch._version import VERSION
from anabranch.errors import LayoutMismatch, MemberRefused
from anabranch.merge.fragments import Layout
from anabranch.queue import messages
from anabranch.queue.records import RunRecord
from anabranch.workers.member.broadcast import Broadcast
from anabranch.workers.member.identity import Identity
from anabranch.workers.member.line import Line
from anabranch.workers.member.telling import Waiting

log = logging.getLogger("anabranch.worker")

KNOCK_S = 0.25
REFUSED_HEARTBEATS = 6.0  # how long a passing refusal is waited for
JITTER = 0.75, 1.25  # of the time until it is asked again: many may have come at the same moment


@dataclass(frozen=True)
class Admission:
    """What an incarnation begins with. `broadcast`: read from before it was asked for."""

    number: int
    nonce: bytes
    record: RunRecord
    broadcast: Broadcast


class Registration:
    """One registration. Nothing but the `Admission` is kept of it afterwards."""

    def __init__(
        self, line: Line, record: RunRecord, identity: Identity, layout: Layout, waiting: Waiting | None = None
    ) -> None:
        self._waiting = waiting or Waiting()
        self._line = line
        self._record = record
        self._layout = layout
        self._nonce = secrets.token_bytes(16)  # tells two processes of one name apart, and two lives of one
        self._request = messages.Register(
            nonce=self._nonce,
            name=identity.name,
            label=identity.label,
            role=identity.role,
            layout_hash=layout.hash,
            can_init=identity.can_init,
            device=identity.device,
            release=VERSION,
        )
        self._broadcast = Broadcast(line)
        self._heartbeat_s = record.spec.workers.heartbeat_s
        self._refused_at: float | None = None
        self._refused_s = 0.0
        self._refused_by: object = None

    async def answer(self) -> Admission | messages.Stop:
        """What the synchronizer says to it. A refusal that may pass is waited for a while: whoever was killed and
        started again under its name has to outlive its former self, which ages only while somebody leads, and may
        begin to age anew with whoever takes the lead.

        Raises `MemberRefused`.
        """
        await self._broadcast.to_end()
        ask_at = 0.0
        while True:
            if time.monotonic() >= ask_at:
                await self._line.post(self._request, self._record.schema)
                ask_at = time.monotonic() + self._heartbeat_s * random.uniform(*JITTER)
            if self._refused_at is None:
                self._waiting.on(f"run {self._line.keys.run} lets us in; perhaps no synchronizer leads it now")
            for message in await self._knock():
                match message:
                    case messages.Welcome(incarnation=number) if message.nonce == self._nonce:
                        self._waiting.over()
                        log.info("joined run %s as %s, incarnation %d", self._line.keys.run, message.name, number)
                        return Admission(number, self._nonce, self._record, self._broadcast)
                    case messages.Stop():  # nobody may be left who could answer
                        return message
                    case messages.Refused() if message.nonce == self._nonce:
                        if self._is_final(message, await self._line.term()):
                            raise await refusal(self._line, self._layout, message)
                        longest_s = REFUSED_HEARTBEATS * self._heartbeat_s
                        self._waiting.on(f"{message.reason}. Whether that changes is looked at for {longest_s:.0f} s")

    async def _knock(self) -> list[messages.Message]:
        """Make the synchronizer look into our inbox, and read what it says soon after that."""
        line = self._line
        await line.persist(lambda: line.redis.publish(line.keys.knock, line.name), "knock")
        entries = await self._broadcast.read(int(KNOCK_S * 1000), "wait")
        if self._broadcast.cut_off:
            await self._broadcast.to_end()
        return [message for _, message in entries]

    def _is_final(self, message: messages.Refused, term: object) -> bool:
        now = time.monotonic()
        if term != self._refused_by:
            self._refused_by, self._refused_s = term, 0.0
        elif self._refused_at is not None:
            self._refused_s += min(now - self._refused_at, 2 * self._heartbeat_s)
        self._refused_at = now
        return not message.retry or self._refused_s > REFUSED_HEARTBEATS * self._heartbeat_s


async def refusal(line: Line, layout: Layout, message: messages.Refused) -> MemberRefused:
    """What the synchronizer said as an error, or better: which tensor is to blame."""
    record = await line.read_run()
    if record is not None and record.layout is not None:
        difference = layout.first_difference(record.layout)
        if difference is not None:
            return LayoutMismatch(f"this model is not the run's: {difference}")
    return MemberRefused(f"run {line.keys.run!r} refused {line.name!r}: {message.reason}")
