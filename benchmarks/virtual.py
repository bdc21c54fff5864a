"""The decision core, the learners and the merge in virtual time: real gradients, simulated speeds, one process.

A heap of events stands in for clocks, threads and Redis, so a run is exact and repeatable: the same configuration
gives the same bits on one build of torch and numpy. Times are in units of the fastest worker's step.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from anabranch.merge.average import MergeRules, merge_fragment
from anabranch.merge.codecs import decode
from anabranch.merge.fragments import Layout
from anabranch.merge.outer import OuterOptimizer
from anabranch.model import Float32
from anabranch.orchestrator import events as ev
from anabranch.orchestrator.core import Core
from anabranch.orchestrator.ledger import weighted
from anabranch.queue import messages
from anabranch.spec import RunSpec
from anabranch.workers.adoption import ParameterStore, adoption_of
from anabranch.workers.books import Books
from anabranch.workers.learner import Learner, NewVersion, Outgoing, Refusal

LATENCY = 0.1  # of a message, an upload or a broadcast
MERGE = 0.05  # from closing to the commit
LAST = 20.0  # by then everything that was sent last has its outcome


class Trainer(Protocol):
    """One worker's model."""

    @property
    def store(self) -> ParameterStore: ...

    def step(self, share_done: float) -> tuple[int, float]:
        """One optimizer step, at this share of the run; tokens and loss."""
        ...


@dataclass
class Worker:
    """A simulated worker: a real learner around a real model, at its own speed."""

    name: str
    step_s: float
    trainer: Trainer
    learner: Learner
    incarnation: int = 0
    loss: float = 0.0
    sent: int = 0

    @property
    def books(self) -> Books:
        return self.learner.books


