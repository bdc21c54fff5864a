"""What a torch training loop calls. The training thread never blocks on the network.

A background thread owns every connection; snapshots and adoptions happen only inside `Session.step` (and while a
duty cycle rests), at step boundaries::

    session = anabranch.join(url, model, optimizer)   # adopts the global model
    for batch in session.batches(loader):
        loss = ...; loss.backward(); optimizer.step(); optimizer.zero_grad()
        session.step(tokens=batch.numel(), loss=loss)  # snapshot and adopt here, never waits
    session.close()
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from types import TracebackType
from typing import Literal, Self, SupportsInt, TypeVar, cast

import torch

from anabranch.errors import LayoutMismatch, MemberRefused, StateUnusable, UsageError
from anabranch.loops import run_async
from anabranch.merge.fragments import Layout
from anabranch.queue.messages import MOST_TOKENS
from anabranch.queue.records import RunRecord
from anabranch.queue.url import URL_VARIABLE, RunUrl
from anabranch.workers.adapters import check_adapters
from anabranch.workers.checked import STEP_TOKENS, one_value, real, whole
from anabranch.workers.copies import Adopter, OnAdopt, adopter_for
from anabranch.workers.member.client import LEAVE_S, Client
from anabranch.workers.member.feed import Feed
from anabranch.workers.member.identity import Identity, default_name
from anabranch.workers.member.incarnation import Incarnation
from anabranch.workers.member.learner import Outgoing, Refusal
from anabranch.workers.member.warm_start import WAIT_S, Pack, WarmStart
from anabranch.workers.shards import Shards
from anabranch.workers.tensors import Buffer, buffers_of, layout_of, trainable
from anabranch.workers.torch_store import TorchStore
from anabranch.workers.watching import Watch

log = logging.getLogger("anabranch.worker")

LOSS_EVERY_S = 0.5  # reading a loss from a GPU waits for it
JOIN_POLL_S = 0.05
DATA_POLL_S = 0.05  # between two looks for calls and versions while there is no data
REWARM_STEPS = 20
EXTRA_S = 1.0  # for the background thread to end after it has left

T = TypeVar("T")


class Companion:
    """Who goes along with a session and has to know what it does at its step boundaries; this one does not care."""

    def adopted(self, fragments: list[int]) -> None:
        """These have new parameters."""

    def may_take_over(self) -> bool:
        """Whether a peer's optimizer state may still replace ours."""
        return True

    def took_over(self, state: memoryview) -> None:
        """A peer's optimizer state is ours now."""


