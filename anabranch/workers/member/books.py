"""The worker's side of the ledger, one page per fragment, in whole tokens, and how far its data is settled.

Every token trains all fragments, so `processed` is one number; what became of a token is a matter of each
fragment. `pending` = in the parameters or on its way without an outcome; `discarded` = overwritten by an adoption
before it was sent. The training thread counts steps, snapshots and adoptions, the I/O thread outcomes and
reports: one lock makes each report consistent with the broadcast number it carries.

A data position is *settled* once it is older than the oldest token still pending in any fragment: whatever then
happens to this worker, nothing of it is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NamedTuple

from anabranch.queue.messages import Figures, Held, Lease, Verdict


class _Sent(NamedTuple):
    """A contribution on a base that was overwritten, without an outcome."""

    first: int  # tokens processed before the first of its own
    tokens: int


@dataclass
class _Page:
    version: int = -1  # adopted; -1: none
    tokens: int = 0  # whose effect is in the parameters and not in the base
    steps: int = 0
    sent: int = 0  # tokens of the newest contribution on this version, 0: none
    steps_sent: dict[int, int] = field(default_factory=dict)  # tokens: steps, of each contribution on this version
    settled: int | None = None  # tokens that contribution was booked with, None: no outcome yet
    applied: bool = False  # whether it was merged
    discarded: int = 0
    told: int | None = None  # base of the contribution whose outcome was told last
    in_flight: dict[int, _Sent] = field(default_factory=dict)  # by base, which is superseded

    @property
    def waits(self) -> bool:
        """Whether the contribution on this version has no outcome."""
        return self.sent > 0 and self.settled is None

    @property
    def kept(self) -> int:
        """Tokens that are not discarded if the parameters are: those of the contribution, as booked or as sent."""
        return self.sent if self.settled is None else self.settled

    @property
    def pending(self) -> int:
        return self.tokens - (self.settled or 0) + sum(sent.tokens for sent in self.in_flight.values())

    def oldest_pending(self, processed: int) -> int:
        """How many tokens were processed before the oldest one that is pending here."""
        waiting = [sent.first for sent in self.in_flight.values() if sent.tokens]
        return min([*waiting, processed - self.tokens + (self.settled or 0)])

    def rebase(self, version: int) -> None:
        """A new base, and what was not merged stays in the parameters."""
        if self.waits:
            self.in_flight[self.version] = _Sent(0, 0)  # its tokens stay pending here, not there
        self.steps = max(0, self.steps - self.steps_sent.get(self.settled or 0, 0))
        self.tokens -= self.settled or 0
        self._begin(version)

    def overwrite(self, version: int, processed: int) -> int:
        """A new base and nothing else in the parameters. Returns tokens discarded."""
        if self.waits:
            self.in_flight[self.version] = _Sent(processed - self.tokens, self.sent)
        discarded = self.tokens - self.kept
        self.discarded += discarded
        self.tokens = self.steps = 0
        self._begin(version)
        return discarded

    def _begin(self, version: int) -> None:
        self.version, self.sent, self.settled, self.applied = version, 0, None, False
        self.steps_sent.clear()


@dataclass
class _Lease:
    """A data range as it is worked through; positions count from the range's own start."""

    stop: int
    delivered: int  # positions below were handed to the training loop
    stepped: int  # and below this one trained on
    settled: int
    marks: deque[tuple[int, int]] = field(default_factory=deque)  # tokens processed, position: after each step


@dataclass(frozen=True)
class Snapshot:
    """What a contribution says of itself, taken with its Δ."""

    base: int
    tokens: int
    steps: int
    figures: Figures


