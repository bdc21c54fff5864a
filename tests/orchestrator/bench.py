"""A test bench for the decision core: the engine's virtual time, and members worked by hand.

Nothing waits and nothing runs by itself: the clock moves only where a test says so. While it moves, timers fire
in their order and every member that is not silenced sends a heartbeat each half second.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from anabranch.orchestrator.core import events as ev
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.ledger import Account
from anabranch.orchestrator.core.record import core_record, member_record, restore
from anabranch.orchestrator.core.state import State
from anabranch.queue import messages as msg
from anabranch.simulate.engine import Engine
from anabranch.spec import RoundsSpec, RunSpec, WorkersSpec

NONCE = "bench"
TIMELINE = f"0-{NONCE}"
TOKENS = 100  # per step
BEAT_S = 0.5  # heartbeat_s is 1.0

Adoption = Literal["overwrite", "blend", "rebase"]

I = TypeVar("I", bound=do.Instruction)  # noqa: E741
M = TypeVar("M", bound=msg.Message)


def make_spec(adoption: Adoption = "rebase", **rounds: Any) -> RunSpec:
    """P = 2 fragments, H = 4 inner steps: a round is due every 2 steps. Deadline 10 s, heartbeat 1 s."""
    return RunSpec(
        rounds=RoundsSpec(**{"fragments": 2, "inner_steps": 4, **rounds}), workers=WorkersSpec(adoption=adoption)
    )


def digest(fragment: int, version: int) -> bytes:
    """The digest of a version's bytes in these tests."""
    return hashlib.sha256(f"{fragment}/{version}".encode()).digest()


def nonce(name: str, life: int = 1) -> bytes:
    return hashlib.md5(f"{name}/{life}".encode(), usedforsecurity=False).digest()


def claim(owner: str, digest: bytes = b"d" * 32) -> msg.Claim:
    return msg.Claim(owner=owner, id="ab", bytes=4, chunk_bytes=1024, codec="bf16", hashes=[b"h" * 32], digest=digest)


def only(kind: type[I], instructions: Iterable[do.Instruction]) -> list[I]:
    """The instructions of one kind."""
    return [i for i in instructions if isinstance(i, kind)]


def one(kind: type[I], instructions: Iterable[do.Instruction]) -> I:
    """The only instruction of a kind; fails if there is none or more than one."""
    found = only(kind, instructions)
    assert len(found) == 1, f"{len(found)} × {kind.__name__}, expected one"
    return found[0]


def told(kind: type[M], instructions: Iterable[do.Instruction]) -> list[M]:
    """The messages of one kind that members are told."""
    return [tell.message for tell in only(do.Tell, instructions) if isinstance(tell.message, kind)]


def told_one(kind: type[M], instructions: Iterable[do.Instruction]) -> M:
    found = told(kind, instructions)
    assert len(found) == 1, f"{len(found)} × {kind.__name__} told, expected one"
    return found[0]


def why(kind: type[msg.Message], instructions: Iterable[do.Instruction]) -> str:
    """Why the only message of this kind is told."""
    [tell] = [tell for tell in only(do.Tell, instructions) if isinstance(tell.message, kind)]
    return tell.reason


def notes(what: str, instructions: Iterable[do.Instruction]) -> list[do.Note]:
    return [note for note in only(do.Note, instructions) if note.what == what]


def note(what: str, instructions: Iterable[do.Instruction]) -> do.Note:
    """The only note of a kind."""
    found = notes(what, instructions)
    assert len(found) == 1, f"{len(found)} notes {what!r}, expected one"
    return found[0]


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
    timeline: str = TIMELINE
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

    def progress(self) -> msg.Progress:
        said = {
            "incarnation": self.incarnation,
            "steps": self.steps,
            "step_s": self.step_s,
            "adopted": list(self.adopted),
            "held": list(self.held),
            "processed": self.processed,
            "discarded": list(self.discarded),
            "pending": list(self.pending),
            "read": self.read,
            "timeline": self.timeline,
        }
        return msg.Progress.model_validate({**said, **self.extra})

    def heartbeat(self) -> ev.Heard:
        return ev.Heard(self.name, b"", self.progress())


