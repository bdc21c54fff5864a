"""A test bench for the decision core: a fake clock, the timers it set, and members worked by hand.

Nothing waits and nothing runs by itself: the clock moves only where a test says so. While it moves, timers fire
in their order and every member that is not silenced sends a heartbeat each half second.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from anabranch.orchestrator import events as ev
from anabranch.orchestrator.core import Core
from anabranch.orchestrator.ledger import Account
from anabranch.orchestrator.state import State
from anabranch.queue.messages import Claim
from anabranch.spec import RoundsSpec, RunSpec

NONCE = "bench"
TIMELINE = f"0-{NONCE}"
TOKENS = 100  # per step
BEAT_S = 0.5  # heartbeat_s is 1.0

I = TypeVar("I", bound=ev.Instruction)  # noqa: E741


def make_spec(**rounds: Any) -> RunSpec:
    """P = 2 fragments, H = 4 inner steps: a round is due every 2 steps. Deadline 10 s, heartbeat 1 s."""
    return RunSpec(rounds=RoundsSpec(**{"fragments": 2, "inner_steps": 4, **rounds}))


def digest(fragment: int, version: int) -> bytes:
    """The digest of a version's bytes in these tests."""
    return hashlib.sha256(f"{fragment}/{version}".encode()).digest()


def nonce(name: str, life: int = 1) -> bytes:
    return hashlib.md5(f"{name}/{life}".encode(), usedforsecurity=False).digest()


def claim(owner: str) -> Claim:
    return Claim(owner=owner, id="ab", bytes=4, chunk_bytes=1024, codec="bf16", hashes=[b"h" * 32], digest=b"d" * 32)


def only(kind: type[I], instructions: Iterable[ev.Instruction]) -> list[I]:
    """The instructions of one kind."""
    return [i for i in instructions if isinstance(i, kind)]


def one(kind: type[I], instructions: Iterable[ev.Instruction]) -> I:
    """The only instruction of a kind; fails if there is none or more than one."""
    found = only(kind, instructions)
    assert len(found) == 1, f"{len(found)} × {kind.__name__}, expected one"
    return found[0]


def notes(kind: str, instructions: Iterable[ev.Instruction]) -> list[ev.Note]:
    return [note for note in only(ev.Note, instructions) if note.kind == kind]


@dataclass
class Puppet:
    """A member worked by hand: what its next heartbeat says."""

    name: str
    incarnation: int
    fragments: int
    steps: int = 0
    step_s: float = 0.125
    processed: int = 0
    adopted: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    discarded: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    read: int = 0
    silent: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.adopted = [0] * self.fragments
        self.held = [0] * self.fragments
        self.discarded = [0] * self.fragments
        self.pending = [0] * self.fragments

    def train(self, steps: int) -> None:
        self.steps += steps
        self.processed += steps * TOKENS
        self.held = [held + steps * TOKENS for held in self.held]
        self.pending = [pending + steps * TOKENS for pending in self.pending]

    def heartbeat(self) -> ev.Progressed:
        return ev.Progressed(
            sender=self.name,
            incarnation=self.incarnation,
            steps=self.steps,
            step_s=self.step_s,
            adopted=tuple(self.adopted),
            held=tuple(self.held),
            processed=self.processed,
            discarded=tuple(self.discarded),
            pending=tuple(self.pending),
            read=self.read,
            **self.extra,
        )


