"""The journal: everything a leading core was given, beside the tape in the run directory.

`anabranch replay decisions RUN` feeds it to a fresh core and compares every decision and reason
(`simulate/replay.py`). It is bounded: segments of compressed frames, of which the oldest go. Each term begins one,
and each begins with an image of the state, so any of them can be replayed by itself. What a batch decided is in the
file before it is stored, so a process that is killed leaves the reasons for all that it did.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from anabranch.orchestrator.core import frames
from anabranch.orchestrator.core.events import Event
from anabranch.orchestrator.core.port import Batch, Core
from anabranch.orchestrator.core.state import State

log = logging.getLogger("anabranch.synchronizer")

FOLDER = "journal"
SUFFIX = ".frames.z"
SEGMENTS = 16  # kept; the one that is written among them
DEFAULT_MB = 128  # of all together
_UNFLUSHED_BYTES = 256 * 1024  # heartbeats that decided nothing wait for the next batch that is stored, or for these
_LEVEL = 1  # heartbeats are alike: more effort saves little


def segments(directory: Path) -> list[Path]:
    """The journal's segments in a run directory, oldest first."""
    return sorted((directory / FOLDER).glob(f"*{SUFFIX}"))


class Journal:
    """Segments of one run directory, as one process writes them."""

    def __init__(self, directory: Path, limit_bytes: int = DEFAULT_MB * 1024 * 1024) -> None:
        self._directory = directory
        self._segment_bytes = limit_bytes // SEGMENTS
        self._file: BinaryIO | None = None  # None: nothing is written (not begun, or the disk is full)
        self._compressor = zlib.compressobj(_LEVEL)
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._written = 0

    @property
    def full(self) -> bool:
        """Time for another segment."""
        return self._file is not None and self._written >= self._segment_bytes

    def begin(self, state: State, note: str) -> None:
        """A new segment, from this state on."""
        self.close()
        with self._guarded():
            folder = self._directory / FOLDER
            folder.mkdir(exist_ok=True)
            before = segments(self._directory)
            number = int(before[-1].name.split(".")[0]) + 1 if before else 1
            for old in before[: max(0, len(before) - SEGMENTS + 1)]:
                old.unlink(missing_ok=True)
            descriptor = os.open(folder / f"{number:08d}{SUFFIX}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            self._file = os.fdopen(descriptor, "wb", buffering=0)
            self._compressor, self._written = zlib.compressobj(_LEVEL), 0
            self.add(frames.image_frame(state, note))
            self.flush()

    def add(self, frame: bytes) -> None:
        if self._file is not None:
            self._waiting.append(frame)
            self._waiting_bytes += len(frame)
            if self._waiting_bytes >= _UNFLUSHED_BYTES:
                self.flush()

    def flush(self) -> None:
        """Everything so far is the operating system's from now on: it outlives this process."""
        if self._file is None or not self._waiting:
            return
        with self._guarded():
            data = self._compressor.compress(b"".join(self._waiting))
            data += self._compressor.flush(zlib.Z_SYNC_FLUSH)
            self._file.write(data)
            self._written += len(data)
        self._waiting, self._waiting_bytes = [], 0

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._file = None

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """A full disk must not end the run. A later segment begins with an image, so it is whole again."""
        try:
            yield
        except OSError as error:
            where = self._directory / FOLDER
            log.error("%s cannot be written: %s; the journal goes on with the next term", where, error)
            if self._file is not None:
                with suppress(OSError):
                    self._file.close()
            self._file = None


class JournaledCore(Core):
    """A core whose port is written down."""

    def __init__(self, state: State, journal: Journal, note: str) -> None:
        """`note`: which term this is, for people."""
        super().__init__(state)
        self._journal = journal
        self._note = note
        journal.begin(state, note)

    def step(self, event: Event, now: float) -> None:
        self._journal.add(frames.event_frame(event, now, self.state.spec.name))
        super().step(event, now)

    def take(self, *, everything: bool = False) -> Batch | None:
        batch = super().take(everything=everything)
        if batch is not None:
            self._journal.add(frames.taken_frame(batch, everything=everything))
            if batch.writes:
                self._journal.flush()
        return batch

    def stored(self, batch: Batch, number: int, now: float) -> None:
        super().stored(batch, number, now)
        self._journal.add(frames.stored_frame(number, now))
        if self._journal.full:
            self._journal.begin(self.state, self._note)
