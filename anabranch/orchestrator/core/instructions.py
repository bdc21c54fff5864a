"""What the decision core says should be done. Frozen values; each carries the reason that tape, log, page and tests
show.

| when | which |
| --- | --- |
| at once: nobody sees it, and it comes back as an event | `SetTimer`, `Fetch`, `FetchInit`, `Drop`, `Merge` |
| in the write that stores it | `Consume`, `Book`, `Commit`, `Birth`, `NewTimeline`, `CloseBooks`, `ForgetInbox` |
| in that write, for members to read | `Tell` |
| once it is stored | `Checkpoint`, `Ended` |
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from anabranch.orchestrator.core.events import Offer, TimerName
from anabranch.orchestrator.core.ledger import Column
from anabranch.queue.messages import Init, Message


@dataclass(frozen=True)
class Instruction:
    """Base. One with a `kind` becomes an event of the tape."""

    reason: str
    kind: ClassVar[str] = ""


@dataclass(frozen=True)
class Tell(Instruction):
    """Broadcast a message. `on_tape`: as an event of this kind, with these details besides what the message says."""

    message: Message
    on_tape: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Note(Instruction):
    """Something people should see. `what` is stable, for filters."""

    what: str
    details: dict[str, Any] = field(default_factory=dict)


# --- at once ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SetTimer(Instruction):
    """A timer that is set already is set anew."""

    name: TimerName
    after_s: float
    round: int = 0


@dataclass(frozen=True)
class Fetch(Instruction):
    offer: Offer


@dataclass(frozen=True)
class Drop(Instruction):
    """Forget a payload held in memory: a contribution's, told by where that lies."""

    sender: str
    entry: bytes


@dataclass(frozen=True)
class FetchInit(Instruction):
    incarnation: int
    entry: bytes
    message: Init


@dataclass(frozen=True)
class Merge(Instruction):
    round: int
    fragment: int
    base: int
    parts: tuple[tuple[Offer, float], ...]  # with token weights, in a fixed order by worker


# --- in the write -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Consume(Instruction):
    """Inbox entries whose effect is in the state now."""

    sender: str  # "": the control stream
    entries: tuple[bytes, ...]


@dataclass(frozen=True)
class Book(Instruction):
    """Tokens for the ledger."""

    incarnation: int
    fragment: int
    column: Column
    tokens: int


@dataclass(frozen=True)
class Commit(Instruction):
    """What a round's merge gave is its fragment's version from now on."""

    round: int
    fragment: int
    version: int


@dataclass(frozen=True)
class Birth(Instruction):
    """What was read as version 0 is the run's."""

    kind: ClassVar[str] = "born"
    timeline: str


@dataclass(frozen=True)
class NewTimeline(Instruction):
    """State is older than what members may have seen: broadcast numbers jump, every member compares what it holds."""

    kind: ClassVar[str] = "timeline"
    timeline: str
    jump: int


@dataclass(frozen=True)
class CloseBooks(Instruction):
    """An incarnation is over: everything it sent has an outcome and its books are final."""

    kind: ClassVar[str] = "closed"
    incarnation: int
    name: str
    lost: int  # parameter-weighted
    books: tuple[tuple[int, int, int], ...]  # applied, rejected, lost per fragment
    last_of_name: bool  # no other incarnation uses the inbox


@dataclass(frozen=True)
class ForgetInbox(Instruction):
    """Nobody who was let in uses this inbox."""

    name: str


# --- afterwards -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint(Instruction):
    """Write a checkpoint of what is stored now; it comes back as `Saved`, with the same fields."""

    command: str = ""
    last: bool = False


@dataclass(frozen=True)
class Ended(Instruction):
    """The run is stopped, and its last checkpoint is written or cannot be."""


AT_ONCE = (SetTimer, Fetch, FetchInit, Drop, Merge)
