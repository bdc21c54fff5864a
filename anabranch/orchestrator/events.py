"""What happens to the decision core, and what it says should be done.

Events go in, instructions come out; both are frozen values. Every instruction carries the reason that the tape,
the log, the page and the tests show.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from anabranch.queue.messages import Claim, Held, Lease

TimerName = Literal["round deadline", "grace", "sweep"]


@dataclass(frozen=True)
class Offer:
    """A contribution as the core sees it: everything but the numbers."""

    sender: str  # whose inbox it came in
    incarnation: int
    fragment: int
    timeline: str
    base: int
    base_digest: bytes
    round: int
    tokens: int
    steps: int
    loss: float | None
    processed: int  # the sender's cumulative figures for this fragment when Δ was taken
    discarded: int
    claim: Claim
    entry: bytes  # id in the sender's inbox


# --- events -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Joined:
    """A registration was read."""

    name: str
    nonce: bytes
    entry: bytes
    label: str = ""
    role: str = "worker"
    layout_hash: str | None = None
    can_init: bool = False
    device: str = ""


@dataclass(frozen=True)
class Progressed:
    """A member's heartbeat."""

    sender: str
    incarnation: int
    steps: int
    step_s: float
    adopted: tuple[int, ...]
    held: tuple[int, ...]
    processed: int
    discarded: tuple[int, ...]
    pending: tuple[int, ...]
    read: int
    loss: float | None = None
    train_s: float = 0.0
    rest_s: float = 0.0
    life_s: float = 0.0
    bytes_sent: int = 0
    heldout_loss: float | None = None
    measured_tokens: int = 0
    timeline: str = ""  # that `adopted` speaks of; "": not said (schema 1)
    leased: int = 0
    leases: tuple[Held, ...] = ()
    idle: bool = False


@dataclass(frozen=True)
class Offered:
    """A contribution's envelope was read."""

    offer: Offer


@dataclass(frozen=True)
class Fetched:
    """A contribution's payload was fetched and verified."""

    offer: Offer


@dataclass(frozen=True)
class FetchFailed:
    """A contribution's payload is unusable (`gone`: expired or deleted, so ask again)."""

    offer: Offer
    reason: str
    gone: bool = False


@dataclass(frozen=True)
class Declined:
    sender: str
    incarnation: int
    fragment: int
    round: int
    reason: str
    entry: bytes


@dataclass(frozen=True)
class Left:
    """A member said farewell. `figures`: (processed, discarded) per fragment, if given."""

    sender: str
    incarnation: int
    reason: str
    entry: bytes
    figures: tuple[tuple[int, int], ...] = ()
    leases: tuple[Held, ...] = ()


@dataclass(frozen=True)
class RangesAsked:
    """A worker asks for data ranges."""

    sender: str
    incarnation: int
    entry: bytes
    items: int
    fingerprint: str
    wanted: int
    after: int


@dataclass(frozen=True)
class StateAsked:
    """A joiner asks for a peer's inner optimizer state. `not_from`: incarnations."""

    sender: str
    incarnation: int
    entry: bytes
    not_from: tuple[int, ...] = ()


@dataclass(frozen=True)
class StateGiven:
    """A peer answers with its state, or says why it has none (no claim)."""

    sender: str
    incarnation: int
    entry: bytes
    to: int
    claim: Claim | None
    reason: str = ""


@dataclass(frozen=True)
class Unreadable:
    """An inbox entry that could not be decoded, or is not allowed there."""

    worker: str
    entry: bytes
    reason: str


@dataclass(frozen=True)
class InitOffered:
    """The worker that was asked sent version 0."""

    sender: str
    incarnation: int
    entry: bytes
    payload: Any  # opaque to the core; handed back in `FetchInit`


@dataclass(frozen=True)
class InitReady:
    """Version 0 was fetched, verified and uploaded (or read from a file: incarnation 0)."""

    incarnation: int
    layout_hash: str
    sizes: tuple[int, ...]  # parameters per fragment
    digests: tuple[bytes, ...]
    entry: bytes | None = None
    payload: Any = None  # opaque to the core; handed back in `Birth`


@dataclass(frozen=True)
class InitFailed:
    incarnation: int
    reason: str
    entry: bytes


@dataclass(frozen=True)
class Troubled:
    """The shell failed at something the run can go on without."""

    reason: str


@dataclass(frozen=True)
class Returned:
    """The stored run was loaded from a server that may have lost acknowledged writes, or from a checkpoint."""

    reason: str


@dataclass(frozen=True)
class MemorySeen:
    """How full the server is, as a share of its limit (0: it has none)."""

    share: float


@dataclass(frozen=True)
class Draining:
    """This synchronizer is about to end: finish merges, open nothing."""


@dataclass(frozen=True)
class TimerFired:
    name: TimerName
    round: int = 0


@dataclass(frozen=True)
class Merged:
    """The new version of a round's fragment is computed and uploaded; None: there is none, `reason` says why."""

    round: int
    digest: bytes | None
    reason: str = ""


@dataclass(frozen=True)
class Wrote:
    """What was decided so far is stored; `broadcast` is the number of the last broadcast entry."""

    broadcast: int


@dataclass(frozen=True)
class Commanded:
    """An operator's command."""

    id: str
    action: str
    entry: bytes
    key: str = ""
    value: int | float | str | None = None
    by: str = ""


Event = (
    Joined
    | Progressed
    | Offered
    | Fetched
    | FetchFailed
    | Declined
    | Left
    | RangesAsked
    | StateAsked
    | StateGiven
    | Unreadable
    | InitOffered
    | InitReady
    | InitFailed
    | Troubled
    | Returned
    | MemorySeen
    | Draining
    | TimerFired
    | Merged
    | Wrote
    | Commanded
)


