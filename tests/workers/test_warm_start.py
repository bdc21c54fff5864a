"""A joiner begins with the optimizer state of a peer (`--warm-start`), or is told why it does not."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest
import torch

import anabranch
from anabranch.errors import BlobMissing, UsageError
from anabranch.orchestrator.core.peers import WARM_STEPS
from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs, make_claim
from anabranch.queue.url import RunUrl
from anabranch.workers.member import warm_start
from anabranch.workers.member.line import Line
from anabranch.workers.member.warm_start import TRIES, WarmStart
from anabranch.workers.muon import Muon
from anabranch.workers.session import Session
from tests.harness import Bench, bench
from tests.wait import wait_until
from tests.workers.test_session import joined, spec_of, tiny, train_step, train_until


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def optimize(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@asynccontextmanager
async def stepping(session: Session) -> AsyncIterator[None]:
    """It comes to step boundaries; what it holds does not change by itself."""

    async def go() -> None:
        while True:
            await asyncio.to_thread(session.step, 8, 1.0)
            await asyncio.sleep(0.005)

    task = asyncio.create_task(go())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def known(run: Bench) -> int:
    """Steps of whoever has made most."""
    return max(member.steps for member in run.state.members.values())


async def warm_up(run: Bench, session: Session, model: torch.nn.Module) -> None:
    """The run is under way, and the worker's steps are known to it."""
    await train_until(session, model, run, 1)
    for _ in range(WARM_STEPS):
        train_step(session, model)
    await wait_until(lambda: known(run) >= WARM_STEPS, "the run knows of its steps")


@pytest.mark.parametrize("make", [adamw, Muon.of])
async def test_a_joiner_begins_with_a_peers_optimizer_state(
    run_url: str, run_name: str, make: Callable[[torch.nn.Module], torch.optim.Optimizer]
) -> None:
    first, second = tiny(1), tiny(2)
    its, ours = make(first), make(second)
    optimize(first, its, steps=5)
    async with (
        bench(run_url, spec_of(run_name)) as run,
        joined(run, "first", first, optimizer=its) as giver,
    ):
        await warm_up(run, giver, first)
        async with stepping(giver), joined(run, "second", second, optimizer=ours, warm_start=True) as joiner:
            assert joiner.warmth == 1.0, "no warm-up: its averages are those of a peer"
            for one, other in zip(first.parameters(), second.parameters(), strict=True):
                for key, value in its.state[one].items():
                    assert torch.equal(value, ours.state[other][key]), key
            await wait_until(lambda: run.tape("state given"), "it is on the tape")  # members hear it sooner
            assert run.tape("state asked")


async def test_the_first_worker_of_a_run_asks_nobody(run_url: str, run_name: str) -> None:
    model = tiny()
    async with bench(run_url, spec_of(run_name)) as run:
        async with joined(run, "w", model, optimizer=adamw(model), warm_start=True) as session:
            assert session.warmth == 1.0
        assert not run.tape("state asked")


