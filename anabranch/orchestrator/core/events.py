"""What happens to the decision core. Events are frozen values; whatever a member says is one kind of event."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from anabranch.queue.messages import Claim, Contribution, Message

TimerName = Literal["round deadline", "grace", "sweep"]


@dataclass(frozen=True)
class Heard:
    """A message was read from a stream. `sender`: whose inbox or progress stream it was; "": the operators'."""

    sender: str
    entry: bytes  # its id there; b"": nothing has to be consumed (heartbeats)
    message: Message
    data: bytes = field(default=b"", compare=False, repr=False)  # the envelope as it was read, for the journal


@dataclass(frozen=True)
class Offer:
    """A contribution that was heard. What tells it from every other is where it lies."""

    sender: str
    entry: bytes
    message: Contribution

    def is_same(self, other: Offer) -> bool:
        return (self.sender, self.entry) == (other.sender, other.entry)


@dataclass(frozen=True)
class Unreadable:
    """An entry that could not be decoded, or is not allowed where it was."""

    sender: str
    entry: bytes
    reason: str


@dataclass(frozen=True)
class Started:
    """A leader begins with this state. `fresh`: somebody has just started its process; `init_given`: version 0 comes
    from a file."""

    fresh: bool = True
    init_given: bool = False


@dataclass(frozen=True)
class Returned:
    """The stored run was loaded from a server that may have lost acknowledged writes, or from a checkpoint."""

    reason: str


@dataclass(frozen=True)
class Redefined:
    """The run has no model yet, and was started with another definition than its members know."""

    reason: str


@dataclass(frozen=True)
class Fetched:
    """A contribution's payload was fetched and verified."""

    incarnation: int
    sender: str
    entry: bytes


@dataclass(frozen=True)
class FetchFailed:
    """A contribution's payload is unusable (`gone`: expired or deleted, so ask again)."""

    incarnation: int
    sender: str
    entry: bytes
    reason: str
    gone: bool = False


@dataclass(frozen=True)
class Merged:
    """The new version of a round's fragment is computed and uploaded; None: there is none, `reason` says why."""

    round: int
    claim: Claim | None
    reason: str = ""


@dataclass(frozen=True)
class InitReady:
    """Version 0 was fetched, verified and uploaded (or read from a file: incarnation 0)."""

    incarnation: int
    layout_hash: str
    sizes: tuple[int, ...]  # parameters per fragment
    digests: tuple[bytes, ...]
    entry: bytes | None = None


@dataclass(frozen=True)
class InitFailed:
    incarnation: int
    reason: str
    entry: bytes


@dataclass(frozen=True)
class TimerFired:
    name: TimerName
    round: int = 0


@dataclass(frozen=True)
class Saved:
    """A checkpoint is written, at `where`; "": there is none, `reason` says why. `command`: the operator's who asked
    for it; `last`: the run's, after a stop."""

    where: str
    reason: str = ""
    command: str = ""
    last: bool = False


@dataclass(frozen=True)
class Troubled:
    """The shell failed at something the run can go on without."""

    reason: str


@dataclass(frozen=True)
class MemorySeen:
    """How full the server is, as a share of its limit (0: it has none)."""

    share: float


@dataclass(frozen=True)
class Draining:
    """This synchronizer is about to end: finish merges, open nothing."""


Event = (
    Heard
    | Unreadable
    | Started
    | Returned
    | Redefined
    | Fetched
    | FetchFailed
    | Merged
    | InitReady
    | InitFailed
    | TimerFired
    | Saved
    | Troubled
    | MemorySeen
    | Draining
)