class Bench:
    """One core and everything around it."""

    def __init__(self, spec: RunSpec | None = None, *, sizes: Sequence[int] = (10, 10), born: bool = True) -> None:
        self.core = Core(spec or make_spec(), NONCE)
        self.now = 0.0
        self.log: list[ev.Instruction] = []  # everything the core ever said
        self.timers: dict[tuple[ev.TimerName, int], float] = {}
        self.puppets: dict[str, Puppet] = {}
        self.broadcast = 0
        self._entries = 0
        self._next_beat = BEAT_S + 1 / 32  # never at the instant of a report: no time, no steps
        self._sizes = tuple(sizes)
        self._keep(self.core.start(self.now))
        if born:
            digests = tuple(digest(p, 0) for p in range(len(sizes)))
            self.send(ev.InitReady(0, "layout", self._sizes, digests))

    @property
    def state(self) -> State:
        return self.core.state

    # --- events -------------------------------------------------------------------------------------------

    def send(self, event: ev.Event) -> list[ev.Instruction]:
        """One event, now."""
        return self._keep(self.core.handle(event, self.now))

    def _keep(self, instructions: list[ev.Instruction]) -> list[ev.Instruction]:
        for timer in only(ev.SetTimer, instructions):
            self.timers[timer.name, timer.round] = self.now + timer.after_s
        self.log += instructions
        return instructions

    def entry(self) -> bytes:
        """A fresh stream id."""
        self._entries += 1
        return b"%d-0" % self._entries

    def elapse(self, seconds: float) -> list[ev.Instruction]:
        """Let time pass: timers fire in their order, members that are not silent send heartbeats."""
        end, mark = self.now + seconds, len(self.log)
        while True:
            timer = min(self.timers, key=lambda key: (self.timers[key], key), default=None)
            at = self.timers[timer] if timer is not None else end + 1
            if min(self._next_beat, at) > end:
                break
            if timer is not None and at <= self._next_beat:
                del self.timers[timer]
                self.now = max(self.now, at)
                self.send(ev.TimerFired(*timer))
            else:
                self.now = max(self.now, self._next_beat)
                self._next_beat += BEAT_S
                self._beat()
        self.now = end
        return self.log[mark:]

    def _beat(self) -> None:
        for puppet in list(self.puppets.values()):
            if not puppet.silent:
                self.send(puppet.heartbeat())

    # --- members ------------------------------------------------------------------------------------------

    def join(self, name: str, *, life: int = 1, **fields: Any) -> list[ev.Instruction]:
        """A process asks for an incarnation; if it is welcomed there is a puppet of that name."""
        result = self.send(ev.Joined(name, nonce(name, life), self.entry(), **fields))
        for welcome in only(ev.Welcome, result):
            self.puppets[name] = Puppet(name, welcome.incarnation, len(self.state.fragments))
        return result

    def worker(self, name: str, *, step_s: float = 0.125) -> Puppet:
        """Join a worker and let it make a first step, from which on it counts as advancing."""
        self.join(name)
        puppet = self.puppets[name]
        puppet.step_s = step_s
        self.steps(**{name: 1})
        return puppet

    def steps(self, **made: int) -> list[ev.Instruction]:
        """Let members make steps side by side, each in its own step time, then report."""
        mark = len(self.log)
        self.elapse(max((n * self.puppets[name].step_s for name, n in made.items()), default=0.0))
        for name, count in made.items():
            self.puppets[name].train(count)
            self.send(self.puppets[name].heartbeat())
        return self.log[mark:]

    # --- contributions ------------------------------------------------------------------------------------

    def offer(self, name: str, fragment: int = 0, **changes: Any) -> ev.Offer:
        """A contribution as this member would send it now."""
        puppet = self.puppets[name]
        base = puppet.adopted[fragment]
        round_ = self.state.round_of(fragment)
        tokens = max(puppet.held[fragment], TOKENS)
        standard: dict[str, Any] = {
            "sender": name,
            "incarnation": puppet.incarnation,
            "fragment": fragment,
            "timeline": TIMELINE,
            "base": base,
            "base_digest": digest(fragment, changes.get("base", base)),
            "round": round_.number if round_ is not None else 0,
            "tokens": tokens,
            "steps": tokens // TOKENS,
            "loss": None,
            "processed": max(puppet.processed, changes.get("tokens", tokens)),
            "discarded": puppet.discarded[fragment],
            "claim": claim(name),
            "entry": self.entry(),
        }
        return ev.Offer(**{**standard, **changes})

    def contribute(self, name: str, fragment: int = 0, **changes: Any) -> list[ev.Instruction]:
        """A contribution whose payload, if the core wants it, is fetched at once."""
        offer = self.offer(name, fragment, **changes)
        result = self.send(ev.Offered(offer))
        return result + [i for fetch in only(ev.Fetch, result) for i in self.send(ev.Fetched(fetch.offer))]

    def merge(self, order: ev.Merge) -> list[ev.Instruction]:
        """The merge is computed, its commit stored, and every member adopts the new version."""
        result = self.send(ev.Merged(order.round, digest(order.fragment, order.base + 1)))
        result = result + self.wrote()
        applied = {v.incarnation: v.tokens for c in only(ev.Commit, result) for v in c.verdicts}
        for puppet in self.puppets.values():
            self.adopt(puppet, order.fragment, order.base + 1, settled=applied.get(puppet.incarnation, 0))
        return result

    def adopt(self, puppet: Puppet, fragment: int, version: int, *, settled: int) -> None:
        """Overwrite: what has no outcome (all but `settled`) is discarded. Reported with the next heartbeat."""
        puppet.adopted[fragment] = version
        puppet.discarded[fragment] += puppet.held[fragment] - settled
        puppet.pending[fragment] -= puppet.held[fragment]
        puppet.held[fragment] = 0
        puppet.read = self.broadcast

    def wrote(self) -> list[ev.Instruction]:
        """Everything decided so far is stored and broadcast."""
        self.broadcast += 1
        return self.send(ev.Wrote(self.broadcast))

    # --- stored form --------------------------------------------------------------------------------------

    def reload(self) -> Core:
        """What a new leader would make of the stored records and the ledger."""
        core, members = self.core.dump(self.now, everything=True)
        accounts = {
            i: Account(list(m.account.applied), list(m.account.rejected), list(m.account.lost))
            for i, m in self.state.members.items()
        }
        return Core.load(
            core,
            list(members.values()),
            accounts,
            spec=self.state.spec,
            nonce=NONCE,
            broadcast=self.broadcast,
            now=self.now,
        )
