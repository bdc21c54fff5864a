"""A small world for property tests: several workers, their inboxes, payloads and merges that take their time.

Everything that happens follows from a plan (a list of small steps) and a seed, so that a world can be run twice.
The promises of the core are checked after every single event. Times are multiples of 1/64 s: exact in floats.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from anabranch.orchestrator import events as ev
from anabranch.orchestrator.core import Core
from anabranch.orchestrator.ledger import Account
from anabranch.orchestrator.policies import quorum_of
from anabranch.queue.messages import Verdict, pack
from anabranch.workers.books import Books
from tests.orchestrator.bench import BEAT_S, NONCE, TIMELINE, claim, digest, make_spec, only

TICK_S = 1 / 64
NAMES = ("ann", "bob", "cid", "mallory")
STEP_S = {"ann": 0.125, "bob": 0.25, "cid": 0.75, "mallory": 0.125}
FRAGMENTS = 3
TOKENS = 10
SLOWEST_MERGE = 48  # ticks
TOLD = (
    ev.Welcome,
    ev.TurnAway,
    ev.OpenRound,
    ev.Commit,
    ev.Abandon,
    ev.Settle,
    ev.AskAgain,
    ev.Close,
    ev.TellClosed,
)

Plan = list[tuple[str, int, int]]  # what, which worker, how much


@dataclass
class Life:
    """One process that lives on until it is told that its incarnation is over."""

    name: str
    nonce: bytes
    cursor: int
    incarnation: int = 0
    silent: bool = False
    books: Books = field(default_factory=lambda: Books(FRAGMENTS))
    calls: list[ev.OpenRound] = field(default_factory=list)
    sent: list[ev.Offer] = field(default_factory=list)


class World:
    """Runs a plan; raises AssertionError where a promise is broken."""

    def __init__(self, seed: int, quorum: int = 2, in_flight: int = 2) -> None:
        self.random = random.Random(seed)
        spec = make_spec(fragments=FRAGMENTS, inner_steps=6, quorum=quorum, in_flight=in_flight, deadline_min_s=2.0)
        self.core = Core(spec, NONCE)
        self.now = 0.0
        self.log: list[ev.Instruction] = []
        self.seen: Counter[str] = Counter()
        self.timers: dict[tuple[ev.TimerName, int], float] = {}
        self.pending: list[tuple[float, int, ev.Event]] = []  # fetches and merges under way: due, number, result
        self.inboxes: dict[str, dict[bytes, ev.Event]] = {"": {}, **{name: {} for name in NAMES}}
        self.broadcast: list[ev.Instruction] = []
        self.lives: dict[str, Life] = {}
        self.versions = [0] * FRAGMENTS
        self.applied: set[tuple[int, int, int]] = set()
        self.booked: set[tuple[int, int, int]] = set()
        self._numbers = 0
        self._next_beat = BEAT_S
        self._take(self.core.start(self.now))
        digests = tuple(digest(p, 0) for p in range(FRAGMENTS))
        self.feed(ev.InitReady(0, "layout", (30, 20, 10), digests))

    # --- events and what follows from them ----------------------------------------------------------------

    def feed(self, event: ev.Event) -> None:
        self._take(self.core.handle(event, self.now))

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def put(self, name: str, event: ev.Event, entry: bytes) -> None:
        """An entry is added to an inbox and read at once."""
        self.inboxes[name][entry] = event
        self.feed(event)

    def entry(self) -> bytes:
        return b"%d-0" % self.number()

    def _take(self, instructions: list[ev.Instruction]) -> None:
        self.log += instructions
        self._check(instructions)
        for instruction in instructions:
            self._carry_out(instruction)
        told = [i for i in instructions if isinstance(i, TOLD)]
        if told:
            self.broadcast += told
            self.feed(ev.Wrote(len(self.broadcast)))

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.SetTimer():
                at = math.ceil((self.now + instruction.after_s) / TICK_S) * TICK_S
                self.timers[instruction.name, instruction.round] = at
            case ev.Consume(worker=worker, entries=entries):
                for entry in entries:
                    assert self.inboxes[worker].pop(entry, None) is not None, "consumed what is not there"
            case ev.Fetch(offer=offer):
                dice = self.random.random()
                result: ev.Event = ev.Fetched(offer)
                if dice < 0.2:
                    result = ev.FetchFailed(offer, "gone" if dice < 0.1 else "not finite", gone=dice < 0.1)
                self._later(self.random.randrange(32), result)
            case ev.Merge(round=number, fragment=fragment, base=base):
                failed = self.random.random() < 0.05
                result = ev.Merged(number, None if failed else digest(fragment, base + 1), "nothing to merge")
                self._later(self.random.randrange(SLOWEST_MERGE), result)

    def _later(self, ticks: int, event: ev.Event) -> None:
        self.pending.append((self.now + ticks * TICK_S, self.number(), event))

    def elapse(self, ticks: int) -> None:
        """Let time pass; what falls due happens in its order."""
        end = self.now + ticks * TICK_S
        while True:
            key = min(self.timers, key=lambda k: (self.timers[k], k))
            due = min(self.pending, default=(end + 1, 0, None))
            first = min(self.timers[key], due[0], self._next_beat)
            if first > end:
                break
            self.now = max(self.now, first)
            if due[2] is not None and due[0] == first:  # streams are drained before timers fire
                self.pending.remove((due[0], due[1], due[2]))
                self.feed(due[2])
            elif self._next_beat == first:
                self._next_beat += BEAT_S
                self._beat()
            else:
                del self.timers[key]
                self.feed(ev.TimerFired(*key))
        self.now = end

    # --- promises -----------------------------------------------------------------------------------------

    def _check(self, instructions: list[ev.Instruction]) -> None:
        state = self.core.state
        rounds = list(state.rounds.values())
        assert len({r.fragment for r in rounds}) == len(rounds), "two open rounds of one fragment"
        assert len(rounds) <= state.spec.rounds.in_flight
        for round_ in rounds:
            longest = round_.deadline_s + (round_.grace_s or 0.0) + 2 * TICK_S
            assert round_.closed or self.now <= round_.opened_at + longest, "neither merged nor abandoned"
            assert not round_.closed or self.now <= round_.closed_at + SLOWEST_MERGE * TICK_S
        for order in only(ev.Merge, instructions):
            round_ = state.rounds[order.round]
            assert len(order.parts) >= quorum_of(round_, state), "merged below K"
            assert [o.sender for o, _ in order.parts] == sorted(o.sender for o, _ in order.parts)
        for instruction in instructions:
            self._count(instruction)
            if isinstance(instruction, ev.Commit):
                self._check_commit(instruction)
            elif isinstance(instruction, ev.Settle):
                self._check_verdicts([v for v in instruction.verdicts if v.reason != "told again"])

    def _check_commit(self, commit: ev.Commit) -> None:
        self.versions[commit.fragment] += 1
        assert commit.version == self.versions[commit.fragment], "versions are contiguous"
        self._check_verdicts(list(commit.verdicts))
        for verdict in commit.verdicts:
            assert verdict.base == commit.version - 1
            if verdict.applied:
                key = (verdict.incarnation, verdict.fragment, verdict.base)
                assert key not in self.applied, "applied twice"
                self.applied.add(key)

    def _check_verdicts(self, verdicts: list[ev.Verdict]) -> None:
        for verdict in verdicts:
            key = (verdict.incarnation, verdict.fragment, verdict.base)
            assert key not in self.booked, "booked twice"
            self.booked.add(key)

    def _count(self, instruction: ev.Instruction) -> None:
        self.seen[type(instruction).__name__] += 1
        if isinstance(instruction, ev.Note):
            self.seen[instruction.kind] += 1
            honest = instruction.details.get("name") != "mallory"
            assert not (instruction.kind == "ledger mismatch" and honest), instruction.reason
        elif isinstance(instruction, ev.Commit):
            self.seen[instruction.closed] += 1
        elif isinstance(instruction, ev.Reject | ev.Abandon | ev.Settle):
            self.seen[instruction.reason.partition(":")[0]] += 1

    def check_books(self) -> None:
        """What the core holds of each (incarnation, fragment) is the sum of what it said should be booked."""
        sums: Counter[tuple[int, int, str]] = Counter()
        for book in only(ev.Book, self.log):
            assert book.tokens > 0
            sums[book.incarnation, book.fragment, book.column] += book.tokens
        books = {
            i: (m.account.applied, m.account.rejected, m.account.lost) for i, m in self.core.state.members.items()
        }
        for close in only(ev.Close, self.log):
            columns = list(zip(*close.books, strict=True))
            books[close.incarnation] = (list(columns[0]), list(columns[1]), list(columns[2]))
        for incarnation, columns_ in books.items():
            for column, figures in zip(("applied", "rejected", "lost"), columns_, strict=True):
                assert figures == [sums.pop((incarnation, f, column), 0) for f in range(FRAGMENTS)]
        assert not sums

    # --- the plan -----------------------------------------------------------------------------------------

    def run(self, plan: Plan) -> World:
        for what, who, amount in plan:
            getattr(self, f"do_{what}")(NAMES[who], amount)
        self.elapse(64 * 9)  # whatever is open now must come to its end
        self.check_books()
        return self

    def do_together(self, _name: str, amount: int) -> None:
        """Everybody who lives trains for a while, reports, reads the broadcast and answers."""
        seconds = (amount + 1) / 4
        self.elapse(16 * (amount + 1))
        for life in self._living():
            if life.name != "mallory":
                for _ in range(int(seconds / STEP_S[life.name])):
                    life.books.step(TOKENS)
                self.catch_up(life)
                self._report(life)
                self._answer(life)

    def do_join(self, name: str, amount: int) -> None:
        """A process starts under this name; one that was there before is killed first if `amount` is large."""
        if name not in self.lives or amount > 5:
            self._start(name)

    def do_die(self, name: str, _amount: int) -> None:
        if name in self.lives:
            self.lives[name].silent = True

    def do_wake(self, name: str, _amount: int) -> None:
        if name in self.lives:
            self.lives[name].silent = False

    def do_leave(self, name: str, _amount: int) -> None:
        life = self.lives.get(name)
        if life is not None and life.incarnation and not life.silent:
            figures = tuple((f.processed, f.discarded) for f in life.books.farewell())
            entry = self.entry()
            del self.lives[name]
            self.put(name, ev.Left(name, life.incarnation, "", entry, figures), entry)

    def do_again(self, name: str, amount: int) -> None:
        """Sends something that was sent before once more."""
        life = self.lives.get(name)
        if life is not None and life.sent:
            self._send(life, life.sent[-1 - amount % min(3, len(life.sent))])

    def do_uncalled(self, name: str, amount: int) -> None:
        """Contributes without a call, on a base that may be superseded; under the same key it is a newer one."""
        self.elapse(32)
        life = self.lives.get(name)
        fragment = amount % FRAGMENTS
        if life is not None and name != "mallory" and life.incarnation and life.books.holds(fragment):
            self._contribute(life, fragment, round_=0)

    def do_decline(self, name: str, _amount: int) -> None:
        life = self.lives.get(name)
        if life is not None:
            self.catch_up(life)
            if life.calls:
                self._decline(life, life.calls.pop())

    def do_wait(self, _name: str, amount: int) -> None:
        self.elapse(amount * 32)

    def do_quorum(self, _name: str, amount: int) -> None:
        entry = self.entry()
        command = ev.Commanded(entry.decode(), "set", entry, "rounds.quorum", 1 + amount % 3)
        self.put("", command, entry)

    def do_pause(self, _name: str, amount: int) -> None:
        entry = self.entry()
        self.put("", ev.Commanded(entry.decode(), "pause" if amount == 0 else "resume", entry), entry)

    def do_junk(self, name: str, amount: int) -> None:
        """What a broken or hostile member sends."""
        life = self.lives.get("mallory")
        if life is None or not life.incarnation:
            self._start("mallory")
            return
        fragment, entry = amount % FRAGMENTS, self.entry()
        offer = self._offer(life, fragment, self.versions[fragment], 0, TOKENS, entry)
        victim = self.lives.get(name, life).incarnation
        junk: list[ev.Event] = [
            ev.Offered(dataclasses.replace(offer, base=1000 + self._numbers)),
            ev.Offered(dataclasses.replace(offer, base=1000 + self._numbers, timeline="1-other")),
            ev.Offered(dataclasses.replace(offer, base_digest=b"?" * 32)),
            ev.Offered(dataclasses.replace(offer, fragment=99)),
            ev.Offered(dataclasses.replace(offer, incarnation=victim if name != "mallory" else 999)),
            ev.Unreadable("mallory", entry, "not msgpack"),
            ev.Declined("mallory", victim, fragment, self.core.state.next_round - 1, "", entry),
        ]
        if amount < len(junk):
            self.put("mallory", junk[amount], entry)
        else:
            lists = ((9,) * (self._numbers % 5),) * 4
            self.feed(ev.Progressed("mallory", victim, 10**9, 1e-9, lists[0], lists[1], 7, lists[2], lists[3], 0))

    def do_failover(self, _name: str, _amount: int) -> None:
        """The leader dies; a new one loads what was stored and reads every inbox from the start."""
        state = self.core.state
        record, members = self.core.dump(self.now, everything=True)
        pack([record, members])
        accounts = {
            i: Account(list(m.account.applied), list(m.account.rejected), list(m.account.lost))
            for i, m in state.members.items()
        }
        self.core = Core.load(
            record,
            list(members.values()),
            accounts,
            spec=state.spec,
            nonce=NONCE,
            broadcast=len(self.broadcast),
            now=self.now,
        )
        assert self.core.dump(self.now, everything=True) == (record, members), "dump → load → dump"
        self.seen["failover"] += 1
        self.timers.clear()
        self.pending.clear()
        self._take(self.core.start(self.now))
        for inbox in self.inboxes.values():
            for event in list(inbox.values()):
                self.feed(event)

    # --- members ------------------------------------------------------------------------------------------

    def _living(self) -> list[Life]:
        return [self.lives[name] for name in NAMES if name in self.lives and not self.lives[name].silent]

    def _start(self, name: str) -> None:
        number = self.number()
        self.lives[name] = Life(name, b"%016d" % number, len(self.broadcast))
        entry = self.entry()
        self.put(name, ev.Joined(name, b"%016d" % number, entry), entry)
        self.catch_up(self.lives[name])

    def _beat(self) -> None:
        for life in self._living():
            if life.incarnation and self.lives.get(life.name) is life:
                if self.random.random() < 0.25:
                    self.catch_up(life)
                self._report(life)

    def _report(self, life: Life) -> None:
        if not life.incarnation:
            return
        figures: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in life.books.report().items()
        }
        self.feed(ev.Progressed(sender=life.name, incarnation=life.incarnation, step_s=STEP_S[life.name], **figures))

    def catch_up(self, life: Life) -> None:
        """Read the broadcast from this life's own cursor."""
        while life.cursor < len(self.broadcast) and self.lives.get(life.name) is life:
            told = self.broadcast[life.cursor]
            life.cursor += 1
            self._hear(life, told)
            life.books.read(life.cursor)

    def _hear(self, life: Life, told: ev.Instruction) -> None:
        match told:
            case ev.Welcome(nonce=nonce, incarnation=incarnation) if nonce == life.nonce and not life.incarnation:
                life.incarnation, life.cursor = incarnation, len(self.broadcast)
                for fragment, version in enumerate(self.versions):
                    life.books.adopt(fragment, version)
            case ev.TurnAway(nonce=nonce) if nonce == life.nonce:
                del self.lives[life.name]
            case ev.OpenRound(called=called) if life.incarnation in called:
                life.calls.append(told)
            case ev.Commit() | ev.Settle():
                self._settle(life, told)
                if isinstance(told, ev.Commit) and life.incarnation:
                    life.books.adopt(told.fragment, told.version)
            case ev.AskAgain(incarnation=incarnation) if incarnation == life.incarnation:
                for offer in [o for o in life.sent if (o.fragment, o.base) == (told.fragment, told.base)][-1:]:
                    self._send(life, offer)
            case ev.Close(incarnation=incarnation) | ev.TellClosed(incarnation=incarnation):
                if incarnation == life.incarnation:
                    self._start(life.name)

    def _settle(self, life: Life, told: ev.Commit | ev.Settle) -> None:
        for v in told.verdicts:
            if v.incarnation == life.incarnation:
                life.books.outcome(
                    Verdict(
                        incarnation=v.incarnation,
                        fragment=v.fragment,
                        base=v.base,
                        applied=v.applied,
                        tokens=v.tokens,
                    )
                )

    def _answer(self, life: Life) -> None:
        calls, life.calls = life.calls, []
        for call in calls:
            if life.books.version(call.fragment) > call.base:
                continue
            if life.books.holds(call.fragment) and life.books.version(call.fragment) == call.base:
                self._contribute(life, call.fragment, call.round)
                continue
            self._decline(life, call)

    def _decline(self, life: Life, call: ev.OpenRound) -> None:
        entry = self.entry()
        self.put(life.name, ev.Declined(life.name, life.incarnation, call.fragment, call.round, "no", entry), entry)

    def _contribute(self, life: Life, fragment: int, round_: int) -> None:
        snapshot = life.books.snapshot(fragment)
        if not life.books.send(fragment, snapshot):
            return
        offer = self._offer(life, fragment, snapshot.base, round_, snapshot.tokens, b"")
        offer = dataclasses.replace(
            offer,
            steps=snapshot.steps,
            processed=snapshot.figures.processed,
            discarded=snapshot.figures.discarded,
        )
        self._send(life, offer)

    def _send(self, life: Life, offer: ev.Offer) -> None:
        offer = dataclasses.replace(offer, entry=self.entry())
        life.sent.append(offer)
        self.put(life.name, ev.Offered(offer), offer.entry)

    def _offer(self, life: Life, fragment: int, base: int, round_: int, tokens: int, entry: bytes) -> ev.Offer:
        return ev.Offer(
            sender=life.name,
            incarnation=life.incarnation,
            fragment=fragment,
            timeline=TIMELINE,
            base=base,
            base_digest=digest(fragment, base),
            round=round_,
            tokens=tokens,
            steps=1,
            loss=None,
            processed=tokens,
            discarded=0,
            claim=claim(life.name),
            entry=entry,
        )
