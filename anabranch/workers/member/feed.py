"""Data ranges on their way from the run to the training loop.

The I/O thread asks for ranges and takes what is granted; the training thread takes items out of them, in the order
that (seed, epoch, range) decides. How far each range was trained on and is settled is kept in the worker's books,
next to the tokens. Ranges belong to an incarnation: a new one begins with none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from threading import Condition

import numpy as np

from anabranch.errors import UsageError
from anabranch.queue.messages import Lease
from anabranch.shuffle import Indices, item_order
from anabranch.workers.member.books import Books

AHEAD = 2  # ranges in hand with something left in them: one is worked on, the next is there when it ends


@dataclass
class _Open:
    """A range with items left."""

    lease: Lease
    position: int
    order: Indices  # of its items, from the range's first


@dataclass(frozen=True)
class Items:
    """What a batch is made of: indices into the dataset, all of one epoch."""

    epoch: int
    indices: Indices


class Feed:
    """Thread-safe. One per worker; `restart` for every incarnation."""

    def __init__(self, items: int, fingerprint: str, seed: int, books: Books, on_hungry: Callable[[], None]) -> None:
        """A dataset of `items` items, which `fingerprint` tells from others; `seed` is the run's, `books` are those
        of the incarnation at work.

        `on_hungry` is called, in the training thread, when ranges should be asked for.
        """
        self.items = items
        self.fingerprint = fingerprint
        self._seed = seed
        self._on_hungry = on_hungry
        self._changed = Condition()
        self._open: list[_Open] = []
        self._books = books
        self.exhausted = False  # the run has nothing more to give, for now
        self._refused = ""

    # --- the I/O thread -----------------------------------------------------------------------------------

    def restart(self, books: Books) -> None:
        """A new incarnation: what was in hand belonged to the old one."""
        with self._changed:
            self._open.clear()
            self._books, self.exhausted, self._refused = books, False, ""

    def drop(self) -> None:
        """The incarnation is over: what is in hand is not ours any more."""
        self.restart(self._books)

    def take(self, leases: Iterable[Lease], *, exhausted: bool = False, refused: str = "") -> None:
        """What the run answered. Leases that were taken before are left out."""
        with self._changed:
            self.exhausted, self._refused = exhausted, refused
            for lease in leases:
                if lease.first + lease.stop > self.items or lease.start >= lease.stop:
                    self._refused = f"range {lease.range} does not lie within the dataset's {self.items:,} items"
                elif self._books.lease(lease):
                    order = item_order(lease.stop, self._seed, lease.epoch, lease.range)
                    self._open.append(_Open(lease, lease.start, order))
            self._changed.notify_all()

    def keep(self, leases: Iterable[Lease]) -> None:
        """Of the ranges in hand only these are ours, says the run under a new timeline."""
        with self._changed:
            given_up = set(self._books.keep_leases(lease.number for lease in leases))
            self._open = [item for item in self._open if item.lease.number not in given_up]

    @property
    def wanted(self) -> int:
        """How many ranges to ask for."""
        with self._changed:
            return 0 if self._refused else max(0, AHEAD - len(self._open))

    @property
    def after(self) -> int:
        """Number of the newest lease taken."""
        return self._books.leased

    # --- the training thread ------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether nothing is left for us, for now."""
        with self._changed:
            return self.exhausted and not self._open

    def next(self, count: int, timeout_s: float) -> Items | None:
        """Up to `count` items of one epoch; fewer where data ends. None if there was nothing for `timeout_s`.

        Raises `UsageError` if the run's dataset is another one.
        """
        with self._changed:
            if not self._open and not self._refused:
                self._changed.wait(timeout_s)
            if self._refused:
                raise UsageError(self._refused)
            taken: list[Indices] = []
            epoch = self._open[0].lease.epoch if self._open else 0
            while count > 0 and self._open and self._open[0].lease.epoch == epoch:
                part = self._take(self._open[0], count)
                taken.append(part)
                count -= part.size
                if self._open[0].position >= self._open[0].lease.stop or not part.size:
                    self._open.pop(0)
            hungry = len(self._open) < AHEAD
        if hungry:
            self._on_hungry()
        indices = np.concatenate(taken) if taken else np.empty(0, np.int64)
        return Items(epoch, indices) if indices.size else None

    def _take(self, item: _Open, count: int) -> Indices:
        """The next items of one range; none if it is no longer ours."""
        stop = min(item.position + count, item.lease.stop)
        if not self._books.deliver(item.lease.number, stop):
            return np.empty(0, np.int64)
        part = item.lease.first + item.order[item.position : stop]
        item.position = stop
        return part
