"""Where the training thread and the I/O thread of a worker meet.

The I/O side leaves calls and new versions here; the training side picks them up at its step boundaries and hands
back contributions. Neither ever waits for the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from anabranch.merge.codecs import Codec, encode
from anabranch.queue import messages
from anabranch.workers.adoption import Adoption, Float32, ParameterStore
from anabranch.workers.books import Books, Snapshot


@dataclass(frozen=True)
class NewVersion:
    """A fetched and verified version of one fragment."""

    fragment: int
    version: int
    digest: bytes
    theta: Float32  # [size], read-only


@dataclass(frozen=True)
class Outgoing:
    """An encoded Δ on its way to the I/O thread."""

    call: messages.Call
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


class Learner:
    """The parameters of one incarnation, its books, and its two mailboxes."""

    def __init__(self, store: ParameterStore, adoption: Adoption, books: Books, codec: Codec) -> None:
        self.store = store
        self.books = books
        self._adoption = adoption
        self._codec = codec
        self._lock = Lock()
        self._calls: deque[messages.Call] = deque()
        self._versions: dict[int, NewVersion] = {}  # newest per fragment
        self._digests: dict[int, bytes] = {}

    # --- the I/O thread -----------------------------------------------------------------------------------

    def call(self, call: messages.Call) -> None:
        with self._lock:
            self._calls.append(call)

    def offer(self, version: NewVersion) -> None:
        """Leave a new version for the next boundary; an older one waiting there is replaced."""
        with self._lock:
            waiting = self._versions.get(version.fragment)
            if waiting is None or waiting.version < version.version:
                self._versions[version.fragment] = version

    # --- the training thread ------------------------------------------------------------------------------

    def boundary(self, loss: float | None, send: Callable[[Outgoing | Refusal], None]) -> list[int]:
        """At a step boundary: adopt what arrived, then answer the calls. Returns the fragments adopted."""
        with self._lock:
            if not self._calls and not self._versions:
                return []
            calls, versions = list(self._calls), list(self._versions.values())
            self._calls.clear()
            self._versions.clear()
        adopted = [v.fragment for v in versions if self._adopt(v)]
        for call in calls:
            answer = self._answer(call, loss)
            if answer is not None:
                send(answer)
        return adopted

    def _adopt(self, version: NewVersion) -> bool:
        if version.version == self.books.version(version.fragment) and (
            self._digests.get(version.fragment) == version.digest
        ):
            return False  # read again after a gap: base and work stay
        self._adoption.adopt(self.store, version.fragment, version.theta)
        self.books.adopt(version.fragment, version.version)
        self._digests[version.fragment] = version.digest
        return True

    def _answer(self, call: messages.Call, loss: float | None) -> Outgoing | Refusal | None:
        held = self.books.version(call.fragment)
        if held > call.base:
            return None  # that round is over
        if held < call.base:
            return Refusal(call, f"holds version {held} of fragment {call.fragment}, asked for {call.base}")
        if self.books.holds(call.fragment) == 0:
            return Refusal(call, "no tokens since the fragment was adopted")
        data = encode(self._codec, self.store.delta(call.fragment))
        snapshot = self.books.snapshot(call.fragment)
        return Outgoing(call, self._digests[call.fragment], snapshot, loss, data, self._codec)
