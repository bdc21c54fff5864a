"""Where the training thread and the I/O thread of a worker meet.

The I/O side leaves calls and new versions here; the training side picks them up at its step boundaries and hands
back contributions. Neither ever waits for the other.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from anabranch.merge.codecs import Codec, decode, encode
from anabranch.queue import messages, records
from anabranch.workers.member.adoption import Adoption, Float32, ParameterStore
from anabranch.workers.member.books import Books, Snapshot

SPACING_FACTOR = 0.25  # of the moving average of time between calls
LONG_STEP = 0.5  # of that time: a worker with shorter steps answers soon enough at its boundaries
EARLY = 0.25  # of that time: calls may come earlier than expected


@dataclass(frozen=True)
class NewVersion:
    """A fetched and verified version of one fragment."""

    fragment: int
    version: int
    digest: bytes
    theta: Float32  # [size], read-only
    timeline: str = ""


@dataclass(frozen=True)
class Outgoing:
    """An encoded Δ on its way to the I/O thread. `round` 0: nobody called for it, it is a farewell."""

    fragment: int
    round: int
    timeline: str
    base_digest: bytes
    snapshot: Snapshot
    loss: float | None
    data: memoryview
    codec: str


@dataclass(frozen=True)
class Refusal:
    """A call that cannot be answered."""

    call: messages.Call
    reason: str


@dataclass(frozen=True)
class _Copy:
    """A Δ taken ahead of its call."""

    snapshot: Snapshot
    base_digest: bytes
    data: memoryview


class Learner:
    """The parameters of one incarnation, its books, and its two mailboxes.

    A worker whose steps are long, compared with the time between calls, would answer late, and everybody trains on
    meanwhile what is lost when the merged fragment arrives. So at each boundary it copies the fragments that are
    likely to be called for before the next one, and the I/O thread answers from those.
    """

    def __init__(
        self,
        store: ParameterStore,
        adoption: Adoption,
        books: Books,
        codec: Codec,
        clock: Callable[[], float] = time.monotonic,
        exact: Sequence[int] = (),
    ) -> None:
        """`exact`: of each fragment, how many elements at its end are sent as they are (buffers); none is no."""
        self.store = store
        self.books = books
        self._adoption = adoption
        self._codec: Codec = codec
        self._clock = clock
        self._exact = exact
        self._lock = Lock()
        self._calls: deque[messages.Call] = deque()
        self._versions: dict[int, NewVersion] = {}  # newest per fragment
        self._digests: dict[int, bytes] = {}
        self._copies: dict[int, _Copy] = {}
        self._sent: dict[int, dict[int, memoryview]] = {}  # by fragment and tokens, on its base: for `keeps` only
        self._newest_round = 0
        self._heard_at: float | None = None
        self._spacing_s: float | None = None  # between two calls, to whomever
        self._next_fragment = 0
        self._loss: float | None = None
        self._timeline = ""

    # --- the I/O thread -----------------------------------------------------------------------------------

    @property
    def timeline(self) -> str:
        """The one whose versions are held; empty before the first was read."""
        with self._lock:
            return self._timeline

    def go_on_under(self, timeline: str) -> None:
        """What is held stays; what waited to be adopted or answered belonged to an earlier timeline."""
        with self._lock:
            if timeline != self._timeline:
                self._timeline = timeline
                self._calls.clear()
                self._versions.clear()
                self._copies.clear()

    def holds(self, fragment: int, version: int, digest: bytes) -> bool:
        """Whether exactly these bits are the fragment's base."""
        with self._lock:
            return self.books.version(fragment) == version and self._digests.get(fragment) == digest

    def heard(self, call: messages.Call) -> None:
        """Any call, also one for others: where the cycle over fragments stands and how fast it turns."""
        now = self._clock()
        with self._lock:
            if call.round <= self._newest_round:
                return  # it calls us, too, once we can answer
            self._newest_round = call.round
            if self._heard_at is not None:
                spacing = now - self._heard_at
                old = self._spacing_s
                self._spacing_s = spacing if old is None else old + SPACING_FACTOR * (spacing - old)
            self._heard_at = now
            self._next_fragment = call.fragment + 1

    def call(self, call: messages.Call) -> Outgoing | None:
        """A call for us: answered at once from a copy, or left for the next boundary (None)."""
        with self._lock:
            copy = self._copies.pop(call.fragment, None)
            loss = self._loss
        if copy is not None and copy.snapshot.base == call.base and self._send(call.fragment, copy):
            return self._outgoing(call.fragment, call.round, copy, loss)
        with self._lock:
            self._calls.append(call)
        return None

    def offer(self, version: NewVersion) -> None:
        """Leave a new version for the next boundary; an older one waiting there is replaced.

        One of a timeline that is over (its download took long) is not taken.
        """
        with self._lock:
            if version.timeline != self._timeline:
                return
            waiting = self._versions.get(version.fragment)
            if waiting is None or waiting.version < version.version:
                self._versions[version.fragment] = version

    # --- the training thread ------------------------------------------------------------------------------

    def boundary(
        self, loss: float | None, send: Callable[[Outgoing | Refusal], None], step_s: float = 0.0
    ) -> list[int]:
        """At a step boundary: adopt what arrived, answer the calls, copy what falls due within `step_s`.

        `step_s`: how long until the next boundary. Returns the fragments adopted.
        """
        with self._lock:
            calls, versions = list(self._calls), list(self._versions.values())
            self._calls.clear()
            self._versions.clear()
            self._loss = loss
        adopted = [v.fragment for v in versions if self._adopt(v)]
        for call in calls:
            answer = self._answer(call, loss)
            if answer is not None:
                send(answer)
        self._copy_due(step_s)
        return adopted

    def _adopt(self, version: NewVersion) -> bool:
        if self.holds(version.fragment, version.version, version.digest):
            return False  # read again after a gap: base and work stay
        kept = 0 <= self.books.version(version.fragment) < version.version and self._carry(version)
        if not kept:
            self.store.load(version.fragment, version.theta)
        with self._lock:
            self.books.adopt(version.fragment, version.version, keep=kept)
            self._digests[version.fragment] = version.digest
            self._sent.pop(version.fragment, None)
        return True

    def _carry(self, version: NewVersion) -> bool:
        """Adopt and keep what was not merged, if the policy does that."""
        fragment = version.fragment
        if self.books.refused(fragment):
            return False
        # The verdict on our contribution is read before the version that contains it is fetched.
        tokens = self.books.applied(fragment)
        with self._lock:
            data = self._sent.get(fragment, {}).get(tokens) if tokens else None
        exact = self._exact_of(fragment)
        applied = decode(self._codec, data, version.theta.size, exact) if data is not None else None
        held = self.books.holds(fragment)
        return self._adoption.carry(self.store, fragment, version.theta, applied, (held - tokens) / max(1, held))

    def _send(self, fragment: int, copy: _Copy) -> bool:
        """Note a contribution; False if it is of no use any more."""
        if not self.books.send(fragment, copy.snapshot):
            return False
        if self._adoption.keeps:
            with self._lock:
                self._sent.setdefault(fragment, {})[copy.snapshot.tokens] = copy.data
        return True

    def _answer(self, call: messages.Call, loss: float | None) -> Outgoing | Refusal | None:
        held = self.books.version(call.fragment)
        if held > call.base:
            return None  # that round is over
        if held < call.base:
            return Refusal(call, f"holds version {held} of fragment {call.fragment}, asked for {call.base}")
        if self.books.holds(call.fragment) == 0:
            return Refusal(call, "no tokens since the fragment was adopted")
        copy = self._copy(call.fragment)
        if not self._send(call.fragment, copy):
            return None  # an earlier contribution on this base was merged meanwhile
        return self._outgoing(call.fragment, call.round, copy, loss)

    def lost_to(self, state: records.Snapshot, timeline: str) -> str | None:
        """For the I/O thread: why nothing of ours can go on. The run as `state` shows it does not know us, or went
        back to before what we have seen. `timeline`: the one followed so far."""
        if state.own is None:
            return "unknown to the run"
        name = state.head.timeline
        if name == timeline:
            return None
        for fragment, record in enumerate(state.fragments):
            held = self.books.version(fragment)
            other_bits = held == record.version and not self.holds(fragment, held, record.theta.digest)
            if other_bits or max([held, *self.books.waiting(fragment)]) > record.version:
                return f"a new timeline ({name}) does not have what fragment {fragment} is based on"
            known = {v.base for v in state.own.outcomes if v.fragment == fragment}  # the newest; bases only rise
            told = self.books.told(fragment)
            if told is not None and told not in known and told >= min(known, default=0):
                return f"a new timeline ({name}) lost an outcome of fragment {fragment}"
        return None

    def farewell(self) -> list[Outgoing]:
        """Leaving: a last contribution for each fragment that has tokens and none in flight."""
        last = []
        for fragment in range(len(self.books)):
            if self.books.version(fragment) >= 0 and self.books.holds(fragment) > 0 and self.books.idle(fragment):
                copy = self._copy(fragment)
                if self._send(fragment, copy):
                    last.append(self._outgoing(fragment, 0, copy, self._loss))
        return last

    def _outgoing(self, fragment: int, round_number: int, copy: _Copy, loss: float | None) -> Outgoing:
        return Outgoing(
            fragment, round_number, self.timeline, copy.base_digest, copy.snapshot, loss, copy.data, self._codec
        )

    def _copy(self, fragment: int) -> _Copy:
        data = encode(self._codec, self.store.delta(fragment), self._exact_of(fragment))
        return _Copy(self.books.snapshot(fragment), self._digests[fragment], data)

    def _exact_of(self, fragment: int) -> int:
        return self._exact[fragment] if self._exact else 0

    def _copy_due(self, step_s: float) -> None:
        with self._lock:
            heard_at, spacing_s, first = self._heard_at, self._spacing_s, self._next_fragment
            self._copies.clear()  # those of the boundary before are stale
        if heard_at is None or spacing_s is None or step_s <= LONG_STEP * spacing_s:
            return
        count = len(self.books)
        spacing_s = max(spacing_s, 1e-6)
        calls = (self._clock() + step_s - heard_at) / spacing_s + EARLY  # until the next boundary, since the last one
        due = min(count, int(calls), math.ceil(step_s / spacing_s) + 1)  # none may come for long, as in a pause
        for fragment in ((first + offset) % count for offset in range(due)):
            if self.books.version(fragment) >= 0 and self.books.holds(fragment) > 0:
                copy = self._copy(fragment)
                with self._lock:
                    self._copies[fragment] = copy
