"""What is sent lives until its outcome is known, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs, make_claim
from anabranch.queue.url import RunUrl
from anabranch.workers.member.books import Books
from anabranch.workers.member.learner import Outgoing
from anabranch.workers.member.line import Line
from anabranch.workers.member.outbox import Outbox
from tests.wait import wait_until

OURS = 7
TTL_S = 0.06  # refreshed every third of it


class Blobs(RedisBlobs):
    """In memory; counts how often each was refreshed."""

    def __init__(self, ttl_s: float) -> None:
        self.ttl_s = ttl_s
        self.held: dict[str, int] = {}
        self.uploading = asyncio.Event()
        self.may_upload = asyncio.Event()
        self.may_upload.set()

    async def put(self, owner: str, data: memoryview, codec: str, ttl_s: float) -> messages.Claim:
        self.uploading.set()
        await self.may_upload.wait()
        claim = make_claim(owner, data.cast("B"), codec)
        self.held[claim.id] = 0
        return claim

    async def refresh(self, claim: messages.Claim, ttl_s: float) -> bool:
        assert ttl_s == self.ttl_s
        self.held[claim.id] += 1
        return True

    async def delete(self, claim: messages.Claim) -> None:
        del self.held[claim.id]


class Desk:
    """An outbox, what it posts, and a worker that trains."""

    def __init__(self, ttl_s: float = TTL_S) -> None:
        self.blobs, self.books = Blobs(ttl_s), Books(1)
        self.posted: list[messages.Message] = []
        self.sent_bytes = 0
        self.books.adopt(0, 0)
        line = replace(Line.to(RunUrl.parse("redis://127.0.0.1:1/0"), "us"), blobs=self.blobs)
        self.outbox = Outbox(line, OURS, self.books, self.post, ttl_s, self.sent)

    async def post(self, message: messages.Message) -> None:
        self.posted.append(message)

    def sent(self, size: int) -> None:
        self.sent_bytes += size

    def contribute(self) -> None:
        self.books.step(10)
        snapshot = self.books.snapshot(0)
        assert self.books.send(0, snapshot)
        data = np.zeros(4, np.float32).data
        self.outbox.submit(Outgoing(0, 1, "0-x", b"d" * 32, snapshot, 1.5, data, "fp32"))

    def outcome(self, tokens: int, *, applied: bool = True) -> list[messages.Claim]:
        verdict = messages.Verdict(incarnation=OURS, fragment=0, base=0, applied=applied, tokens=tokens)
        return self.outbox.settle([verdict])


@asynccontextmanager
async def desk(ttl_s: float = TTL_S) -> AsyncIterator[Desk]:
    made = Desk(ttl_s)
    running = asyncio.create_task(made.outbox.run(), name="outbox")
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_payload_is_refreshed_until_its_outcome_and_then_deleted() -> None:
    async with desk() as it:
        it.contribute()
        await wait_until(lambda: list(it.blobs.held.values()) >= [3], "it is refreshed again and again")
        assert it.outbox.sent(0, 0)
        done = it.outcome(10)
        await it.outbox.discard(done)
        assert it.blobs.held == {}
        assert not it.outbox.sent(0, 0)
        assert it.outcome(10) == [], "told again"


async def test_a_payload_is_refreshed_at_least_twice_while_it_would_last(monkeypatch: pytest.MonkeyPatch) -> None:
    ttl_s, slept, sleep = 600.0, list[float](), asyncio.sleep

    async def soon(delay: float) -> None:
        if delay > 1.0:
            slept.append(delay)
        await sleep(min(delay, 0.001))

    monkeypatch.setattr(asyncio, "sleep", soon)
    async with desk(ttl_s) as it:
        it.contribute()
        await wait_until(lambda: list(it.blobs.held.values()) >= [3], "it is refreshed again and again")
    assert max(slept) <= ttl_s / 2


async def test_a_newer_contribution_takes_the_place_of_an_earlier_one() -> None:
    async with desk() as it:
        it.contribute()
        await it.outbox.flush()
        [first] = it.blobs.held
        it.contribute()
        await it.outbox.flush()
        assert len(it.posted) == 2
        assert first not in it.blobs.held
        assert len(it.blobs.held) == 1


async def test_what_was_merged_while_it_was_uploaded_is_not_sent() -> None:
    async with desk() as it:
        it.contribute()
        await it.outbox.flush()
        it.blobs.uploading.clear()
        it.blobs.may_upload.clear()
        it.contribute()
        await it.blobs.uploading.wait()
        await it.outbox.discard(it.outcome(10))
        it.blobs.may_upload.set()
        await it.outbox.flush()
        assert len(it.posted) == 1
        assert it.blobs.held == {}
        assert it.sent_bytes == 16


async def test_verdicts_of_others_change_nothing() -> None:
    async with desk() as it:
        it.contribute()
        await it.outbox.flush()
        verdict = messages.Verdict(incarnation=OURS + 1, fragment=0, base=0, applied=True, tokens=10)
        assert it.outbox.settle([verdict]) == []
        assert it.outbox.sent(0, 0)
