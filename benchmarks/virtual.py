"""Learners and merges around the engine: real gradients, simulated speeds, one process, virtual time.

A run is exact and repeatable: the same configuration gives the same bits on one build of torch and numpy. Times are
in units of the fastest worker's step.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from anabranch.merge.average import MergeRules, merge_fragment
from anabranch.merge.codecs import decode
from anabranch.merge.fragments import Layout
from anabranch.merge.outer import OuterOptimizer
from anabranch.model import Float32
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.events import Fetched, Heard, InitReady, Merged
from anabranch.orchestrator.core.ledger import weighted
from anabranch.orchestrator.core.state import State
from anabranch.queue import messages
from anabranch.simulate.engine import Engine
from anabranch.spec import RunSpec
from anabranch.workers.member.adoption import ParameterStore, adoption_of
from anabranch.workers.member.books import Books
from anabranch.workers.member.learner import Learner, NewVersion, Outgoing, Refusal

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
    on_merged: Callable[[messages.Merged], object] = lambda merged: None
    workers: list[Worker] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # ledger mismatches and refusals: there must be none

    def __post_init__(self) -> None:
        self._entries = itertools.count(1)
        self._momentum: list[Float32 | None] = [None] * len(self.theta)
        self._payloads: dict[bytes, Float32] = {}
        self._prepared: dict[int, tuple[Float32, Float32]] = {}
        self._over = False
        merge = self.spec.merge
        self._rules = MergeRules(matrix=merge.matrix, embedding=merge.embedding)
        self._outer = OuterOptimizer(merge.outer_lr, merge.outer_momentum)
        self.engine = Engine(State(self.spec, "virtual"), self)
        self.engine.start()
        sizes = tuple(fragment.size for fragment in self.layout.fragments)
        digests = tuple(_digest(theta) for theta in self.theta)
        self.engine.feed(InitReady(0, "layout", sizes, digests))

    @property
    def now(self) -> float:
        return self.engine.now

    @property
    def state(self) -> State:
        return self.engine.state

    # --- events -------------------------------------------------------------------------------------------

    def add(self, name: str, step_s: float, trainer: Trainer) -> None:
        """A worker joins and makes its first step `step_s` later."""
        books = Books(len(self.theta))
        settings = self.spec.workers
        learner = Learner(trainer.store, adoption_of(settings), books, settings.codec, lambda: self.now)
        worker = Worker(name, step_s, trainer, learner)
        self.workers.append(worker)
        nonce = hashlib.sha256(name.encode()).digest()[:16]
        self.engine.feed(self._heard(worker, messages.Register(name=name, nonce=nonce)))
        [worker.incarnation] = [m.incarnation for m in self.state.members.values() if m.name == name]
        learner.go_on_under(self.state.timeline)
        for index, theta in enumerate(self.theta):
            learner.offer(NewVersion(index, 0, _digest(theta), theta, self.state.timeline))
        learner.boundary(None, lambda item: None)
        self._report(worker)
        self.engine.at(self.now + step_s, lambda: self._step(worker))

    def run(self) -> None:
        """Until `end`."""
        if self.watch_every:
            self.engine.at(self.watch_every, self._watch)
        self.engine.elapse(self.end - self.now)

    def finish(self) -> None:
        """Everybody says farewell; what it sent last is merged."""
        self._over = True
        limit = self.now + LAST
        for worker in self.workers:
            for item in worker.learner.farewell():
                self._send(worker, item)
            self._say(worker, messages.Farewell(incarnation=worker.incarnation, figures=worker.books.farewell()))
        while self._unsettled and self.engine.advance(limit):
            pass
        if self._unsettled:
            self.notes.append("contributions were left over")

    @property
    def _unsettled(self) -> bool:
        state = self.state
        waiting = state.verifying or state.rounds or any(fragment.in_hand for fragment in state.fragments)
        return bool(waiting) or any(member.live for member in state.members.values())

    def _watch(self) -> None:
        if self._over:
            return
        self.on_time(self)
        self.engine.at(self.now + self.watch_every, self._watch)

    def _entry(self) -> bytes:
        return b"%d-0" % next(self._entries)

    def _heard(self, worker: Worker, message: messages.Message, entry: bytes | None = None) -> Heard:
        return Heard(worker.name, self._entry() if entry is None else entry, message)

    def _say(self, worker: Worker, message: messages.Message) -> None:
        self.engine.later(LATENCY, self._heard(worker, message))

    # --- workers ------------------------------------------------------------------------------------------

    def _step(self, worker: Worker) -> None:
        if self._over:
            return
        tokens, worker.loss = worker.trainer.step(self.now / self.end)
        worker.books.step(tokens)
        worker.learner.boundary(worker.loss, lambda item: self._send(worker, item), worker.step_s)
        self._report(worker)
        self.engine.at(self.now + worker.step_s, lambda: self._step(worker))

    def _report(self, worker: Worker) -> None:
        said = messages.Progress(
            incarnation=worker.incarnation,
            step_s=worker.step_s,
            loss=worker.loss,
            timeline=worker.learner.timeline,
            **worker.books.report(),
        )
        self.engine.later(LATENCY, self._heard(worker, said, b""))

    def _send(self, worker: Worker, item: Outgoing | Refusal) -> None:
        if isinstance(item, Refusal):
            number, call = worker.incarnation, item.call
            declined = messages.Decline(
                incarnation=number, fragment=call.fragment, round=call.round, reason=item.reason
            )
            self._say(worker, declined)
            return
        snapshot, entry = item.snapshot, self._entry()
        size = self.layout.fragments[item.fragment].size
        self._payloads[entry] = decode(self.spec.workers.codec, item.data, size)
        contribution = messages.Contribution(
            incarnation=worker.incarnation,
            fragment=item.fragment,
            timeline=item.timeline,
            base=snapshot.base,
            base_digest=item.base_digest,
            round=item.round,
            tokens=snapshot.tokens,
            steps=snapshot.steps,
            loss=item.loss,
            figures=snapshot.figures,
            claim=_claim(worker.name, bytes(32)),
        )
        self.engine.later(LATENCY, self._heard(worker, contribution, entry))

    # --- what the core says -------------------------------------------------------------------------------

    def begin(self, work: do.Instruction) -> None:
        match work:
            case do.Fetch(offer=offer):
                self.engine.later(0.0, Fetched(offer.message.incarnation, offer.sender, offer.entry))
            case do.Merge():
                self._merge(work)

    def store(self, instruction: do.Instruction) -> None:
        match instruction:
            case do.Consume(entries=entries):
                for entry in entries:
                    self._payloads.pop(entry, None)
            case do.Note(what="ledger mismatch" | "refused", reason=reason):
                self.notes.append(reason)

    def hear(self, number: int, message: messages.Message, reason: str) -> None:
        match message:
            case messages.Call():
                self._call(message)
            case messages.Merged():
                self.on_merged(message)
                self._tell(number, message.verdicts)
                self._commit(message)
            case messages.Verdicts():
                self._tell(number, message.verdicts)
            case _:
                self._tell(number, [])

    def _merge(self, order: do.Merge) -> None:
        theta, momentum = self._optimizer().step(
            self.theta[order.fragment], self._momentum[order.fragment], self._gradient(order)
        )
        self._prepared[order.round] = theta, momentum
        self.engine.later(MERGE, Merged(order.round, _claim("_", _digest(theta))))

    def _gradient(self, order: do.Merge) -> Float32:
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

    def _call(self, call: messages.Call) -> None:
        def arrive() -> None:
            for worker in self.workers:
                worker.learner.heard(call)
                if worker.incarnation in call.called and (answer := worker.learner.call(call)) is not None:
                    self._send(worker, answer)

        self.engine.at(self.now + LATENCY, arrive)

    def _commit(self, merged: messages.Merged) -> None:
        theta, momentum = self._prepared.pop(merged.round)
        self.theta[merged.fragment], self._momentum[merged.fragment] = theta, momentum
        version = NewVersion(merged.fragment, merged.version, merged.claim.digest, theta, merged.timeline)

        def arrive() -> None:
            for worker in self.workers:
                worker.learner.offer(version)

        self.engine.at(self.now + LATENCY, arrive)

    def _tell(self, number: int, verdicts: list[messages.Verdict]) -> None:
        """What every worker reads of an entry of the broadcast: outcomes before the version they belong to."""

        def arrive() -> None:
            for worker in self.workers:
                for verdict in verdicts:
                    if verdict.incarnation == worker.incarnation:
                        worker.books.outcome(verdict)
                worker.books.read(number)

        self.engine.at(self.now + LATENCY, arrive)

    # --- figures ------------------------------------------------------------------------------------------

    @property
    def processed(self) -> int:
        """Tokens trained on by everybody."""
        return sum(int(worker.books.report()["processed"]) for worker in self.workers)

    @property
    def merged_share(self) -> float:
        """Of the tokens trained on, those that were merged, parameter-weighted."""
        sizes, members = self.state.sizes, self.state.members.values()
        return sum(weighted(member.account.applied, sizes) for member in members) / max(1, self.processed)

    def share_of(self, worker: Worker) -> float:
        """The same, of one worker's tokens."""
        account = self.state.members[worker.incarnation].account
        return weighted(account.applied, self.state.sizes) / max(1, worker.books.processed)


def _digest(theta: Float32) -> bytes:
    return hashlib.sha256(theta.data).digest()


def _claim(owner: str, digest: bytes) -> messages.Claim:
    """Payloads do not travel here."""
    return messages.Claim(owner=owner, id="ab", bytes=1, chunk_bytes=1, codec="fp32", hashes=[], digest=digest)
