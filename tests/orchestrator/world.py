"""A small world for property tests: several workers, their inboxes, payloads and merges that take their time.

Everything that happens follows from a plan (a list of small steps) and a seed, so that a world can be run twice.
The promises of the core are checked after every single event. What the world itself does happens at multiples of
1/64 s.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.policies import quorum_of
from anabranch.orchestrator.core.record import core_record, member_record
from anabranch.orchestrator.core.state import State
from anabranch.queue import messages as msg
from anabranch.simulate.engine import Engine
from anabranch.workers.member.books import Books
from tests.orchestrator.bench import BEAT_S, NONCE, Adoption, claim, digest, make_spec, only, restored

TICK_S = 1 / 64
NAMES = ("ann", "bob", "cid", "mallory")
STEP_S = {"ann": 0.125, "bob": 0.25, "cid": 0.75, "mallory": 0.125}
FRAGMENTS = 3
TOKENS = 10
SLOWEST_MERGE = 48  # ticks

Plan = list[tuple[str, int, int]]  # what, which worker, how much


@dataclass
class Life:
    """One process that lives on until it is told that its incarnation is over."""

    name: str
    nonce: bytes
    cursor: int  # entries of the broadcast that it has read
    incarnation: int = 0
    timeline: str = ""
    silent: bool = False
    books: Books = field(default_factory=lambda: Books(FRAGMENTS))
    calls: list[msg.Call] = field(default_factory=list)
    sent: list[msg.Contribution] = field(default_factory=list)


class World:
    """Runs a plan; raises AssertionError where a promise is broken."""

    def __init__(self, seed: int, quorum: int = 2, in_flight: int = 2, adoption: Adoption = "rebase") -> None:
        self.random = random.Random(seed)
        self._keeps = adoption != "overwrite"
        spec = make_spec(
            adoption, fragments=FRAGMENTS, inner_steps=6, quorum=quorum, in_flight=in_flight, deadline_min_s=2.0
        )
        self.engine = Engine(State(spec, NONCE), self)
        self.seen: Counter[str] = Counter()
        self.after_each: Callable[[State], object] = lambda _: None  # event
        self.inboxes: dict[str, dict[bytes, ev.Heard | ev.Unreadable]] = {"": {}, **{name: {} for name in NAMES}}
        self.broadcast: list[tuple[int, msg.Message]] = []  # number, entry
        self.lives: dict[str, Life] = {}
        self.versions = [0] * FRAGMENTS
        self.applied: set[tuple[int, int, int]] = set()
        self.booked: set[tuple[int, int, int]] = set()
        self._numbers = 0
        self._checked = 0  # of the log
        self._term = 0
        self.engine.start()
        self.engine.at(BEAT_S, self._beat)
        digests = tuple(digest(p, 0) for p in range(FRAGMENTS))
        self.feed(ev.InitReady(0, "layout", (30, 20, 10), digests))

    @property
    def state(self) -> State:
        return self.engine.state

    @property
    def now(self) -> float:
        return self.engine.now

    @property
    def log(self) -> list[do.Instruction]:
        return self.engine.log

    # --- events and what follows from them ----------------------------------------------------------------

    def feed(self, event: ev.Event) -> None:
        self.engine.feed(event)
        self._check()

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    def put(self, event: ev.Heard | ev.Unreadable) -> None:
        """An entry is added to an inbox and read at once."""
        self.inboxes[event.sender][event.entry] = event
        self.feed(event)

    def say(self, name: str, message: msg.Message) -> None:
        self.put(ev.Heard(name, self.entry(), message))

    def entry(self) -> bytes:
        return b"%d-0" % self.number()

    def begin(self, work: do.Instruction) -> None:
        match work:
            case do.Fetch(offer=offer):
                dice, who = self.random.random(), (offer.message.incarnation, offer.sender, offer.entry)
                result: ev.Event = ev.Fetched(*who)
                if dice < 0.2:
                    result = ev.FetchFailed(*who, "gone" if dice < 0.1 else "not finite", gone=dice < 0.1)
                self._later(self.random.randrange(32), result)
            case do.Merge(round=number, fragment=fragment, base=base):
                failed = self.random.random() < 0.05
                merged = None if failed else claim("_", digest(fragment, base + 1))
                self._later(self.random.randrange(SLOWEST_MERGE), ev.Merged(number, merged, "nothing to merge"))

    def hear(self, number: int, message: msg.Message, reason: str) -> None:
        self.broadcast.append((number, message))

    def store(self, instruction: do.Instruction) -> None:
        if isinstance(instruction, do.Consume):
            for entry in instruction.entries:
                assert self.inboxes[instruction.sender].pop(entry, None) is not None, "consumed what is not there"

    def _later(self, ticks: int, event: ev.Event) -> None:
        """Work that ends with the leader who began it."""
        term = self._term

        def end() -> None:
            if term == self._term:
                self.feed(event)

        self.engine.at(self.now + ticks * TICK_S, end)

    def elapse(self, ticks: int) -> None:
        """Let time pass; what falls due happens in its order."""
        end = self.now + ticks * TICK_S
        while self.engine.advance(end):
            self._check()
        self.engine.now = end

    # --- promises -----------------------------------------------------------------------------------------

    def _check(self) -> None:
        instructions, self._checked = self.log[self._checked :], len(self.log)
        state = self.state
        rounds = list(state.rounds.values())
        assert len({r.fragment for r in rounds}) == len(rounds), "two open rounds of one fragment"
        assert len(rounds) <= state.spec.rounds.in_flight
        for round_ in rounds:
            longest = round_.deadline_s + (round_.grace_s or 0.0) + 2 * TICK_S
            assert round_.closed or self.now <= round_.opened_at + longest, "neither merged nor abandoned"
            assert not round_.closed or self.now <= round_.closed_at + SLOWEST_MERGE * TICK_S
        for order in only(do.Merge, instructions):
            round_ = state.rounds[order.round]
            assert len(order.parts) >= quorum_of(round_, state), "merged below K"
            assert [o.sender for o, _ in order.parts] == sorted(o.sender for o, _ in order.parts)
        for instruction in instructions:
            self._count(instruction)
            if not isinstance(instruction, do.Tell):
                continue
            if isinstance(instruction.message, msg.Merged):
                self._check_merged(instruction.message)
            elif isinstance(instruction.message, msg.Verdicts):
                self._check_verdicts([v for v in instruction.message.verdicts if v.reason != "told again"])
        self.after_each(state)

    def _check_merged(self, merged: msg.Merged) -> None:
        self.versions[merged.fragment] += 1
        assert merged.version == self.versions[merged.fragment], "versions are contiguous"
        self._check_verdicts(merged.verdicts)
        for verdict in merged.verdicts:
            assert verdict.base == merged.version - 1
            if verdict.applied:
                key = (verdict.incarnation, verdict.fragment, verdict.base)
                assert key not in self.applied, "applied twice"
                self.applied.add(key)

    def _check_verdicts(self, verdicts: list[msg.Verdict]) -> None:
        for verdict in verdicts:
            key = (verdict.incarnation, verdict.fragment, verdict.base)
            assert key not in self.booked, "booked twice"
            self.booked.add(key)

    def _count(self, instruction: do.Instruction) -> None:
        self.seen[type(instruction).__name__] += 1
        match instruction:
            case do.Note(what=what, details=details, reason=reason):
                self.seen[what] += 1
                assert not (what == "ledger mismatch" and details.get("name") != "mallory"), reason
                if what == "rejected":
                    self.seen[reason.partition(":")[0]] += 1
            case do.Tell(on_tape=kind, message=message, reason=reason):
                self.seen[kind] += 1
                if isinstance(message, msg.Merged):
                    self.seen[message.closed] += 1
                elif isinstance(message, msg.Abandoned | msg.Verdicts):
                    self.seen[reason.partition(":")[0]] += 1

    def check_books(self) -> None:
        """What the core holds of each (incarnation, fragment) is the sum of what it said should be booked."""
        sums: Counter[tuple[int, int, str]] = Counter()
        for book in only(do.Book, self.log):
            assert book.tokens > 0 or (self._keeps and book.column == "rejected")
            sums[book.incarnation, book.fragment, book.column] += book.tokens
        books = {i: (m.account.applied, m.account.rejected, m.account.lost) for i, m in self.state.members.items()}
        for close in only(do.CloseBooks, self.log):
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
            figures = life.books.farewell()
            del self.lives[name]
            self.say(name, msg.Farewell(incarnation=life.incarnation, figures=figures))

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
        self._command("set", "rounds.quorum", 1 + amount % 3)

    def do_pause(self, _name: str, amount: int) -> None:
        self._command("pause" if amount == 0 else "resume")

    def _command(self, action: str, key: str = "", value: int | None = None) -> None:
        said = {"id": f"{self.number():08x}", "action": action, "key": key, "value": value}
        self.say("", msg.Command.model_validate(said))

    def do_junk(self, name: str, amount: int) -> None:
        """What a broken or hostile member sends."""
        life = self.lives.get("mallory")
        if life is None or not life.incarnation:
            self._start("mallory")
            return
        fragment = amount % FRAGMENTS
        said = self._contribution(life, fragment, self.versions[fragment], 0, TOKENS)
        far = 1000 + self._numbers
        victim = self.lives.get(name, life).incarnation
        junk: list[msg.Message | None] = [
            said.model_copy(update={"base": far}),
            said.model_copy(update={"base": far, "timeline": "1-other"}),
            said.model_copy(update={"base_digest": b"?" * 32}),
            said.model_copy(update={"fragment": 99}),
            said.model_copy(update={"incarnation": victim if name != "mallory" else 999}),
            None,
            msg.Decline(incarnation=victim, fragment=fragment, round=self.state.next_round - 1, reason=""),
        ]
        if amount >= len(junk):
            self.feed(ev.Heard("mallory", b"", self._nonsense(victim)))
        elif (message := junk[amount]) is not None:
            self.say("mallory", message)
        else:
            self.put(ev.Unreadable("mallory", self.entry(), "not msgpack"))

    def _nonsense(self, victim: int) -> msg.Progress:
        """Figures of any length; if they fit, versions that nobody has ever seen."""
        figures = [9] * (self._numbers % 5)
        return msg.Progress(
            incarnation=victim,
            steps=10**9,
            step_s=1e-9,
            adopted=figures,
            held=figures,
            processed=7,
            discarded=figures,
            pending=figures,
            read=0,
            timeline=self.state.timeline,
        )

    def do_return(self, _name: str, _amount: int) -> None:
        """The server may have lost writes (here it has not): a new timeline."""
        self.feed(ev.Returned("the server came back"))

    def do_failover(self, _name: str, _amount: int) -> None:
        """The leader dies; a new one loads what was stored and reads every inbox from the start."""
        before = self._records()
        self.seen["failover"] += 1
        self._term += 1
        self.engine.succeed(restored(self.state, self.now, self.engine.broadcast))
        assert self._records() == before, "stored → restored → stored"
        self._check()
        for inbox in self.inboxes.values():
            for event in list(inbox.values()):
                self.feed(event)

    def _records(self) -> list[bytes]:
        members = [member_record(member, self.now) for member in self.state.members.values()]
        return [core_record(self.state, self.now), *members]

    # --- members ------------------------------------------------------------------------------------------

    def _living(self) -> list[Life]:
        return [self.lives[name] for name in NAMES if name in self.lives and not self.lives[name].silent]

    def _start(self, name: str) -> None:
        nonce = b"%016d" % self.number()
        self.lives[name] = Life(name, nonce, len(self.broadcast))
        self.say(name, msg.Register(name=name, nonce=nonce))
        self.catch_up(self.lives[name])

    def _beat(self) -> None:
        self.engine.at(self.now + BEAT_S, self._beat)
        for life in self._living():
            if life.incarnation and self.lives.get(life.name) is life:
                if self.random.random() < 0.25:
                    self.catch_up(life)
                self._report(life)

    def _report(self, life: Life) -> None:
        if life.incarnation:
            said = {"incarnation": life.incarnation, "timeline": life.timeline}
            figures: dict[str, Any] = {**said, "step_s": STEP_S[life.name], **life.books.report()}
            self.feed(ev.Heard(life.name, b"", msg.Progress.model_validate(figures)))

    def catch_up(self, life: Life) -> None:
        """Read the broadcast from this life's own cursor."""
        while life.cursor < len(self.broadcast) and self.lives.get(life.name) is life:
            _, told = self.broadcast[life.cursor]
            life.cursor += 1
            self._hear(life, told)
            life.books.read(self.broadcast[life.cursor - 1][0])

    def _hear(self, life: Life, told: msg.Message) -> None:
        match told:
            case msg.Welcome(nonce=nonce, incarnation=incarnation) if nonce == life.nonce and not life.incarnation:
                life.incarnation, life.cursor, life.timeline = incarnation, len(self.broadcast), self.state.timeline
                for fragment, version in enumerate(self.versions):
                    life.books.adopt(fragment, version)
            case msg.Refused(nonce=nonce) if nonce == life.nonce:
                del self.lives[life.name]
            case msg.Born(timeline=timeline):
                life.timeline = timeline  # under which nothing was lost
            case msg.Call(called=called) if life.incarnation in called:
                life.calls.append(told)
            case msg.Merged() | msg.Verdicts():
                for verdict in told.verdicts:
                    if verdict.incarnation == life.incarnation:
                        life.books.outcome(verdict)
                if isinstance(told, msg.Merged) and life.incarnation:
                    keep = self._keeps and not life.books.refused(told.fragment) and self.random.random() < 0.75
                    life.books.adopt(told.fragment, told.version, keep=keep)
            case msg.Resend(incarnation=incarnation) if incarnation == life.incarnation:
                for sent in [s for s in life.sent if (s.fragment, s.base) == (told.fragment, told.base)][-1:]:
                    self._send(life, sent)
            case msg.Closed(incarnations=incarnations) if life.incarnation in incarnations:
                self._start(life.name)

    def _answer(self, life: Life) -> None:
        calls, life.calls = life.calls, []
        for call in calls:
            if life.books.version(call.fragment) > call.base:
                continue
            if life.books.holds(call.fragment) and life.books.version(call.fragment) == call.base:
                self._contribute(life, call.fragment, call.round)
                continue
            self._decline(life, call)

    def _decline(self, life: Life, call: msg.Call) -> None:
        said = {"incarnation": life.incarnation, "fragment": call.fragment, "round": call.round, "reason": "no"}
        self.say(life.name, msg.Decline.model_validate(said))

    def _contribute(self, life: Life, fragment: int, round_: int) -> None:
        snapshot = life.books.snapshot(fragment)
        if life.books.send(fragment, snapshot):
            said = self._contribution(life, fragment, snapshot.base, round_, snapshot.tokens)
            self._send(life, said.model_copy(update={"steps": snapshot.steps, "figures": snapshot.figures}))

    def _send(self, life: Life, said: msg.Contribution) -> None:
        life.sent.append(said)
        self.say(life.name, said)

    def _contribution(self, life: Life, fragment: int, base: int, round_: int, tokens: int) -> msg.Contribution:
        return msg.Contribution(
            incarnation=life.incarnation,
            fragment=fragment,
            timeline=life.timeline,
            base=base,
            base_digest=digest(fragment, base),
            round=round_,
            tokens=tokens,
            steps=1,
            figures=msg.Figures(processed=tokens, discarded=0, pending=0),
            claim=claim(life.name),
        )
