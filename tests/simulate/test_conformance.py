"""The live synchronizer and the engine are two drivers of one core: the same script, the same decisions and reasons.

A scene is played on the engine, and what its core was given is kept. Then a live synchronizer, on a real server and a
clock that the test moves, is sent the same messages at the same instants: its own streams, fetches, merges and timers
have to bring it to the same decisions, one by one. Weights and outer gradients are zeros, so that every version has
the same bits and the engine need not compute them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis.asyncio import Redis
from safetensors.numpy import save_file

from anabranch.model import layout_for
from anabranch.orchestrator.clock import SteadyClock
from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.port import Batch, Core
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.leading import Leading
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.orchestrator.tape import plain
from anabranch.queue import messages as msg
from anabranch.queue.blobs import RedisBlobs, make_claim
from anabranch.queue.connection import connect
from anabranch.queue.keys import SYNCHRONIZER, Keys
from anabranch.queue.url import RunUrl
from anabranch.simulate.engine import Engine
from anabranch.spec import RunSpec
from tests.harness import make_spec
from tests.orchestrator.bench import Bench
from tests.wait import wait_until

SIZE = 10
ZEROS = np.zeros(SIZE, np.float32)
TENSORS = {"a": (SIZE,), "b": (SIZE,)}


def zero_claim(owner: str) -> msg.Claim:
    return make_claim(owner, ZEROS.data.cast("B"), "fp32", "ab")


DIGEST = zero_claim(SYNCHRONIZER).digest


class Noted(Core):
    """A core that notes what it is given."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.given: list[tuple[float, ev.Event]] = []

    def step(self, event: ev.Event, now: float) -> None:
        self.given.append((now, event))
        super().step(event, now)


class Zeros(Bench):
    """A bench in which every version and every outer gradient is zeros."""

    def __init__(self, spec: RunSpec, timeline_nonce: str) -> None:
        self._nonce = timeline_nonce
        self._orders: list[do.Merge] = []
        super().__init__(spec, born=False)
        layout = layout_for(spec, list(TENSORS.items()))
        self.send(ev.InitReady(0, layout.hash, (SIZE, SIZE), (DIGEST, DIGEST)))

    def make_engine(self, state: State) -> Engine:
        state.nonce, state.init_given = self._nonce, True
        return Engine(state, self, Noted)

    def begin(self, work: do.Instruction) -> None:
        """Merges take no time."""
        if isinstance(work, do.Merge):
            self._orders.append(work)
            self.engine.at(self.now, self._merge_all)

    def send(self, event: ev.Event) -> list[do.Instruction]:
        mark = len(self.log)
        super().send(event)
        self._merge_all()
        return self.log[mark:]

    def _merge_all(self) -> None:
        orders, self._orders = self._orders, []
        for order in orders:
            self.merge(order)

    def offer(self, name: str, fragment: int = 0, *, entry: bytes | None = None, **changes: Any) -> ev.Offer:
        same = {"base_digest": DIGEST, "claim": zero_claim(name)}
        return super().offer(name, fragment, entry=entry, **{**same, **changes})

    def commit(self, order: do.Merge) -> list[do.Instruction]:
        return self.send(ev.Merged(order.round, zero_claim(SYNCHRONIZER)))

    @property
    def given(self) -> list[tuple[float, ev.Event]]:
        assert isinstance(self.engine.core, Noted)
        return self.engine.core.given


# --- scenes -----------------------------------------------------------------------------------------------


def quorum_and_grace(bench: Zeros) -> None:
    for name in ("ann", "bob"):
        bench.worker(name)
    bench.steps(ann=2, bob=2)
    bench.contribute("ann")
    bench.contribute("bob")
    bench.steps(ann=2, bob=2)
    bench.contribute("ann", 1)
    bench.elapse(1.0)  # the window ends without bob
    bench.contribute("bob", 1, base=0, round=2)  # late
    bench.contribute("ann", 0, base_digest=bytes(32))  # other bits than the run's


def death_and_farewell(bench: Zeros) -> None:
    for name in ("ann", "bob", "cid"):
        bench.worker(name)
    bench.steps(ann=2, bob=2, cid=2)
    bench.contribute("bob")
    bench.puppets["bob"].silent = True
    bench.elapse(4.0)  # bob is given up, what it sent is merged
    bench.contribute("ann")
    bench.elapse(1.0)
    bench.leave("cid", "done", figures=[{"processed": 300, "discarded": 0, "pending": 0}] * 2)
    del bench.puppets["cid"]
    bench.elapse(2.0)
    bench.join("bob", life=2)
    bench.elapse(1.0)


def operators(bench: Zeros) -> None:
    bench.worker("ann")
    bench.command("pause", by="a test")
    bench.steps(ann=4)
    bench.command("set", "rounds.quorum", 2)
    bench.command("set", "rounds.nonsense", 2)
    bench.command("resume")
    bench.elapse(12.0)  # below its quorum a round is abandoned at its deadline
    bench.command("set", "rounds.quorum", 1)
    bench.steps(ann=2)
    for round_ in list(bench.state.rounds.values()):
        bench.contribute("ann", round_.fragment)