async def test_without_a_peer_that_has_one_it_warms_up_by_itself(
    run_url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tiny(1), tiny(2)
    async with (
        bench(run_url, spec_of(run_name)) as run,
        joined(run, "first", first) as giver,
    ):
        await warm_up(run, giver, first)
        async with stepping(giver), joined(run, "second", second, optimizer=adamw(second), warm_start=True) as joiner:
            assert joiner.warmth == 0.05
    assert "was not given its optimizer" in caplog.text


async def test_another_kind_of_optimizer_is_no_use(
    run_url: str, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tiny(1), tiny(2)
    its = adamw(first)
    optimize(first, its, steps=1)
    sgd = torch.optim.SGD(second.parameters(), lr=1e-3, momentum=0.9)
    async with (
        bench(run_url, spec_of(run_name)) as run,
        joined(run, "first", first, optimizer=its) as giver,
    ):
        await warm_up(run, giver, first)
        async with stepping(giver), joined(run, "second", second, optimizer=sgd, warm_start=True) as joiner:
            assert joiner.warmth == 0.05
            assert not sgd.state
    assert "the peer's optimizer is" in caplog.text


def test_a_warm_start_needs_the_optimizer() -> None:
    with pytest.raises(UsageError, match="has to be given the optimizer"):
        anabranch.join("redis://127.0.0.1:1/0", tiny(), warm_start=True)


# --- by itself --------------------------------------------------------------------------------------------

OURS, PEER, OTHER = 7, 3, 4


class Blobs(RedisBlobs):
    """In memory."""

    def __init__(self) -> None:
        self.held: dict[str, memoryview] = {}

    async def put(self, owner: str, data: memoryview, codec: str, ttl_s: float) -> messages.Claim:
        claim = make_claim(owner, data, codec, secrets.token_hex(4))
        self.held[claim.id] = data
        return claim

    async def put_again(self, claim: messages.Claim, data: memoryview, ttl_s: float) -> None:
        self.held[claim.id] = data

    async def get(self, claim: messages.Claim, limit_bytes: int) -> memoryview:
        if claim.id not in self.held:
            raise BlobMissing(claim.id)
        return self.held[claim.id]

    async def refresh(self, claim: messages.Claim, ttl_s: float) -> bool:
        return claim.id in self.held

    async def delete(self, claim: messages.Claim) -> None:
        del self.held[claim.id]


class Desk:
    """A `WarmStart` with what it posts, and answers to it."""

    def __init__(self) -> None:
        self.blobs = Blobs()
        self.posted: list[messages.Message] = []
        line = replace(Line.to(RunUrl.parse("redis://127.0.0.1:1/0"), "us"), blobs=self.blobs)
        self.warm = WarmStart(line, OURS, self.post, lambda: None, wished=True)

    async def post(self, message: messages.Message) -> None:
        self.posted.append(message)

    def seek(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.warm.seek(1000), name="seek")

    def serve(self) -> asyncio.Task[None]:
        return asyncio.create_task(self.warm.serve(), name="serve")

    async def asked(self, times: int = 1) -> None:
        await wait_until(lambda: len(self.posted) >= times, f"it asked {times} times")

    def hear(self, message: messages.SendState | messages.PeerState) -> None:
        self.warm.heard(message)

    def wants(self) -> bool:
        """A copy of our state, as the training thread asks."""
        wanted, self.warm.wanted = self.warm.wanted, False
        return wanted


async def test_a_peer_that_never_answers_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_start, "PATIENCE_S", 0.05)
    desk = Desk()
    seeking = desk.seek()
    await desk.asked()
    desk.hear(messages.SendState(incarnation=PEER, to=OURS))
    await seeking
    requests = [message for message in desk.posted if isinstance(message, messages.StateRequest)]
    assert [r.not_from for r in requests] == [[], [], [PEER]], "it may have been busy once"
    assert len(requests) == TRIES
    assert desk.warm.over


async def test_when_nobody_can_be_asked_it_is_over() -> None:
    desk = Desk()
    seeking = desk.seek()
    await desk.asked()
    desk.hear(messages.PeerState(to=OURS, incarnation=0, reason="nobody"))
    await seeking
    assert desk.warm.over
    assert len(desk.posted) == 1


async def test_a_state_that_nobody_was_asked_for_is_not_taken() -> None:
    desk = Desk()
    seeking = desk.seek()
    await desk.asked()
    claim = await desk.blobs.put("evil", memoryview(b"evil"), "optimizer", 60.0)
    desk.hear(messages.PeerState(to=OURS, incarnation=OTHER, claim=claim))
    desk.hear(messages.SendState(incarnation=PEER, to=OTHER))
    desk.hear(messages.PeerState(to=OTHER, incarnation=PEER, claim=claim))
    good = await desk.blobs.put("peer", memoryview(b"good"), "optimizer", 60.0)
    desk.hear(messages.SendState(incarnation=PEER, to=OURS))
    desk.hear(messages.PeerState(to=OURS, incarnation=PEER, claim=good))
    await wait_until(lambda: desk.warm.arrived is not None, "a state arrived")
    assert bytes(desk.warm.arrived or b"") == b"good"
    desk.warm.tried(None)
    await seeking


async def test_what_could_not_be_fetched_or_used_is_asked_of_another() -> None:
    desk = Desk()
    seeking = desk.seek()
    gone = make_claim("peer", memoryview(b"gone"), "optimizer")
    useless = await desk.blobs.put("other", memoryview(b"useless"), "optimizer", 60.0)
    for number, (giver, claim) in enumerate([(PEER, gone), (OTHER, useless)], start=1):
        await desk.asked(number)
        desk.hear(messages.SendState(incarnation=giver, to=OURS))
        desk.hear(messages.PeerState(to=OURS, incarnation=giver, claim=claim))
    await wait_until(lambda: desk.warm.arrived is not None, "the second arrived")
    desk.warm.tried("it is of another optimizer")
    await desk.asked(3)
    assert desk.posted[-1] == messages.StateRequest(incarnation=OURS, not_from=[PEER, OTHER])
    seeking.cancel()


async def test_joiners_that_come_together_share_a_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    serving = desk.serve()
    desk.hear(messages.SendState(incarnation=OURS, to=PEER))
    assert desk.wants()
    desk.warm.give(lambda: memoryview(b"state"))
    await desk.asked(1)
    desk.hear(messages.SendState(incarnation=OURS, to=OTHER))
    await desk.asked(2)
    assert not desk.wants()
    one, other = desk.posted
    assert isinstance(one, messages.StateOffer)
    assert isinstance(other, messages.StateOffer)
    assert (one.to, other.to) == (PEER, OTHER)
    assert one.claim == other.claim
    monkeypatch.setattr(warm_start, "SHARED_S", 0.0)
    desk.hear(messages.SendState(incarnation=OURS, to=PEER))
    assert desk.wants(), "it is too old by now"
    desk.warm.give(lambda: memoryview(b"newer"))
    await desk.asked(3)
    newer = desk.posted[-1]
    assert isinstance(newer, messages.StateOffer)
    assert newer.claim is not None
    assert bytes(desk.blobs.held[newer.claim.id]) == b"newer"
    serving.cancel()


async def test_who_asks_during_an_upload_gets_the_same_payload() -> None:
    desk = Desk()
    serving = desk.serve()
    desk.hear(messages.SendState(incarnation=OURS, to=PEER))
    assert desk.wants()
    for joiner in (OTHER, 11, 12, PEER):
        desk.hear(messages.SendState(incarnation=OURS, to=joiner))
    assert not desk.wants(), "one copy is under way"
    desk.warm.give(lambda: memoryview(b"state"))
    await desk.asked(4)
    offers = [message for message in desk.posted if isinstance(message, messages.StateOffer)]
    assert sorted(offer.to for offer in offers) == [PEER, OTHER, 11, 12]
    assert len({offer.claim.id for offer in offers if offer.claim is not None}) == len(desk.blobs.held) == 1
    serving.cancel()


async def test_a_state_that_cannot_be_packed_or_uploaded_ends_nothing() -> None:
    desk = Desk()
    serving = desk.serve()
    desk.hear(messages.SendState(incarnation=OURS, to=PEER))

    def fails() -> memoryview:
        raise KeyError("complex")

    desk.warm.give(fails)
    await desk.asked()
    assert desk.posted[0] == messages.StateOffer(
        incarnation=OURS, to=PEER, reason="its state could not be uploaded (KeyError)"
    )
    desk.hear(messages.SendState(incarnation=OURS, to=PEER))
    assert desk.wants(), "the next one is tried again"
    serving.cancel()


async def test_why_there_is_nothing_to_give_is_said() -> None:
    desk = Desk()
    serving = desk.serve()
    desk.hear(messages.SendState(incarnation=OURS, to=PEER))
    desk.warm.give("SGD keeps no state")
    await desk.asked()
    assert desk.posted == [messages.StateOffer(incarnation=OURS, to=PEER, reason="SGD keeps no state")]
    serving.cancel()