# --- instructions -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Instruction:
    """Base; `on_tape` kinds become events of the tape."""

    on_tape: ClassVar[bool] = True
    reason: str


@dataclass(frozen=True)
class Welcome(Instruction):
    name: str
    nonce: bytes
    incarnation: int
    role: str
    label: str = ""
    device: str = ""


@dataclass(frozen=True)
class TurnAway(Instruction):
    name: str
    nonce: bytes
    retry: bool
    shared: bool = False  # its inbox is also another member's


@dataclass(frozen=True)
class AskInit(Instruction):
    incarnation: int


@dataclass(frozen=True)
class FetchInit(Instruction):
    on_tape: ClassVar[bool] = False
    incarnation: int
    entry: bytes
    payload: Any


@dataclass(frozen=True)
class Birth(Instruction):
    timeline: str
    payload: Any = field(default=None, repr=False)  # tensors: not for the tape


@dataclass(frozen=True)
class NewTimeline(Instruction):
    """State is older than what members may have seen: every member compares what it holds."""

    timeline: str


@dataclass(frozen=True)
class OpenRound(Instruction):
    round: int
    fragment: int
    timeline: str
    base: int
    called: tuple[int, ...]


@dataclass(frozen=True)
class Fetch(Instruction):
    on_tape: ClassVar[bool] = False
    offer: Offer


@dataclass(frozen=True)
class Drop(Instruction):
    """Forget a payload held in memory."""

    on_tape: ClassVar[bool] = False
    offer: Offer


@dataclass(frozen=True)
class Merge(Instruction):
    on_tape: ClassVar[bool] = False
    round: int
    fragment: int
    base: int
    parts: tuple[tuple[Offer, float], ...]  # with token weights, in a fixed order by worker


@dataclass(frozen=True)
class Verdict:
    """What became of one contribution."""

    incarnation: int
    fragment: int
    base: int
    applied: bool
    tokens: int
    reason: str = ""


@dataclass(frozen=True)
class Commit(Instruction):
    round: int
    fragment: int
    timeline: str
    version: int
    closed: Literal["all arrived", "grace expired"]
    verdicts: tuple[Verdict, ...]
    weights: tuple[tuple[int, int, int, float], ...]  # incarnation, tokens, steps, weight
    tokens: int  # global tokens applied, parameter-weighted


@dataclass(frozen=True)
class Abandon(Instruction):
    round: int
    fragment: int
    base: int


@dataclass(frozen=True)
class Reject(Instruction):
    """A contribution is not taken; booked when its base is superseded."""

    incarnation: int
    name: str
    fragment: int
    base: int
    tokens: int


@dataclass(frozen=True)
class Settle(Instruction):
    """Outcomes outside a commit."""

    verdicts: tuple[Verdict, ...]


@dataclass(frozen=True)
class TellClosed(Instruction):
    """A process still speaks for an incarnation that is over: it has to register anew."""

    incarnation: int


@dataclass(frozen=True)
class AskAgain(Instruction):
    incarnation: int
    fragment: int
    base: int


@dataclass(frozen=True)
class Book(Instruction):
    """Tokens for the ledger."""

    on_tape: ClassVar[bool] = False
    incarnation: int
    fragment: int
    column: Literal["applied", "rejected", "lost"]
    tokens: int


@dataclass(frozen=True)
class Consume(Instruction):
    """Inbox entries whose effect is in the state now."""

    on_tape: ClassVar[bool] = False
    worker: str  # "": the control stream
    entries: tuple[bytes, ...]


@dataclass(frozen=True)
class Gone(Instruction):
    """A member is off the live list; `left`: it said farewell."""

    incarnation: int
    name: str
    left: bool = False


@dataclass(frozen=True)
class Close(Instruction):
    """An incarnation is over: everything it sent has an outcome and its books are final."""

    incarnation: int
    name: str
    lost: int  # parameter-weighted
    books: tuple[tuple[int, int, int], ...]  # applied, rejected, lost per fragment
    last_of_name: bool  # no other incarnation uses the inbox


@dataclass(frozen=True)
class Grant(Instruction):
    """Data ranges for one worker, or none and why."""

    on_tape: ClassVar[bool] = False  # what is leased for the first time is noted
    incarnation: int
    name: str
    timeline: str
    leases: tuple[Lease, ...] = ()
    exhausted: bool = False
    refused: str = ""


@dataclass(frozen=True)
class AskState(Instruction):
    """Ask a worker for its inner optimizer state, for the joiner `to`."""

    incarnation: int
    to: int


@dataclass(frozen=True)
class GiveState(Instruction):
    """Tell the joiner `to` where the state of `incarnation` is, or why it gets none."""

    incarnation: int  # 0: nobody's
    to: int
    claim: Claim | None = field(default=None, repr=False)


@dataclass(frozen=True)
class SetTimer(Instruction):
    on_tape: ClassVar[bool] = False
    name: TimerName
    after_s: float
    round: int = 0


@dataclass(frozen=True)
class Note(Instruction):
    """Something people should see; `kind` is stable, for filters."""

    kind: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChangeSetting(Instruction):
    key: str
    value: int | float | str | None


@dataclass(frozen=True)
class Announce(Instruction):
    """Pause, resume or stop the run."""

    what: Literal["pause", "resume", "stop"]


@dataclass(frozen=True)
class Checkpoint(Instruction):
    """Write a checkpoint now."""
