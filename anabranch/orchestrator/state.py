"""What the decision core knows, and its stored form.

Instants are readings of the core's clock and mean nothing outside the process, so records hold durations: `dump`
turns instants into ages, `load` turns them back. Contributions in hand are not stored: their inbox entries are,
and a new leader reads those again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Literal

from anabranch.orchestrator.events import Offer
from anabranch.orchestrator.grace import Averages
from anabranch.orchestrator.ledger import Account
from anabranch.spec import RunSpec

OUTCOMES_KEPT = 8  # per incarnation and fragment: what a resend can still be recognised by
ROUNDS_KEPT = 32  # per fragment: to tell `late` from `stale`
DEPARTED_KEPT = 64
HELDOUT_KEPT = 400
COMMANDS_KEPT = 64

Outcome = tuple[int, bool, int]  # base, applied, tokens


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
class Member:
    """One incarnation."""

    incarnation: int
    name: str
    nonce: bytes
    role: str
    account: Account
    seen_at: float
    joined_at: float = 0.0
    label: str = ""
    device: str = ""
    can_init: bool = False
    layout_hash: str | None = None
    live: bool = True
    left: bool = False  # said farewell
    steps: int = 0
    step_s: float = 0.0
    observed_s: float | None = None  # average time per step as the counter shows it
    stepped_at: float | None = None  # when the step counter last advanced
    mark: float = 0.0  # step count at which the current interval began
    adopted: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    processed: int = 0
    discarded: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    known: list[tuple[int, int]] = field(default_factory=list)  # newest (processed, discarded) per fragment
    read: int = 0
    outcomes: dict[int, deque[Outcome]] = field(default_factory=dict)
    outcome_read: dict[int, int] = field(default_factory=dict)  # fragment: broadcast number of its last outcome
    imbalances: dict[int, int] = field(default_factory=dict)  # fragment: ledger mismatch last noted
    last_round: int = 0  # last merged round it took part in
    loss: float | None = None
    train_s: float = 0.0
    rest_s: float = 0.0
    life_s: float = 0.0
    bytes_sent: int = 0
    heldout_loss: float | None = None
    leases: dict[int, LeasedRange] = field(default_factory=dict)  # by number
    wants: int = 0  # ranges it asked for and that were not there
    idle: bool = False  # makes no steps because there is no data left for it
    state_from: int = 0  # incarnation that was asked for its optimizer state on this one's behalf; not stored
    claimed_newer: bool = False  # reported a version newer than the run's once: not believed again

    def remember(self, fragment: int, outcome: Outcome) -> None:
        self.outcomes.setdefault(fragment, deque(maxlen=OUTCOMES_KEPT)).append(outcome)

    def outcome(self, fragment: int, base: int) -> Outcome | None:
        return next((o for o in self.outcomes.get(fragment, ()) if o[0] == base), None)

    def is_history(self, fragment: int, base: int) -> bool:
        """Whether a contribution on `base` had its outcome so long ago that it is not remembered: bases only rise."""
        kept = self.outcomes.get(fragment, ())
        return len(kept) == OUTCOMES_KEPT and base < min(outcome[0] for outcome in kept)

    def learn(self, fragment: int, processed: int, discarded: int) -> None:
        """Take newer cumulative figures of one fragment."""
        old = self.known[fragment]
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
    quorum_at: float | None = None
    grace_s: float | None = None
    grace_ended: bool = False  # its timer fired
    overdue: bool = False  # its deadline passed
    closed: Literal["all arrived", "grace expired"] | None = None  # set: merging
    closed_at: float = 0.0
    reason: str = ""
    parts: tuple[tuple[Offer, float], ...] = ()


@dataclass
class Fragment:
    """One fragment's version and what has arrived for it."""

    index: int
    size: int  # parameters
    version: int = 0
    digest: bytes = b""
    in_hand: dict[int, Offer] = field(default_factory=dict)  # verified, on the standing base
    refused: dict[int, Refusal] = field(default_factory=dict)
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=ROUNDS_KEPT))  # round, base


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


@dataclass
class State:
    """Everything the core decides from."""

    spec: RunSpec
    timeline: str = ""
    nonce: str = ""  # of this leader: what it calls a timeline that it begins
    layout_hash: str | None = None
    fragments: list[Fragment] = field(default_factory=list)
    members: dict[int, Member] = field(default_factory=dict)
    rounds: dict[int, Round] = field(default_factory=dict)
    fetching: dict[tuple[int, int, int], Offer] = field(default_factory=dict)  # incarnation, fragment, base
    averages: Averages = field(default_factory=Averages)
    interval_at: float = 0.0  # when the current interval began
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
    applied_parameter_tokens: int = 0  # Σ tokens applied × parameters of the fragment
    counts: dict[str, int] = field(default_factory=dict)  # rounds by how they closed, and mismatches
    heldout: list[tuple[int, float]] = field(default_factory=list)  # global tokens, nats/token
    departed_books: list[list[int]] = field(default_factory=list)  # applied, rejected, lost per fragment
    departed: deque[Departed] = field(default_factory=lambda: deque(maxlen=DEPARTED_KEPT))
    commands: deque[str] = field(default_factory=lambda: deque(maxlen=COMMANDS_KEPT))
    data: DataQueue | None = None  # None: nobody has asked for a range yet
    dirty: set[int] = field(default_factory=set)  # members whose durable record changed
    removed: set[int] = field(default_factory=set)  # members whose record is to be deleted
    unmarked: list[tuple[int, int]] = field(default_factory=list)  # outcomes not yet broadcast
    committing: list[float] = field(default_factory=list)  # closing instants of commits not yet stored

    @property
    def born(self) -> bool:
        return bool(self.fragments)

    @property
    def sizes(self) -> list[int]:
        return [fragment.size for fragment in self.fragments]

    @property
    def tokens(self) -> int:
        """Global tokens applied, parameter-weighted."""
        total = sum(self.sizes)
        return self.applied_parameter_tokens // total if total else 0

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by

    def round_of(self, fragment: int) -> Round | None:
        return next((r for r in self.rounds.values() if r.fragment == fragment), None)