class Session:
    """One worker's (or evaluator's) part in a run. Create it with `join`."""

    def __init__(
        self,
        url: str | RunUrl | None,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        name: str | None = None,
        label: str = "",
        role: Literal["worker", "evaluator"] = "worker",
        device: str = "",
        duty: float = 1.0,
        offload_base: bool = False,
        warm_start: bool = False,
        timeout_s: float = math.inf,
        on_adopt: OnAdopt | None = None,
        can_init: bool = True,
        companion: Companion | None = None,
    ) -> None:
        """Prepare; `start` joins. Options are those of `anabranch.join`; `warm_start` needs `optimizer`. `can_init`:
        whether this model may become version 0. `companion`: told what happens at step boundaries, in the training
        thread."""
        if warm_start and optimizer is None:
            raise UsageError("warm_start=True: the session has to be given the optimizer")
        self._timeout_s = timeout_s
        self._duty = real("duty", duty, above=0, most=1)
        self._offload_base = offload_base
        self._model = model
        self.optimizer = optimizer
        self._wake = threading.Event()
        self._client = Client(
            url if isinstance(url, RunUrl) else RunUrl.parse(url or os.environ.get(URL_VARIABLE, "")),
            Identity(name or default_name(), label, role, device, can_init),
            on_change=self._wake.set,
            warm_start=warm_start,
        )
        self._companion = companion or Companion()
        self._on_adopt = on_adopt
        self._adopter = Adopter()
        self._buffers: dict[str, Buffer] = {}  # that travel
        self.layout: Layout | None = None  # the run's, once it has joined
        self._watch: Watch | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._closing: asyncio.Event | None = None
        self._leaving = threading.Lock()  # `close` and `abandon` come from two threads
        self._hurried = False
        self._began = self._last = 0.0
        self._steps = 0
        self._trained_s = 0.0  # the last step
        self.cold = False  # joined a run that was under way, with a fresh optimizer
        self._loss_at = 0.0

    # --- life ---------------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Join the run and adopt the global model; blocks until then. Raises `MemberRefused`, `ServerError`, and
        `UsageError` for a model or an optimizer that cannot take part."""
        until = time.monotonic() + self._timeout_s
        if self.optimizer is None and self._on_adopt is None and self._client.identity.role == "worker":
            log.info("no optimizer was given: copies of the parameters that one keeps do not follow what is adopted")
        self._adopter = adopter_for(dict(trainable(self._model)), self.optimizer, self._on_adopt)
        check_adapters(self._model)
        self._thread = threading.Thread(target=self._run, name="anabranch I/O", daemon=True)
        self._thread.start()
        self.cold = True  # until it turns out that everybody's optimizer is new
        while not self._adopted() and not self.stopped:
            self.poll(JOIN_POLL_S)
            if self._thread is None:
                raise UsageError("the session was closed before it had joined the run")
            if self._client.joined.is_set():
                self._await_model()
            if time.monotonic() > until:
                what = self._client.waiting.what or "the server's first answer"
                self._end_thread("it took too long to join", EXTRA_S)
                raise MemberRefused(f"not joined within timeout_s = {self._timeout_s:g} s: {what}")
        self._client.waiting.over()
        self.cold = self.cold and self.tokens > 0
        self._await_warmth()
        self._watch = Watch(self._model, self._buffers, trains=self._client.identity.role == "worker")
        self._began = self._last = time.monotonic()
        return self

    def _await_model(self) -> None:
        versions = self.versions()
        there = sum(version >= 0 for version in versions)
        self._client.waiting.on(
            f"the global model, {there} of {len(versions)} fragments are here" if there else "version 0 of the model"
        )

    def _await_warmth(self) -> None:
        until = time.monotonic() + WAIT_S
        while self.cold and not self.stopped and not self._life().warm_start.over and time.monotonic() < until:
            self.poll(JOIN_POLL_S)

    def close(self, reason: str = "done", *, drain_s: float = LEAVE_S, contribute: bool = True) -> None:
        """Send a last contribution for each fragment, say farewell and end the background thread, within `drain_s`.

        Call it at a step boundary; `contribute` False leaves without contributions, as after an error in the middle
        of a step. Safe to call twice. Raises what ended the background thread meanwhile, if something did.
        """
        real("drain_s", drain_s, least=0)
        known = self._error
        with self._leaving:
            if contribute and self._thread is not None:
                self._hand_over_the_rest()
            self._end_thread(reason, drain_s)
        if self._error is not known:
            self._check()

    def abandon(self, reason: str, drain_s: float) -> bool:
        """From another thread, while a step takes too long: leave without it. False if it was closed before."""
        with self._leaving:
            return self._end_thread(reason, drain_s)

    def hurry(self) -> None:
        """From another thread: rest no more for a duty cycle, somebody waits for the next step boundary."""
        self._hurried = True
        self._wake.set()

    def _hand_over_the_rest(self) -> None:
        life = self._client.life
        if life is not None and self.stopped is None and self._client.joined.is_set():
            for last in life.learner.farewell():
                self._call_soon(partial(life.outbox.submit, last))

    def _end_thread(self, reason: str, drain_s: float) -> bool:
        """Leave; False if that was done before."""
        thread, self._thread = self._thread, None
        if thread is None:
            return False
        if self._loop is not None and self._closing is not None and thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._leave(reason, drain_s, self._closing), self._loop)
        thread.join(timeout=drain_s + EXTRA_S)
        return True

    def __enter__(self) -> Self:
        return self if self._thread is not None else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close(f"{type(error).__name__}: {error}", contribute=False)
        except Exception:
            log.warning("the session could not be closed in order", exc_info=True)  # `error` is what matters

    # --- training -----------------------------------------------------------------------------------------

    def batches(self, source: Shards[T] | Iterable[T], batch: int = 1) -> Iterator[T]:
        """What to train on, until the run stops.

        `source` is data of your own (any iterable: its items are passed on, and the end of it ends the loop), or a
        dataset that every worker has a copy of (`Shards`). The run then says who trains on what: each item once per
        epoch, in batches of `batch` items, or fewer where a range ends. A batch counts as trained on with the next
        `step`, so take the next one only after that. Raises `UsageError` if the dataset is not the run's, and at once
        if `batch` is no whole number of at least 1.
        """
        batch = whole("batch", batch)
        if isinstance(source, Iterable) and not hasattr(source, "fingerprint"):
            return self._own(source)
        return self._shared(cast("Shards[T]", source), batch)

    def _own(self, source: Iterable[T]) -> Iterator[T]:
        for item in source:
            if self.stopped:
                return
            yield item

    def _shared(self, shards: Shards[T], batch: int) -> Iterator[T]:
        client = self._client
        if (life := client.life) is None:
            raise UsageError("batches() of a shared dataset: join the run first (`start`, or `with session:`)")
        hungry = partial(self._call_soon, client.supply.hungry)
        feed = Feed(len(shards), shards.fingerprint, life.record.spec.seed, life.books, hungry)
        self._call_soon(partial(client.feed, feed))
        while not self.stopped:
            items = feed.next(batch, DATA_POLL_S)
            self._check()
            if items is not None:
                client.vitals.idle = False
                yield shards.batch(items.indices, items.epoch)
                continue
            client.vitals.idle = feed.idle
            self._boundary(self._trained_s)  # whoever waits is at a step boundary
            self._last = time.monotonic()  # and does not train
            self._call_soon(client.progressed)

    @property
    def warmth(self) -> float:
        """What to multiply the learning rate with: rises from 0.05 to 1 over the first steps in a run that was under
        way, while the inner optimizer's averages are still those of nothing."""
        return min(1.0, (self._steps + 1) / REWARM_STEPS) if self.cold else 1.0

    def step(self, tokens: SupportsInt, loss: torch.Tensor | float | None = None) -> None:
        """Call after `optimizer.step()`: counts, snapshots what was called for, adopts what arrived.

        `tokens`: how many this step trained on, 1 to 2⁴⁰: any whole number, also numpy's, a tensor of no dimensions
        (reading it waits for its device), or a float without a fraction. `loss`: nats per token, a number or a tensor
        of one element. Both are checked first: `UsageError`, and nothing was counted. Never waits for the network;
        raises what ended the background thread, if something did.
        """
        count, loss = whole("tokens", tokens, most=STEP_TOKENS), one_value("loss", loss)
        self._check()
        now = time.monotonic()
        trained_s = now - self._last
        vitals = self._client.vitals
        vitals.train_s += trained_s
        self._count(count)
        self._steps += 1
        if self._watch is not None:
            self._watch.look()
        self._note_loss(loss, now)
        self._trained_s = trained_s
        self._boundary(trained_s)
        if self._duty < 1.0:
            self._rest(trained_s * (1.0 / self._duty - 1.0))
        done = time.monotonic()
        vitals.stepped(done - self._last)
        vitals.life_s = done - self._began
        self._last = done
        self._call_soon(self._client.progressed)

    def _count(self, tokens: int) -> None:
        books = self._life().books
        if (held := max(map(books.holds, range(len(books))))) + tokens > STEP_TOKENS:
            raise UsageError(
                f"tokens = {tokens:,}: with the {held:,} since a fragment was last adopted these are more than the "
                f"{STEP_TOKENS:,} that one contribution may claim; count predictions, not bytes or parameters"
            )
        books.step(tokens)

    @property
    def stopped(self) -> str | None:
        """Why the run is over; None while it goes on."""
        return self._client.stopped

    @property
    def paused(self) -> bool:
        return self._client.paused

    @property
    def tokens(self) -> int:
        """Tokens the whole run has merged so far: learning-rate schedules follow this."""
        return self._client.tokens

    @property
    def name(self) -> str:
        return self._client.identity.name

    @property
    def record(self) -> RunRecord:
        """The run's definition. Raises `MemberRefused` before it was joined."""
        return self._life().record

    @property
    def wants_loss(self) -> bool:
        """Whether the next `step` will read its loss: that waits for a GPU, so not each does."""
        return time.monotonic() - self._loss_at >= LOSS_EVERY_S

    # --- evaluation ---------------------------------------------------------------------------------------

    def poll(self, timeout_s: float) -> list[int]:
        """While nothing is trained: wait for something new, adopt it; fragments adopted."""
        self._wake.wait(real("timeout_s", timeout_s, least=0))
        self._wake.clear()
        self._check()
        return self._boundary()

    def versions(self) -> list[int]:
        """Adopted version of each fragment."""
        report: list[int] = self._life().books.report()["adopted"]
        return report

    def report_heldout(self, loss: float, tokens: int) -> None:
        """Publish a held-out loss (nats per token) of the model that `tokens` were merged into, at least 0."""
        tokens, read = whole("tokens", tokens, 0, most=MOST_TOKENS), one_value("loss", loss)
        told = None if read is None else float(read)
        vitals = self._client.vitals

        def publish() -> None:  # in the thread that reports, so that no heartbeat sees half of it
            vitals.measured_tokens, vitals.heldout_loss = tokens, told
            self._client.progressed()

        self._call_soon(publish)

    # --- inside -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """The background thread."""
        try:
            run_async(self._serve())
        except BaseException as error:
            self._error = error
        finally:
            self._wake.set()

    async def _serve(self) -> None:
        self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncExitStack() as stack:
            serving = asyncio.create_task(self._take_part(stack), name="session: serve")
            closing = asyncio.create_task(self._closing.wait(), name="session: wait for close")
            done, pending = await asyncio.wait({serving, closing}, return_when=asyncio.FIRST_COMPLETED)
            if closing not in done and self._client.stopped is not None:
                await closing  # the run is over; the loop still answers until the training side lets go
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            if serving in done:
                serving.result()

    async def _take_part(self, stack: AsyncExitStack) -> None:
        record = await self._client.open(stack)
        self._buffers = buffers_of(self._model, record.spec.merge)
        layout = layout_of(record.spec, self._model, self._buffers)
        if record.layout is not None and (difference := layout.first_difference(record.layout)) is not None:
            raise LayoutMismatch(f"this model is not the run's: {difference}")
        self.layout = layout
        if self._buffers:
            size_mb = sum(4 * buffer.shape.numel() for buffer in self._buffers.values()) / 1e6
            log.info("%d buffers travel with the parameters (%.3g MB; merge.buffers)", len(self._buffers), size_mb)
        if (wished := record.spec.rounds.fragments) > (count := len(layout.fragments)):
            log.info("the model has %d tensors, so as many fragments: rounds.fragments = %d is more", count, wished)
        store = TorchStore(self._model, layout, self._buffers, offload_base=self._offload_base, adopter=self._adopter)
        await self._client.serve(record, store, layout)

    async def _leave(self, reason: str, within_s: float, left: asyncio.Event) -> None:
        try:
            await self._client.leave(reason, within_s)
        finally:
            left.set()

    def _adopted(self) -> bool:
        return self._client.joined.is_set() and all(v >= 0 for v in self.versions())

    def _life(self) -> Incarnation:
        if (life := self._client.life) is None:
            raise MemberRefused("the session has not joined; use anabranch.join or `with Session(...)`")
        return life

    def _boundary(self, step_s: float = 0.0) -> list[int]:
        """At a step boundary, the next one expected in `step_s`."""
        if (life := self._client.life) is None:
            return []
        self._exchange_state(life.warm_start)

        def send(item: Outgoing | Refusal) -> None:
            self._call_soon(partial(life.outbox.submit, item))

        adopted = life.learner.boundary(self._client.vitals.loss, send, step_s)
        self._companion.adopted(adopted)
        return adopted

    def _exchange_state(self, warm: WarmStart) -> None:
        """Optimizer state: ours for a joiner, or a peer's for us."""
        if not warm.wanted and warm.arrived is None:
            return
        from anabranch.workers.optimizer_state import copy_state, load_state, pack

        if warm.wanted:
            warm.wanted = False
            try:
                mine: Pack | str = partial(pack, copy_state(self._model, self.optimizer))
            except Exception as error:  # whatever optimizer it is: a joiner's wish is no reason to stop training
                mine = f"{type(error).__name__}: {error}"
            self._call_soon(partial(warm.give, mine))
        if (data := warm.arrived) is not None:
            warm.arrived, reason = None, None
            if self.warmth < 1.0 and self._companion.may_take_over():  # else we have warmed up by ourselves
                try:
                    count = load_state(self._model, self.optimizer, data, self._adopter.copies.keys)
                    log.info("warm start: a peer's optimizer state for %d parameters", count)
                    self.cold = False
                    self._companion.took_over(data)
                except StateUnusable as error:
                    reason = str(error)
            else:
                log.info("a peer's optimizer state came too late")
            self._call_soon(partial(warm.tried, reason))

    def _rest(self, seconds: float) -> None:
        """Rest for a duty cycle, but answer calls: between two steps every moment is a boundary."""
        started = time.monotonic()
        while not self._hurried and (left := seconds - (time.monotonic() - started)) > 0:
            if self._wake.wait(left):
                self._wake.clear()
                self._boundary(self._trained_s)
                self._check()
                if self.stopped:
                    break
        self._client.vitals.rest_s += time.monotonic() - started

    def _note_loss(self, loss: torch.Tensor | float | None, now: float) -> None:
        if loss is not None and self.wants_loss:
            self._loss_at = now
            self._client.vitals.loss = float(loss if isinstance(loss, (int, float)) else loss.detach())

    def _call_soon(self, function: Callable[[], object]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(function)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