SCENES: dict[str, Callable[[Zeros], None]] = {
    scene.__name__: scene for scene in (quorum_and_grace, death_and_farewell, operators)
}


# --- the same, live ---------------------------------------------------------------------------------------


class HandClock(SteadyClock):
    """Moves when the test says so."""

    def tick(self) -> float:
        return self._now

    def move(self, now: float) -> None:
        assert now >= self._now
        self._now = now


class Live:
    """A leading synchronizer that is sent what the engine's core was given."""

    def __init__(self, leading: Leading, clock: HandClock, redis: Redis, keys: Keys) -> None:
        self.said: list[do.Instruction] = []
        self.steps: list[ev.Event] = []
        self._leading, self._clock, self._redis, self._keys = leading, clock, redis, keys
        step, take = leading.core.step, leading.core.take

        def noted_step(event: ev.Event, now: float) -> None:
            step(event, now)
            self.steps.append(event)

        def noted_take(*, everything: bool = False) -> Batch | None:
            batch = take(everything=everything)
            self.said += batch.instructions if batch is not None else ()
            return batch

        leading.core.step, leading.core.take = noted_step, noted_take  # type: ignore[method-assign]

    async def follow(self, script: list[tuple[float, ev.Event]]) -> None:
        fired: Counter[ev.TimerFired] = Counter()
        for now, event in script:
            match event:
                case ev.Heard():
                    self._clock.move(now)
                    await self._send(event)
                case ev.TimerFired():
                    fired[event] += 1  # two that are due at once fire together
                    self._clock.move(now)
                    await wait_until(lambda e=event: self._count(e) >= fired[e], f"{event} at {now}")
                case _:  # its own fetches and merges bring it there
                    continue
            await wait_until(self._rests, f"{event!r:.80} is dealt with")

    async def _send(self, event: ev.Heard) -> None:
        sender, message = event.sender, event.message
        stream = self._keys.progress(sender) if not event.entry else self._keys.contributions(sender)
        stream = stream if sender else self._keys.control
        if isinstance(message, msg.Contribution):
            await RedisBlobs(self._redis, self._keys).put_again(message.claim, ZEROS.data.cast("B"), 600.0)
        before = self._count(event)
        await self._redis.xadd(stream, {"m": msg.encode(message, self._keys.run)}, id=event.entry or b"*")

        async def heard() -> bool:
            await self._redis.publish(self._keys.knock, sender)
            return self._count(event) > before

        await wait_until(heard, f"{message.type} of {sender} is heard")

    def _count(self, event: ev.Event) -> int:
        """How often the core was given this."""
        return sum(step == event for step in self.steps)

    def _rests(self) -> bool:
        core, state = self._leading.core, self._leading.core.state
        merging = any(round_.stage == "merging" for round_ in state.rounds.values())
        return not (self._leading._events.qsize() or core._out or core._said or state.verifying or merging)


@asynccontextmanager
async def live(run_url: str, spec: RunSpec, tmp_path: Path) -> AsyncIterator[Live]:
    init = tmp_path / "zeros.safetensors"
    save_file({name: np.zeros(shape, np.float32) for name, shape in TENSORS.items()}, init)
    url, clock = RunUrl.parse(run_url), HandClock()
    synchronizer = Synchronizer(url, spec, init=init, clock=clock)
    task = asyncio.create_task(synchronizer.run(), name="synchronizer")
    redis = connect(url, name="test")
    try:
        await wait_until(lambda: synchronizer.leading is not None, "it leads")
        assert synchronizer.leading is not None
        made = Live(synchronizer.leading, clock, redis, Keys(url.run))
        await wait_until(lambda: synchronizer.leading.core.state.born and made._rests(), "it is born")
        made.said.clear()  # from here on both begin alike
        yield made
    finally:
        synchronizer.end()
        await task
        await redis.aclose()


def shown(instructions: list[do.Instruction]) -> list[tuple[str, Any]]:
    """What was decided, and why; where payloads lie is each driver's own."""
    return [(type(i).__name__, plain(i)) for i in instructions]


@pytest.mark.parametrize("scene", sorted(SCENES))
async def test_the_same_script_live_and_in_virtual_time(
    run_url: str, run_name: str, tmp_path: Path, scene: str
) -> None:
    spec = make_spec(
        run_name,
        rounds={"fragments": 2, "inner_steps": 4, "quorum": 1, "deadline_min_s": 10.0},
        workers={"codec": "fp32", "heartbeat_s": 1.0},
        leader={"lease_s": 60.0},
    )
    async with live(run_url, spec, tmp_path) as driver:
        bench = Zeros(spec, driver._leading.core.state.nonce)
        begun = len(bench.log)
        SCENES[scene](bench)
        await driver.follow(bench.given)
        decided, expected = shown(driver.said), shown(bench.log[begun:])
        for number, (ours, theirs) in enumerate(zip(decided, expected, strict=False)):
            assert ours == theirs, f"decision {number}"
        assert len(decided) == len(expected) > 30
