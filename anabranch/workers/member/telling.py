"""What a member says of itself in its log: what it waits for, how training goes, what it did in the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from anabranch.workers.member.books import Books
from anabranch.workers.member.heart import Vitals

log = logging.getLogger("anabranch.worker")

SAID_AFTER_S = 3.0  # nobody waits longer without being told for what
AGAIN_S = 15.0
EVERY_S = 15.0  # between two lines while all goes well


class Waiting:
    """What is waited for, in one sentence; said once it takes long, and now and then again."""

    def __init__(self) -> None:
        self.what = ""
        self._since = self._said_at = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether `on` would say it, if it is the same as before."""
        now = time.monotonic()
        return now - self._since >= SAID_AFTER_S and (self._said_at < self._since or now - self._said_at >= AGAIN_S)

    def on(self, what: str) -> None:
        """This is waited for now."""
        if what != self.what:
            self.what, self._since, self._said_at = what, time.monotonic(), 0.0
        elif self.due:
            self._said_at = time.monotonic()
            log.info("waiting: %s (for %.0f s)", what, self._said_at - self._since)

    def over(self) -> None:
        self.what = ""


class Telling:
    """Figures of one process over all of its incarnations. The lines are for people."""

    def __init__(self, vitals: Vitals) -> None:
        self._vitals = vitals
        self._began = time.monotonic()
        self._past = 0, 0, 0.0  # of incarnations that are over: steps, tokens, tokens merged
        self._told = 0, self._began  # tokens at the last line, and when
        self._heldout = -1
        self._summed = False

    def over(self, books: Books, sizes: Sequence[int]) -> None:
        """An incarnation ended."""
        self._past = self._totals(books, sizes)

    def _totals(self, books: Books | None, sizes: Sequence[int]) -> tuple[int, int, float]:
        steps, tokens, merged = self._past
        if books is None:
            return self._past
        total = max(1, sum(sizes))
        mine = sum(m * s for m, s in zip(books.merged, sizes, strict=True)) / total
        return steps + books.steps, tokens + books.processed, merged + mine

    def line(self, books: Books, sizes: Sequence[int], *, run_tokens: int, paused: bool) -> str | None:
        """How it goes; None if there is nothing new to say."""
        vitals, now = self._vitals, time.monotonic()
        run = f"; the run has merged {run_tokens:,} tokens"
        if vitals.heldout_loss is not None:
            if vitals.measured_tokens == self._heldout:
                return None
            self._heldout = vitals.measured_tokens
            return f"held-out loss {vitals.heldout_loss:.3f}, measured at {vitals.measured_tokens:,} tokens{run}"
        steps, tokens, merged = self._totals(books, sizes)
        (before, at), self._told = self._told, (tokens, now)
        if tokens == before and not (paused or vitals.idle):
            return None if tokens == 0 else f"no step for {now - at:.0f} s{run}"
        parts = [f"step {steps:,}"]
        if vitals.loss is not None:
            parts.append(f"loss {vitals.loss:.3f}")
        parts.append(f"{(tokens - before) / max(now - at, 1e-9):,.0f} tokens/s")
        parts.append(f"{merged / tokens:.0%} merged" if tokens else "nothing trained yet")
        if vitals.idle:
            parts.append("waits for data")
        if paused:
            parts.append("no rounds open: the run is paused")
        return ", ".join(parts) + run

    def summary(self, books: Books | None, sizes: Sequence[int], bytes_sent: int, why: str) -> None:
        """In the log, once, at whatever end."""
        if self._summed:
            return
        self._summed = True
        steps, tokens, merged = self._totals(books, sizes)
        did = "nothing trained"
        if self._vitals.heldout_loss is not None:
            did = f"held-out loss {self._vitals.heldout_loss:.3f} in the end"
        elif tokens:
            did = f"{steps:,} steps, {tokens:,} tokens trained ({merged / tokens:.0%} merged)"
            did += f", {bytes_sent / 1e6:.1f} MB sent"
        log.info("%s, after %.0f s: %s", why, time.monotonic() - self._began, did)
