"""Workers without torch: numpy parameters, simulated steps. Fleets for tests and benchmarks are built from them.

`anabranch worker URL --task synthetic` runs one; `SyntheticWorker` runs hundreds in one process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np

from anabranch.errors import SpecError
from anabranch.loops import end_tasks
from anabranch.merge.fragments import Layout
from anabranch.model import Float32, layout_for
from anabranch.queue.url import RunUrl
from anabranch.shuffle import Indices
from anabranch.spec import RunSpec
from anabranch.workers.member.client import LEAVE_S, Client
from anabranch.workers.member.feed import Feed
from anabranch.workers.member.identity import Identity
from anabranch.workers.member.incarnation import Incarnation

IDLE_S = 0.005  # between two looks at the mailboxes while there is nothing to train


class NumpyStore:
    """A `ParameterStore` of plain arrays, one flat vector per fragment."""

    def __init__(self, layout: Layout, seed: int = 0) -> None:
        generator = np.random.default_rng(seed)
        self.theta = [generator.standard_normal(f.size).astype(np.float32) for f in layout.fragments]
        self.base = [theta.copy() for theta in self.theta]

    def delta(self, fragment: int) -> Float32:
        return self.base[fragment] - self.theta[fragment]

    def load(self, fragment: int, theta: Float32) -> None:
        self.base[fragment] = theta
        self.theta[fragment] = theta.copy()

    def blend(self, fragment: int, theta: Float32, alpha: float) -> bool:
        new: Float32 = (theta + np.float32(alpha) * (self.theta[fragment] - theta)).astype(np.float32)
        return self._replace(fragment, theta, new)

    def rebase(self, fragment: int, theta: Float32, applied: Float32 | None) -> bool:
        new = self.theta[fragment] - self.base[fragment] + theta
        return self._replace(fragment, theta, new if applied is None else new + applied)

    def _replace(self, fragment: int, base: Float32, live: Float32) -> bool:
        if not np.isfinite(live).all():
            return False
        self.base[fragment], self.theta[fragment] = base, live
        return True

    def initial(self, fragment: int) -> Float32:
        return self.theta[fragment]


@dataclass(frozen=True)
class SyntheticOptions:
    """`task.options` of a synthetic run: `tensors` of `size` elements each."""

    tensors: int = 8
    size: int = 1024

    @classmethod
    def parse(cls, options: Mapping[str, Any]) -> SyntheticOptions:
        for key, value in options.items():
            if key not in cls.__dataclass_fields__:
                raise SpecError(f"task.options.{key} = {value!r}: unknown key; allowed here: size, tensors")
            if type(value) is not int or value < 1:
                raise SpecError(f"task.options.{key} = {value!r}: must be a whole number of at least 1")
        return cls(**options)

    def layout(self, spec: RunSpec) -> Layout:
        return layout_for(spec, [(f"tensor.{i}", (self.size,)) for i in range(self.tensors)])


Train = Callable[[NumpyStore, int], float | None]
"""What one simulated step, of that number, does to `store.theta`; returns a loss or None."""


def decay(store: NumpyStore, step: int) -> float | None:
    """A quadratic bowl: θ shrinks towards zero, so the loss falls if merging works."""
    for theta in store.theta:
        theta *= np.float32(0.99)
    return float(np.mean([np.mean(np.square(theta)) for theta in store.theta]))


@dataclass(frozen=True)
class Pace:
    """How a synthetic worker behaves."""

    step_s: float = 0.01
    tokens: int = 64
    steps: int | None = None  # stop stepping after so many; None: until the run stops


@dataclass(frozen=True)
class SharedItems:
    """A dataset that the run hands out; each step takes a batch of it."""

    items: int
    batch: int
    took: Callable[[int, Indices], None]  # called with epoch and indices before they are trained on
    fingerprint: str = "5f" * 16


class SyntheticWorker:
    """A whole worker in a few coroutines: a client and a loop of simulated steps."""

    def __init__(
        self,
        url: RunUrl,
        name: str,
        pace: Pace | None = None,
        *,
        train: Train = decay,
        store: Callable[[Layout], NumpyStore] = NumpyStore,
        data: SharedItems | None = None,
        can_init: bool = True,
    ) -> None:
        self.client = Client(url, Identity(name, label="synthetic", device="none", can_init=can_init))
        self.store: NumpyStore | None = None
        self.ready = asyncio.Event()  # every fragment adopted
        self.step = 0
        self._pace = pace or Pace()
        self._train = train
        self._make_store = store
        self._data = data
        self._feed: Feed | None = None
        self._began = self._last = 0.0

    async def run(
        self,
        ending: Callable[[], bool] = lambda: False,
        *,
        drain_s: Callable[[], float] = lambda: LEAVE_S,
        on_joined: Callable[[], None] = lambda: None,
    ) -> None:
        """Join, take part until the run stops or `ending()`, say farewell (within `drain_s()`), and return."""
        async with AsyncExitStack() as stack:
            record = await self.client.open(stack)
            layout = record.layout or SyntheticOptions.parse(record.spec.task.options).layout(record.spec)
            self.store = self._make_store(layout)
            serving = asyncio.create_task(self.client.serve(record, self.store, layout), name="synthetic: serve")
            acting = asyncio.create_task(
                self._act(self.store, ending, drain_s, on_joined), name="synthetic: train and leave"
            )
            try:
                await asyncio.wait({serving, acting}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()
                    if not self.client.joined.is_set():  # the run ended before we were let in
                        return
                await acting  # it ends with the run
            finally:
                await end_tasks(serving, acting)

    async def _act(
        self,
        store: NumpyStore,
        ending: Callable[[], bool],
        drain_s: Callable[[], float],
        on_joined: Callable[[], None],
    ) -> None:
        """What the training side does, from joining to leaving."""
        await self.client.joined.wait()
        on_joined()
        await self._loop(store, ending)
        if (life := self.client.life) is not None and self.client.stopped is None:
            for last in life.learner.farewell():
                life.outbox.submit(last)
        await self.client.leave(self.client.stopped or "done", drain_s())

    async def _loop(self, store: NumpyStore, ending: Callable[[], bool]) -> None:
        """Steps on the event loop's time; boundaries as a training thread would have them."""
        client = self.client
        if self._data is not None and (life := client.life) is not None:
            seed, hungry = life.record.spec.seed, client.supply.hungry
            self._feed = Feed(self._data.items, self._data.fingerprint, seed, life.books, hungry)
            client.feed(self._feed)
        self._began = self._last = time.monotonic()
        while not ending() and client.stopped is None:
            if (life := client.life) is not None and client.joined.is_set():
                await self._turn(life, store)
            else:
                await asyncio.sleep(IDLE_S)

    async def _turn(self, life: Incarnation, store: NumpyStore) -> None:
        """A step, if there is one to make."""
        adopted = all(life.books.version(f) >= 0 for f in range(len(life.books)))
        if adopted:
            self.ready.set()
        more = adopted and (self._pace.steps is None or self.step < self._pace.steps)
        if more and self._take_data():
            await self._step(life, store)
        else:  # nothing adopted yet, or out of steps or data: still a member, it adopts and answers
            life.learner.boundary(self.client.vitals.loss, life.outbox.submit)
            await asyncio.sleep(IDLE_S)

    def _take_data(self) -> bool:
        """The next batch, if there is a dataset; False if there is nothing for us now."""
        if self._feed is None or self._data is None:
            return True
        items = self._feed.next(self._data.batch, 0.0)
        if items is not None:
            self._data.took(items.epoch, items.indices)
        idle = items is None and self._feed.idle
        if idle != self.client.vitals.idle:
            self.client.vitals.idle = idle
            self.client.progressed()
        return items is not None

    async def _step(self, life: Incarnation, store: NumpyStore) -> None:
        await asyncio.sleep(self._pace.step_s)
        loss = self._train(store, self.step)
        self.step += 1
        life.books.step(self._pace.tokens)
        now, vitals = time.monotonic(), self.client.vitals
        whole_s = now - self._last
        vitals.stepped(whole_s)
        vitals.train_s, vitals.life_s, vitals.loss = vitals.train_s + whole_s, now - self._began, loss
        self._last = now
        life.learner.boundary(loss, life.outbox.submit, self._pace.step_s)
        self.client.progressed()
