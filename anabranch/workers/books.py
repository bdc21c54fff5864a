"""The worker's side of the ledger, one page per fragment, in whole tokens.

Every token trains all fragments, so `processed` is one number; what became of a token is a matter of each
fragment. `pending` = in the parameters or on its way without an outcome; `discarded` = overwritten by an adoption
before it was sent. The training thread counts steps, snapshots and adoptions, the I/O thread outcomes and
reports: one lock makes each report consistent with the broadcast number it carries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from anabranch.queue.messages import Figures, Verdict


@dataclass
class _Page:
    version: int = -1  # adopted; -1: none
    tokens: int = 0  # trained on since the adoption
    steps: int = 0
    sent: int = 0  # tokens of the newest contribution on this version, 0: none
    settled: int | None = None  # tokens that contribution was booked with, None: no outcome yet
    discarded: int = 0
    told: int | None = None  # base of the contribution whose outcome was told last
    in_flight: dict[int, int] = field(default_factory=dict)  # older base: tokens sent, no outcome

    @property
    def pending(self) -> int:
        return self.tokens - (self.settled or 0) + sum(self.in_flight.values())


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
        self._processed = 0
        self._steps = 0
        self._read = 0

    def __len__(self) -> int:
        return len(self._pages)

    # --- the training thread ------------------------------------------------------------------------------

    def step(self, tokens: int) -> None:
        """One inner step trained on `tokens` tokens."""
        with self._lock:
            self._processed += tokens
            self._steps += 1
            for page in self._pages:
                page.tokens += tokens
                page.steps += 1

    def version(self, fragment: int) -> int:
        with self._lock:
            return self._pages[fragment].version

    def holds(self, fragment: int) -> int:
        """Tokens whose effect is in the fragment since it was adopted."""
        with self._lock:
            return self._pages[fragment].tokens

    def snapshot(self, fragment: int) -> Snapshot:
        """The counters that go with a Δ taken now."""
        with self._lock:
            page = self._pages[fragment]
            figures = Figures(processed=self._processed, discarded=page.discarded, pending=page.pending)
            return Snapshot(page.version, page.tokens, page.steps, figures)

    def idle(self, fragment: int) -> bool:
        """Whether no contribution on the fragment's base was sent."""
        with self._lock:
            return self._pages[fragment].sent == 0

    def waiting(self, fragment: int) -> list[int]:
        """Bases of contributions without an outcome."""
        with self._lock:
            page = self._pages[fragment]
            standing = [page.version] if page.sent and page.settled is None else []
            return [*page.in_flight, *standing]

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
            return True

    def adopt(self, fragment: int, version: int) -> int:
        """The fragment is overwritten by a new version: what was not sent is gone. Returns tokens discarded."""
        with self._lock:
            page = self._pages[fragment]
            if page.settled is not None:
                kept = page.settled
            else:
                kept = page.sent
                if page.sent:
                    page.in_flight[page.version] = page.sent
            discarded = page.tokens - kept
            page.discarded += discarded
            page.version, page.tokens, page.steps, page.sent, page.settled = version, 0, 0, 0, None
            return discarded

    # --- the I/O thread -----------------------------------------------------------------------------------

    def outcome(self, verdict: Verdict) -> None:
        """A contribution was booked. Repeats change nothing."""
        with self._lock:
            self._outcome(verdict.fragment, verdict.base, verdict.tokens)

    def _outcome(self, fragment: int, base: int, tokens: int) -> None:
        page = self._pages[fragment]
        if page.version == base:
            if page.sent and page.settled is None:
                page.settled, page.told = tokens, base
        elif (sent := page.in_flight.pop(base, None)) is not None:
            page.told = base
            page.discarded += sent - tokens  # a newer snapshot replaced the booked one too late

    def has_outcome(self, fragment: int, base: int) -> bool:
        """Whether a contribution on `base` no longer waits."""
        with self._lock:
            page = self._pages[fragment]
            if page.version == base:
                return page.sent == 0 or page.settled is not None
            return base not in page.in_flight

    def read(self, number: int) -> None:
        """Every broadcast entry up to `number` is accounted for."""
        with self._lock:
            self._read = max(self._read, number)

    def read_anew(self, number: int) -> None:
        """Under a new timeline: what was read before may have been numbered higher than the run is now."""
        with self._lock:
            self._read = number

    def report(self) -> dict[str, Any]:
        """The ledger fields of a progress message, consistent with each other."""
        with self._lock:
            return {
                "steps": self._steps,
                "processed": self._processed,
                "adopted": [page.version for page in self._pages],
                "held": [page.tokens for page in self._pages],
                "discarded": [page.discarded for page in self._pages],
                "pending": [page.pending for page in self._pages],
                "read": self._read,
            }

    def farewell(self) -> list[Figures]:
        """Leaving: whatever was not sent is discarded; final figures per fragment."""
        with self._lock:
            for page in self._pages:
                kept = page.sent if page.settled is None else page.settled
                page.discarded += page.tokens - kept
                page.tokens = kept
            return [Figures(processed=self._processed, discarded=p.discarded, pending=p.pending) for p in self._pages]
