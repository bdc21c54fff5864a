"""What the decision core knows. Only the core changes it; everybody may look.

Instants are readings of the core's clock. What of this is stored, and what a successor makes of it, is said in
`record.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Annotated, Literal, TypeVar

from pydantic import PlainSerializer

from anabranch.orchestrator.core.events import Offer
from anabranch.orchestrator.core.grace import Averages
from anabranch.orchestrator.core.ledger import Account
from anabranch.orchestrator.core.stages import TRANSITIONS, Stage
from anabranch.queue.messages import Progress, Register
from anabranch.spec import RoundsSpec, RunSpec

OUTCOMES_KEPT = 8  # per incarnation and fragment: what a resend can still be recognised by
ROUNDS_KEPT = 32  # per fragment: to tell `late` from `stale`
DEPARTED_KEPT = 64
HELDOUT_KEPT = 400
COMMANDS_KEPT = 64

Outcome = tuple[int, bool, int]  # base, applied, tokens
Closed = Literal["all arrived", "grace expired"]
Huge = Annotated[int, PlainSerializer(str)]  # may pass msgpack's 64 bits

T = TypeVar("T")


def keep(items: list[T], item: T, most: int) -> None:
    """Append; the oldest are forgotten."""
    items.append(item)
    del items[:-most]


@dataclass
class LeasedRange:
    """A data range in a worker's hands. Positions count items in the range's own order, from its start."""

    number: int
    epoch: int
    range: int
    start: int  # where this worker began
    stop: int  # items in the range
    delivered: int  # handed to its training loop, as last reported
    settled: int  # nothing below is pending, as last reported
    parted: int = 0  # settled once everything it sent has its outcome, says its farewell


@dataclass
class DataQueue:
    """A dataset cut into ranges, and which of them are handed out."""

    items: int
    fingerprint: str
    range_items: int
    epoch: int = 0  # that is being handed out
    next: int = 0  # place in that epoch's order
    next_lease: int = 1
    done: int = 0  # ranges settled to their end, over all epochs
    redone: int = 0  # items
    left: dict[int, int] = field(default_factory=dict)  # epoch begun and not done: ranges not settled
    returned: list[tuple[int, int, int]] = field(default_factory=list)  # epoch, range, position to go on at

    @property
    def ranges(self) -> int:
        return -(-self.items // self.range_items)

    def length(self, range_: int) -> int:
        """Items in one range; the last may be shorter."""
        return min(self.range_items, self.items - range_ * self.range_items)


@dataclass
class Lately:
    """What had become of a member's tokens at the ends of its last spans (`lately.py`), oldest first: applied,
    rejected and discarded since it joined, parameter-weighted."""

    ends: list[list[float]] = field(default_factory=list)
    merges: int = 0  # of the run, when a span was looked for last


@dataclass
class Member:
    """One incarnation."""

    incarnation: int
    register: Register  # as it was let in
    account: Account
    seen_at: float
    joined_at: float
    live: bool = True
    left: bool = False  # said farewell
    report: Progress | None = None  # its last heartbeat; None: none yet that fits the run's fragments
    adopted: list[int] = field(default_factory=list)  # version per fragment, of this timeline; -1: none
    held: list[int] = field(default_factory=list)  # tokens since it adopted the fragment
    steps: int = 0  # of those it claims, what time allows
    step_s: float = 0.0
    observed_s: float | None = None  # average time per step as the counter shows it
    stepped_at: float | None = None  # when the step counter last advanced; None: not since this leader began
    mark: float = 0.0  # step count at which the current interval began
    known: list[tuple[int, int]] = field(default_factory=list)  # newest (processed, discarded) per fragment
    fetching: dict[bytes, Offer] = field(default_factory=dict)  # by entry: payloads that are being verified
    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    outcome_read: dict[int, int] = field(default_factory=dict)  # fragment: broadcast number of its last outcome
    imbalances: dict[int, int] = field(default_factory=dict)  # fragment: ledger mismatch last noted
    last_round: int = 0  # last merged round it took part in
    lately: Lately = field(default_factory=Lately)  # what became of its newest tokens
    leases: dict[int, LeasedRange] = field(default_factory=dict)  # by number
    wants: int = 0  # ranges it asked for and that were not there
    state_from: int = 0  # incarnation that was asked for its optimizer state on this one's behalf
    claimed_newer: bool = False  # reported a version newer than the run's once: not believed again

    @cached_property
    def name(self) -> str:
        return self.register.name

    @cached_property
    def role(self) -> str:
        return self.register.role

    @cached_property
    def is_worker(self) -> bool:
        return self.role == "worker"

    @property
    def loss(self) -> float | None:
        return self.report.loss if self.report is not None else None

    @property
    def idle(self) -> bool:
        """Makes no steps because there is no data left for it."""
        return self.report is not None and self.report.idle

    @property
    def read(self) -> int:
        """Number of the last broadcast entry it has accounted for."""
        return self.report.read if self.report is not None else 0

    @property
    def processed(self) -> int:
        return self.report.processed if self.report is not None else 0

    @property
    def discarded(self) -> list[int]:
        return self.report.discarded if self.report is not None else [0] * len(self.adopted)

    @property
    def pending(self) -> list[int]:
        return self.report.pending if self.report is not None else [0] * len(self.adopted)

    def size_for(self, fragments: int) -> None:
        """The run has so many fragments; nothing of it is held yet."""
        self.account = Account.empty(fragments)
        self.report, self.lately = None, Lately()
        self.adopted, self.held, self.known = [-1] * fragments, [0] * fragments, [(0, 0)] * fragments

    def remember(self, fragment: int, outcome: Outcome) -> None:
        keep(self.outcomes.setdefault(fragment, []), outcome, OUTCOMES_KEPT)

    def outcome(self, fragment: int, base: int) -> Outcome | None:
        return next((o for o in self.outcomes.get(fragment, ()) if o[0] == base), None)

    def is_history(self, fragment: int, base: int) -> bool:
        """Whether a contribution on `base` had its outcome so long ago that it is not remembered: bases only rise."""
        kept = self.outcomes.get(fragment, ())
        return len(kept) == OUTCOMES_KEPT and base < min(outcome[0] for outcome in kept)

    def learn(self, fragment: int, processed: int, discarded: int) -> None:
        """Take newer cumulative figures of one fragment."""
        old = self.known[fragment]
        if processed > old[0] or discarded > old[1]:
            self.known[fragment] = (max(old[0], processed), max(old[1], discarded))


@dataclass
class Refusal:
    """A contribution on the standing base that is not taken; booked when the base is superseded."""

    tokens: int
    reason: str
    round: int  # open when it was refused; a later round on this base asks again. 0: none


@dataclass
class Round:
    """One open synchronization of one fragment."""

    number: int
    fragment: int
    base: int
    opened_at: float
    deadline_s: float
    called: set[int]
    declined: set[int] = field(default_factory=set)
    stage: Stage = "collecting"
    quorum_at: float | None = None  # when the quorum was first there
    grace_s: float | None = None
    closed: Closed | None = None  # how, once it is merging
    closed_at: float = 0.0
    reason: str = ""
    parts: tuple[tuple[Offer, float], ...] = ()

    def move(self, stage: Stage) -> None:
        assert stage in TRANSITIONS[self.stage], f"round {self.number}: {self.stage} → {stage}"
        self.stage = stage


@dataclass
class Fragment:
    """One fragment's version and what has arrived for it."""

    index: int
    size: int  # parameters
    digest: bytes
    version: int = 0
    in_hand: dict[int, Offer] = field(default_factory=dict)  # verified, on the standing base; by incarnation
    refused: dict[int, Refusal] = field(default_factory=dict)
    recent: list[tuple[int, int]] = field(default_factory=list)  # round, base