class Books:
    """Thread-safe. `fragments` pages."""

    def __init__(self, fragments: int) -> None:
        self._lock = Lock()
        self._pages = [_Page() for _ in range(fragments)]
        self._leases: dict[int, _Lease] = {}
        self._leased = 0  # number of the newest lease that was taken
        self.processed = 0
        self.steps = 0
        self.merged = [0] * fragments  # tokens of each that became part of the global model
        self._read = 0

    def __len__(self) -> int:
        return len(self._pages)

    # --- the training thread ------------------------------------------------------------------------------

    def step(self, tokens: int) -> None:
        """One inner step trained on `tokens` tokens, and on all data that was delivered before."""
        with self._lock:
            self.processed += tokens
            self.steps += 1
            for page in self._pages:
                page.tokens += tokens
                page.steps += 1
            for lease in self._leases.values():
                if lease.delivered > lease.stepped:
                    lease.stepped = lease.delivered
                    lease.marks.append((self.processed, lease.delivered))

    def deliver(self, lease: int, position: int) -> bool:
        """Data of a lease up to `position` goes to the training loop; False if it is no longer ours."""
        with self._lock:
            held = self._leases.get(lease)
            if held is None:
                return False
            held.delivered = position
            return True

    def version(self, fragment: int) -> int:
        with self._lock:
            return self._pages[fragment].version

    def holds(self, fragment: int) -> int:
        """Tokens whose effect is in the fragment and not in its base."""
        with self._lock:
            return self._pages[fragment].tokens

    def snapshot(self, fragment: int) -> Snapshot:
        """The counters that go with a Δ taken now."""
        with self._lock:
            page = self._pages[fragment]
            figures = Figures(processed=self.processed, discarded=page.discarded, pending=page.pending)
            return Snapshot(page.version, page.tokens, page.steps, figures)

    def idle(self, fragment: int) -> bool:
        """Whether no contribution on the fragment's base was sent."""
        with self._lock:
            return self._pages[fragment].sent == 0

    def waiting(self, fragment: int) -> list[int]:
        """Bases of contributions without an outcome."""
        with self._lock:
            page = self._pages[fragment]
            return [*page.in_flight, *([page.version] if page.waits else [])]

    def told(self, fragment: int) -> int | None:
        """Base of the contribution whose outcome was told last; None if there was none."""
        with self._lock:
            return self._pages[fragment].told

    def send(self, fragment: int, snapshot: Snapshot) -> bool:
        """From now on the snapshot's tokens wait for an outcome; False if its base was overwritten meanwhile."""
        with self._lock:
            page = self._pages[fragment]
            if page.version != snapshot.base or page.settled is not None:
                return False
            page.sent = snapshot.tokens
            page.steps_sent[snapshot.tokens] = snapshot.steps
            return True

    def applied(self, fragment: int) -> int:
        """Tokens of ours on the current base that were merged; 0 if none were, or it is not known yet."""
        with self._lock:
            page = self._pages[fragment]
            return (page.settled or 0) if page.applied else 0

    def refused(self, fragment: int) -> bool:
        """Whether the run refused what is in the parameters for what it is (not finite, too large a step): carried
        over, it would be refused for ever."""
        with self._lock:
            page = self._pages[fragment]
            return bool(page.settled) and not page.applied

    def adopt(self, fragment: int, version: int, *, keep: bool = False) -> int:
        """The fragment has a new base. Returns tokens discarded: none if what was not merged is kept (`keep`), else
        all that was not sent."""
        with self._lock:
            page = self._pages[fragment]
            if not keep:
                return page.overwrite(version, self.processed)
            page.rebase(version)
            return 0

    # --- the I/O thread -----------------------------------------------------------------------------------

    def outcome(self, verdict: Verdict) -> None:
        """A contribution was booked. Repeats change nothing."""
        base, tokens = verdict.base, verdict.tokens
        with self._lock:
            page = self._pages[verdict.fragment]
            if page.version == base:
                if not page.waits:
                    return
                page.settled, page.applied, page.told = tokens, verdict.applied, base
            elif (sent := page.in_flight.pop(base, None)) is not None:
                page.told = base
                page.discarded += max(0, sent.tokens - tokens)  # a newer snapshot replaced the booked one too late
            else:
                return
            self.merged[verdict.fragment] += tokens if verdict.applied else 0

    def has_outcome(self, fragment: int, base: int) -> bool:
        """Whether a contribution on `base` no longer waits."""
        with self._lock:
            page = self._pages[fragment]
            return not page.waits if page.version == base else base not in page.in_flight

    def read(self, number: int, *, anew: bool = False) -> None:
        """Every broadcast entry up to `number` is accounted for. `anew`: under a new timeline, which may be behind
        what was read before."""
        with self._lock:
            self._read = number if anew else max(self._read, number)

    @property
    def last_read(self) -> int:
        """Number of the last broadcast entry that is accounted for."""
        return self._read

    def lease(self, lease: Lease) -> bool:
        """Take a data range; False if it was taken before."""
        with self._lock:
            if lease.number <= self._leased:
                return False
            self._leased = lease.number
            start = lease.start
            self._leases[lease.number] = _Lease(lease.stop, start, start, start)
            return True

    def keep_leases(self, numbers: Iterable[int]) -> list[int]:
        """Of the ranges held only these are ours, says the run; returns those given up."""
        with self._lock:
            given_up = sorted(self._leases.keys() - set(numbers))
            for number in given_up:
                del self._leases[number]
            return given_up

    @property
    def leased(self) -> int:
        """Number of the newest lease that was taken."""
        with self._lock:
            return self._leased

    def report(self) -> dict[str, Any]:
        """The ledger fields of a progress message, consistent with each other."""
        with self._lock:
            return {
                "steps": self.steps,
                "processed": self.processed,
                "adopted": [page.version for page in self._pages],
                "held": [page.tokens for page in self._pages],
                "discarded": [page.discarded for page in self._pages],
                "pending": [page.pending for page in self._pages],
                "read": self._read,
                "leased": self._leased,
                "leases": self._settle_leases(),
            }

    def _settle_leases(self) -> list[Held]:
        """How far each range is; one that is settled to its end is dropped."""
        settled = min((page.oldest_pending(self.processed) for page in self._pages), default=self.processed)
        held = []
        for number, lease in list(self._leases.items()):
            while lease.marks and lease.marks[0][0] <= settled:
                lease.settled = lease.marks.popleft()[1]
            if lease.settled >= lease.stop:
                del self._leases[number]
            else:
                held.append(Held(number=number, delivered=lease.delivered, settled=lease.settled))
        return held

    def parting(self) -> list[Held]:
        """Leaving: how far each range will be settled once everything that was sent has its outcome."""
        with self._lock:
            return [Held(number=n, delivered=h.delivered, settled=h.stepped) for n, h in self._leases.items()]

    def farewell(self) -> list[Figures]:
        """Leaving: whatever was not sent is discarded; final figures per fragment."""
        with self._lock:
            for page in self._pages:
                page.discarded += page.tokens - page.kept
                page.tokens = page.kept
            return [Figures(processed=self.processed, discarded=p.discarded, pending=p.pending) for p in self._pages]