class Bench:
    """One core and everything around it: payloads and merges are worked by hand, too."""

    def __init__(self, spec: RunSpec | None = None, *, sizes: Sequence[int] = (10, 10), born: bool = True) -> None:
        self.engine = self.make_engine(State(spec or make_spec(), NONCE))
        self.puppets: dict[str, Puppet] = {}
        self._entries = 0
        self._sizes = tuple(sizes)
        self.engine.start()
        self.engine.at(BEAT_S + 1 / 32, self._beat)  # never at the instant of a report: no time, no steps
        if born:
            digests = tuple(digest(p, 0) for p in range(len(sizes)))
            self.send(ev.InitReady(0, "layout", self._sizes, digests))

    def make_engine(self, state: State) -> Engine:
        return Engine(state, self)

    @property
    def state(self) -> State:
        return self.engine.state

    @property
    def now(self) -> float:
        return self.engine.now

    @property
    def log(self) -> list[do.Instruction]:
        """Everything the core ever said."""
        return self.engine.log

    def begin(self, work: do.Instruction) -> None:
        pass

    def hear(self, number: int, message: msg.Message, reason: str) -> None:
        pass

    def store(self, instruction: do.Instruction) -> None:
        pass

    # --- events -------------------------------------------------------------------------------------------

    def send(self, event: ev.Event) -> list[do.Instruction]:
        """One event, now."""
        return self.engine.feed(event)

    def say(self, name: str, message: msg.Message, entry: bytes | None = None) -> list[do.Instruction]:
        """A message in this member's inbox ("": the operators'), read now."""
        return self.send(ev.Heard(name, self.entry() if entry is None else entry, message))

    def command(self, action: str, key: str = "", value: Any = None, by: str = "") -> list[do.Instruction]:
        """An operator's command."""
        entry = self.entry()
        said = {"id": f"{self._entries:08x}", "action": action, "key": key, "value": value, "by": by}
        return self.say("", msg.Command.model_validate(said), entry)

    def entry(self) -> bytes:
        """A fresh stream id."""
        self._entries += 1
        return b"%d-0" % self._entries

    def elapse(self, seconds: float) -> list[do.Instruction]:
        """Let time pass: timers fire in their order, members that are not silent send heartbeats."""
        return self.engine.elapse(seconds)

    def _beat(self) -> None:
        self.engine.at(self.now + BEAT_S, self._beat)
        for puppet in list(self.puppets.values()):
            if not puppet.silent:
                self.send(puppet.heartbeat())

    # --- members ------------------------------------------------------------------------------------------

    def join(self, name: str, *, life: int = 1, **fields: Any) -> list[do.Instruction]:
        """A process asks for an incarnation; if it is welcomed there is a puppet of that name."""
        register = msg.Register.model_validate({"nonce": nonce(name, life), "name": name, **fields})
        result = self.say(name, register)
        for welcome in told(msg.Welcome, result):
            count = len(self.state.fragments)
            self.puppets[name] = Puppet(name, welcome.incarnation, count, timeline=self.state.timeline)
        return result

    def worker(self, name: str, *, step_s: float = 0.125) -> Puppet:
        """Join a worker and let it make a first step, from which on it counts as advancing."""
        self.join(name)
        puppet = self.puppets[name]
        puppet.step_s = step_s
        self.steps(**{name: 1})
        return puppet

    def leave(self, name: str, reason: str = "", **fields: Any) -> list[do.Instruction]:
        """It says farewell; heartbeats go on."""
        said = {"incarnation": self.puppets[name].incarnation, "reason": reason, **fields}
        return self.say(name, msg.Farewell.model_validate(said))

    def steps(self, **made: int) -> list[do.Instruction]:
        """Let members make steps side by side, each in its own step time, then report."""
        mark = len(self.log)
        self.elapse(max((n * self.puppets[name].step_s for name, n in made.items()), default=0.0))
        for name, count in made.items():
            self.puppets[name].train(count)
            self.send(self.puppets[name].heartbeat())
        return self.log[mark:]

    # --- contributions ------------------------------------------------------------------------------------

    def offer(self, name: str, fragment: int = 0, *, entry: bytes | None = None, **changes: Any) -> ev.Offer:
        """A contribution as this member would send it now. `processed` and `discarded` change its figures."""
        puppet = self.puppets[name]
        base = changes.get("base", puppet.adopted[fragment] if fragment < puppet.fragments else 0)
        round_ = self.state.round_of(fragment)
        tokens = changes.get("tokens", max(puppet.held[fragment], TOKENS) if fragment < puppet.fragments else TOKENS)
        figures = msg.Figures(
            processed=changes.pop("processed", max(puppet.processed, tokens)),
            discarded=changes.pop("discarded", puppet.discarded[fragment] if fragment < puppet.fragments else 0),
            pending=0,
        )
        said: dict[str, Any] = {
            "incarnation": puppet.incarnation,
            "fragment": fragment,
            "timeline": self.state.timeline,
            "base": base,
            "base_digest": digest(fragment, base),
            "round": round_.number if round_ is not None else 0,
            "tokens": tokens,
            "steps": max(1, tokens // TOKENS),
            "figures": figures,
            "claim": claim(name),
        }
        message = msg.Contribution.model_validate({**said, **changes})
        return ev.Offer(name, entry if entry is not None else self.entry(), message)

    def send_offer(self, offer: ev.Offer) -> list[do.Instruction]:
        """Its envelope is read."""
        return self.send(ev.Heard(offer.sender, offer.entry, offer.message))

    def fetched(self, offer: ev.Offer) -> list[do.Instruction]:
        """Its payload is verified."""
        return self.send(ev.Fetched(offer.message.incarnation, offer.sender, offer.entry))

    def fetch_failed(self, offer: ev.Offer, reason: str, *, gone: bool = False) -> list[do.Instruction]:
        return self.send(ev.FetchFailed(offer.message.incarnation, offer.sender, offer.entry, reason, gone))

    def contribute(self, name: str, fragment: int = 0, **changes: Any) -> list[do.Instruction]:
        """A contribution whose payload, if the core wants it, is fetched at once."""
        result = self.send_offer(self.offer(name, fragment, **changes))
        return result + [i for fetch in only(do.Fetch, result) for i in self.fetched(fetch.offer)]

    def decline(self, name: str, round_: int, reason: str = "no", fragment: int = 0) -> list[do.Instruction]:
        incarnation = self.puppets[name].incarnation
        return self.say(name, msg.Decline(incarnation=incarnation, fragment=fragment, round=round_, reason=reason))

    def commit(self, order: do.Merge) -> list[do.Instruction]:
        """The merge is computed, its commit stored."""
        new = digest(order.fragment, order.base + 1)
        return self.send(ev.Merged(order.round, claim("_", new)))

    def merge(self, order: do.Merge) -> list[do.Instruction]:
        """The same, and every member adopts the new version."""
        result = self.commit(order)
        applied = {v.incarnation: v.tokens for merged in told(msg.Merged, result) for v in merged.verdicts}
        for puppet in self.puppets.values():
            self.adopt(puppet, order.fragment, order.base + 1, settled=applied.get(puppet.incarnation, 0))
        return result

    def adopt(self, puppet: Puppet, fragment: int, version: int, *, settled: int) -> None:
        """Overwrite: what has no outcome (all but `settled`) is discarded. Reported with the next heartbeat."""
        puppet.adopted[fragment] = version
        puppet.discarded[fragment] += puppet.held[fragment] - settled
        puppet.pending[fragment] -= puppet.held[fragment]
        puppet.held[fragment] = 0
        puppet.read = self.engine.broadcast

    # --- stored form --------------------------------------------------------------------------------------

    def reload(self) -> State:
        """What a new leader would make of the stored records and the ledger."""
        return restored(self.state, self.now, self.engine.broadcast)

    def successor(self) -> Bench:
        """The bench of the next leader, with the same members; it has yet to begin."""
        bench = copy.copy(self)
        bench.engine = Engine(self.reload(), bench)
        bench.engine.now, bench.engine.broadcast = self.now, self.engine.broadcast
        return bench


def restored(state: State, now: float, broadcast: int) -> State:
    """What a new leader would make of the stored records and the ledger of this state."""
    members = [member_record(member, now) for member in state.members.values()]
    accounts = {
        i: Account(list(m.account.applied), list(m.account.rejected), list(m.account.lost))
        for i, m in state.members.items()
    }
    return restore(
        core_record(state, now), members, accounts, spec=state.spec, nonce=NONCE, broadcast=broadcast, now=now
    )