@dataclass
class Departed:
    """The final books of a closed incarnation, parameter-weighted."""

    incarnation: int
    name: str
    role: str
    processed: float
    applied: float
    rejected: float
    discarded: float
    lost: float
    left: bool = False  # said farewell
    train_s: float = 0.0
    rest_s: float = 0.0
    life_s: float = 0.0
    bytes_sent: int = 0


@lru_cache(maxsize=16)
def _lowered(rounds: RoundsSpec, fragments: int) -> RoundsSpec:
    return rounds.model_copy(update={"fragments": fragments})


@dataclass
class State:
    """Everything the core decides from."""

    spec: RunSpec
    nonce: str  # of this leader: what it calls a timeline that it begins
    timeline: str = ""
    layout_hash: str | None = None
    fragments: list[Fragment] = field(default_factory=list)
    members: dict[int, Member] = field(default_factory=dict)
    rounds: dict[int, Round] = field(default_factory=dict)
    averages: Averages = field(default_factory=Averages)
    interval_at: float = 0.0  # when the current interval began
    due_at: float | None = None  # since when a round is due that cannot open yet
    next_round: int = 1
    next_incarnation: int = 1
    next_fragment: int = 0  # where the cycle over fragments stands
    asked_init: int = 0  # incarnation asked for version 0
    init_given: bool = False  # version 0 comes from a file: nobody is asked
    init_reading: bool = False  # one offer of version 0 is being verified
    orphaned: bool = False  # unborn, yet a member holds a version: the server lost this run
    paused: bool = False
    stopped: bool = False
    full: bool = False  # the server is nearly out of memory: no round opens
    draining: bool = False  # this synchronizer is about to end: no round opens
    applied_parameter_tokens: Huge = 0  # Σ tokens applied × parameters of the fragment
    counts: dict[str, int] = field(default_factory=dict)  # rounds by how they closed, and mismatches
    heldout: list[tuple[int, float]] = field(default_factory=list)  # global tokens, nats/token
    departed_books: list[list[int]] = field(default_factory=list)  # applied, rejected, lost per fragment
    departed: list[Departed] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # ids of those that were obeyed
    data: DataQueue | None = None  # None: nobody has asked for a range yet
    changed: set[int] = field(default_factory=set)  # members whose record has to be stored
    removed: set[int] = field(default_factory=set)  # members whose record is to be deleted
    unmarked: list[tuple[int, int]] = field(default_factory=list)  # incarnation, fragment: outcomes not yet stored
    committing: list[float] = field(default_factory=list)  # closing instants of commits not yet stored

    @property
    def born(self) -> bool:
        return bool(self.fragments)

    @property
    def pacing(self) -> RoundsSpec:
        """`spec.rounds` with P as it is: a model of fewer tensors has fewer fragments than the definition says."""
        rounds, count = self.spec.rounds, len(self.fragments)
        return rounds if not 0 < count < rounds.fragments else _lowered(rounds, count)

    @property
    def verifying(self) -> set[tuple[int, int]]:
        """(incarnation, fragment) of contributions whose payloads are on their way."""
        offers = [offer.message for member in self.members.values() for offer in member.fetching.values()]
        return {(said.incarnation, said.fragment) for said in offers}

    @property
    def sizes(self) -> list[int]:
        return [fragment.size for fragment in self.fragments]

    @property
    def merges(self) -> int:
        """Rounds that were merged, of all fragments."""
        return self.counts.get("all arrived", 0) + self.counts.get("grace expired", 0)

    @property
    def tokens(self) -> int:
        """Global tokens applied, parameter-weighted."""
        total = sum(self.sizes)
        return self.applied_parameter_tokens // total if total else 0

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by

    def round_of(self, fragment: int) -> Round | None:
        return next((r for r in self.rounds.values() if r.fragment == fragment), None)

    def speaker(self, incarnation: int, sender: str) -> Member | None:
        """The member, if the incarnation exists and speaks through its own inbox."""
        member = self.members.get(incarnation)
        return member if member is not None and member.name == sender else None