def dump_core(state: State, now: float) -> dict[str, Any]:
    """Everything but members, as plain msgpack-able values."""
    return {
        "spec": state.spec.model_dump(mode="json"),
        "timeline": state.timeline,
        "layout_hash": state.layout_hash,
        "fragments": [
            {
                "size": f.size,
                "version": f.version,
                "digest": f.digest,
                "refused": [[inc, r.tokens, r.reason, r.round] for inc, r in sorted(f.refused.items())],
                "recent": [list(item) for item in f.recent],
            }
            for f in state.fragments
        ],
        "rounds": [
            {
                "number": r.number,
                "fragment": r.fragment,
                "base": r.base,
                "age_s": now - r.opened_at,
                "deadline_s": r.deadline_s,
                "called": sorted(r.called),
            }
            for _, r in sorted(state.rounds.items())
        ],
        "averages": [state.averages.step_s, state.averages.quorum_s, state.averages.sync_s],
        "next": [state.next_round, state.next_incarnation, state.next_fragment],
        "asked_init": state.asked_init,
        "paused": state.paused,
        "stopped": state.stopped,
        "applied_parameter_tokens": str(state.applied_parameter_tokens),  # may pass msgpack's 64 bits
        "counts": dict(sorted(state.counts.items())),
        "heldout": [list(item) for item in state.heldout],
        "departed": [vars(d) for d in state.departed],
        "departed_books": state.departed_books,
        "commands": list(state.commands),
        "data": None if state.data is None else {**vars(state.data), "left": sorted(state.data.left.items())},
    }


def load_core(record: dict[str, Any], spec: RunSpec, now: float) -> State:
    """The inverse of `dump_core`. Rounds whose base is not current are dropped."""
    next_round, next_incarnation, next_fragment = record["next"]
    state = State(
        spec=spec,
        timeline=record["timeline"],
        layout_hash=record["layout_hash"],
        averages=Averages(*record["averages"]),
        next_round=next_round,
        next_incarnation=next_incarnation,
        next_fragment=next_fragment,
        asked_init=record["asked_init"],
        paused=record["paused"],
        stopped=record["stopped"],
        applied_parameter_tokens=int(record["applied_parameter_tokens"]),
        counts=dict(record["counts"]),
        heldout=[(tokens, loss) for tokens, loss in record["heldout"]],
        departed=deque((Departed(**d) for d in record["departed"]), maxlen=DEPARTED_KEPT),
        commands=deque(record["commands"], maxlen=COMMANDS_KEPT),
        departed_books=[list(books) for books in record.get("departed_books", [])],
    )
    if (data := record.get("data")) is not None:
        returned = [(epoch, range_, start) for epoch, range_, start in data["returned"]]
        state.data = DataQueue(**{**data, "left": dict(data["left"]), "returned": returned})
    for index, item in enumerate(record["fragments"]):
        state.fragments.append(
            Fragment(
                index=index,
                size=item["size"],
                version=item["version"],
                digest=item["digest"],
                refused={inc: Refusal(*refusal) for inc, *refusal in item["refused"]},
                recent=deque(((r, b) for r, b in item["recent"]), maxlen=ROUNDS_KEPT),
            )
        )
    for item in record["rounds"]:
        if state.fragments[item["fragment"]].version == item["base"]:
            state.rounds[item["number"]] = Round(
                number=item["number"],
                fragment=item["fragment"],
                base=item["base"],
                opened_at=now - item["age_s"],
                deadline_s=item["deadline_s"],
                called=set(item["called"]),
            )
    return state


_MEMBER_PLAIN = (
    "incarnation", "name", "nonce", "role", "label", "device", "can_init", "layout_hash", "live", "left", "steps",
    "step_s", "mark", "adopted", "held", "processed", "discarded", "pending", "read", "last_round", "loss",
    "train_s", "rest_s", "life_s", "bytes_sent", "heldout_loss", "claimed_newer", "wants", "idle",
)  # fmt: skip


def dump_member(member: Member, now: float) -> dict[str, Any]:
    record: dict[str, Any] = {name: getattr(member, name) for name in _MEMBER_PLAIN}
    record["silent_s"] = now - member.seen_at
    record["leases"] = [list(vars(lease).values()) for _, lease in sorted(member.leases.items())]
    record["known"] = [list(item) for item in member.known]
    record["outcomes"] = [[f, [list(o) for o in outcomes]] for f, outcomes in sorted(member.outcomes.items())]
    return record


def load_member(record: dict[str, Any], account: Account, *, read: int, now: float) -> Member:
    """The inverse of `dump_member`. `read`: the last broadcast number, past every outcome stored so far."""
    member = Member(
        account=account,
        seen_at=now - record["silent_s"],
        joined_at=now,
        leases={number: LeasedRange(number, *rest) for number, *rest in record.get("leases", [])},
        known=[(processed, discarded) for processed, discarded in record["known"]],
        outcomes={f: deque((tuple(o) for o in items), maxlen=OUTCOMES_KEPT) for f, items in record["outcomes"]},
        **{name: record[name] for name in _MEMBER_PLAIN if name in record},  # an older release stored fewer
    )
    member.outcome_read = dict.fromkeys(member.outcomes, read)
    return member