@dataclass
class World:
    """Everything of one run."""

    spec: RunSpec
    layout: Layout
    theta: list[Float32]
    end: float  # virtual time of the last step
    on_time: Callable[[World], None] = lambda world: None  # called at every multiple of `watch_every`
    watch_every: float = 0.0
    now: float = 0.0
    workers: list[Worker] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # ledger mismatches and refusals: there must be none

    def __post_init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._entries = itertools.count(1)
        self._momentum: list[Float32 | None] = [None] * len(self.theta)
        self._payloads: dict[bytes, Float32] = {}
        self._prepared: dict[int, tuple[Float32, Float32, bytes]] = {}
        self._broadcast = 0
        self._over = False
        merge = self.spec.merge
        self._rules = MergeRules(matrix=merge.matrix, embedding=merge.embedding)
        self._outer = OuterOptimizer(merge.outer_lr, merge.outer_momentum)
        self.core = Core(self.spec, "virtual")
        self._carry_out(self.core.start(0.0))
        sizes = tuple(fragment.size for fragment in self.layout.fragments)
        digests = tuple(_digest(theta) for theta in self.theta)
        self._feed(ev.InitReady(0, "layout", sizes, digests))

    # --- events -------------------------------------------------------------------------------------------

    def add(self, name: str, step_s: float, trainer: Trainer) -> None:
        """A worker joins and makes its first step `step_s` later."""
        books = Books(len(self.theta))
        settings = self.spec.workers
        learner = Learner(trainer.store, adoption_of(settings), books, settings.codec, lambda: self.now)
        worker = Worker(name, step_s, trainer, learner)
        self.workers.append(worker)
        nonce = hashlib.sha256(name.encode()).digest()[:16]
        self._feed(ev.Joined(name, nonce, self._entry()))
        [member] = [m for m in self.core.members() if m.name == name]
        worker.incarnation = member.incarnation
        learner.go_on_under(self.core.state.timeline)
        for index, theta in enumerate(self.theta):
            learner.offer(NewVersion(index, 0, _digest(theta), theta, self.core.state.timeline))
        learner.boundary(None, lambda item: None)
        self._report(worker)
        self._at(self.now + step_s, lambda: self._step(worker))

    def run(self) -> None:
        """Until `end`."""
        if self.watch_every:
            self._at(self.watch_every, self._watch)
        while self._heap and self._heap[0][0] <= self.end:
            self.now, _, action = heapq.heappop(self._heap)
            action()

    def finish(self) -> None:
        """Everybody says farewell; what it sent last is merged."""
        self._over = True
        limit = self.now + LAST
        for worker in self.workers:
            for item in worker.learner.farewell():
                self._send(worker, item)
            figures = tuple((f.processed, f.discarded) for f in worker.books.farewell())
            left = ev.Left(worker.name, worker.incarnation, "", self._entry(), figures)
            self._at(self.now + LATENCY, lambda left=left: self._feed(left))  # type: ignore[misc]
        while self._unsettled and self._heap[0][0] <= limit:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        if self._unsettled:
            self.notes.append("contributions were left over")

    @property
    def _unsettled(self) -> bool:
        state = self.core.state
        waiting = state.fetching or state.rounds or any(fragment.in_hand for fragment in state.fragments)
        return bool(waiting) or any(member.live for member in self.core.members())

    def _watch(self) -> None:
        if self._over:
            return
        self.on_time(self)
        self._at(self.now + self.watch_every, self._watch)

    def _at(self, when: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (when, next(self._order), action))

    def _entry(self) -> bytes:
        return b"%d-0" % next(self._entries)

    def _feed(self, event: ev.Event) -> None:
        self._carry_out(self.core.handle(event, self.now))

    # --- workers ------------------------------------------------------------------------------------------

    def _step(self, worker: Worker) -> None:
        if self._over:
            return
        tokens, worker.loss = worker.trainer.step(self.now / self.end)
        worker.books.step(tokens)
        worker.learner.boundary(worker.loss, lambda item: self._send(worker, item), worker.step_s)
        self._report(worker)
        self._at(self.now + worker.step_s, lambda: self._step(worker))

    def _report(self, worker: Worker) -> None:
        report = worker.books.report()
        event = ev.Progressed(
            sender=worker.name,
            incarnation=worker.incarnation,
            steps=report["steps"],
            step_s=worker.step_s,
            adopted=tuple(report["adopted"]),
            held=tuple(report["held"]),
            processed=report["processed"],
            discarded=tuple(report["discarded"]),
            pending=tuple(report["pending"]),
            read=report["read"],
            loss=worker.loss,
            timeline=worker.learner.timeline,
        )
        self._at(self.now + LATENCY, lambda: self._feed(event))

    def _send(self, worker: Worker, item: Outgoing | Refusal) -> None:
        if isinstance(item, Refusal):
            call, reason = item.call, item.reason
            declined = ev.Declined(worker.name, worker.incarnation, call.fragment, call.round, reason, self._entry())
            self._at(self.now + LATENCY, lambda: self._feed(declined))
            return
        offer = self._offer(worker, item)
        size = self.layout.fragments[item.fragment].size
        self._payloads[offer.entry] = decode(self.spec.workers.codec, item.data, size)
        self._at(self.now + LATENCY, lambda: self._feed(ev.Offered(offer)))

    def _offer(self, worker: Worker, item: Outgoing) -> ev.Offer:
        claim = messages.Claim(
            owner=worker.name, id="ab", bytes=1, chunk_bytes=1, codec=item.codec, hashes=[], digest=bytes(32)
        )
        return ev.Offer(
            sender=worker.name,
            incarnation=worker.incarnation,
            fragment=item.fragment,
            timeline=item.timeline,
            base=item.snapshot.base,
            base_digest=item.base_digest,
            round=item.round,
            tokens=item.snapshot.tokens,
            steps=item.snapshot.steps,
            loss=item.loss,
            processed=item.snapshot.figures.processed,
            discarded=item.snapshot.figures.discarded,
            claim=claim,
            entry=self._entry(),
        )

    # --- what the core says -------------------------------------------------------------------------------

    def _carry_out(self, instructions: Sequence[ev.Instruction]) -> None:
        if not instructions:
            return
        self._broadcast += 1
        for instruction in instructions:
            self._obey(instruction)
        self._carry_out(self.core.handle(ev.Wrote(self._broadcast), self.now))

    def _obey(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.SetTimer(name=name, after_s=after, round=number):
                self._at(self.now + after, lambda: self._feed(ev.TimerFired(name, number)))
            case ev.Fetch(offer=offer):
                self._at(self.now, lambda: self._feed(ev.Fetched(offer)))
            case ev.Consume(entries=entries):
                for entry in entries:
                    self._payloads.pop(entry, None)
            case ev.Merge():
                self._merge(instruction)
            case ev.OpenRound():
                self._call(instruction)
            case ev.Commit():
                self._commit(instruction)
            case ev.Settle(verdicts=verdicts):
                self._tell(verdicts)
            case ev.Note(kind=kind, reason=reason) if kind in ("ledger mismatch", "refused"):
                self.notes.append(reason)

    def _merge(self, order: ev.Merge) -> None:
        theta, momentum = self._optimizer().step(
            self.theta[order.fragment], self._momentum[order.fragment], self._gradient(order)
        )
        self._prepared[order.round] = theta, momentum, _digest(theta)
        digest = self._prepared[order.round][2]
        self._at(self.now + MERGE, lambda: self._feed(ev.Merged(order.round, digest)))

    def _gradient(self, order: ev.Merge) -> Float32:
        deltas = [self._payloads[offer.entry] for offer, _ in order.parts]
        weights = [weight for _, weight in order.parts]
        gradient = merge_fragment(self.layout.fragments[order.fragment], deltas, weights, self._rules)
        assert gradient is not None
        return gradient

    def _optimizer(self) -> OuterOptimizer:
        return self._outer

    def judged(self) -> list[Float32]:
        """What is measured: the global model."""
        return self.theta

    def _call(self, opened: ev.OpenRound) -> None:
        call = messages.Call(
            round=opened.round,
            fragment=opened.fragment,
            timeline=opened.timeline,
            base=opened.base,
            called=list(opened.called),
        )

        def arrive() -> None:
            for worker in self.workers:
                worker.learner.heard(call)
                if worker.incarnation in call.called and (answer := worker.learner.call(call)) is not None:
                    self._send(worker, answer)

        self._at(self.now + LATENCY, arrive)

    def _commit(self, commit: ev.Commit) -> None:
        theta, momentum, digest = self._prepared.pop(commit.round)
        self.theta[commit.fragment], self._momentum[commit.fragment] = theta, momentum
        version = NewVersion(commit.fragment, commit.version, digest, theta, commit.timeline)
        self._tell(commit.verdicts)

        def arrive() -> None:
            for worker in self.workers:
                worker.learner.offer(version)

        self._at(self.now + LATENCY, arrive)

    def _tell(self, verdicts: Sequence[ev.Verdict]) -> None:
        number = self._broadcast
        told = [
            messages.Verdict(
                incarnation=v.incarnation, fragment=v.fragment, base=v.base, applied=v.applied, tokens=v.tokens
            )
            for v in verdicts
        ]

        def arrive() -> None:
            for worker in self.workers:
                for verdict in told:
                    if verdict.incarnation == worker.incarnation:
                        worker.books.outcome(verdict)
                worker.books.read(number)

        self._at(self.now + LATENCY, arrive)

    # --- figures ------------------------------------------------------------------------------------------

    @property
    def processed(self) -> int:
        """Tokens trained on by everybody."""
        return sum(int(worker.books.report()["processed"]) for worker in self.workers)

    @property
    def merged_share(self) -> float:
        """Of the tokens trained on, those that were merged, parameter-weighted."""
        sizes = self.core.state.sizes
        return sum(weighted(m.account.applied, sizes) for m in self.core.members()) / max(1, self.processed)


def _digest(theta: Float32) -> bytes:
    return hashlib.sha256(theta.data).digest()
