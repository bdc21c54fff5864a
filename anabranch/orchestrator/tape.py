"""The tape: every decision with its reason, as a stream and as a file in the run directory."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel

from anabranch.orchestrator.core.instructions import Instruction, Note, Tell
from anabranch.queue.messages import Claim

log = logging.getLogger("anabranch.synchronizer")

FILE_NAME = "tape.jsonl"
PARTS = 4  # files kept; the one that is written among them
DEFAULT_MB = 256  # of all together: a few hours of thirty workers with short rounds
_RECENT = 200  # events the page can show
_LINE_BYTES = 8192  # generous for one event: a merge has a verdict for each worker


Event = dict[str, Any]


def tape_event(instruction: Instruction) -> Event | None:
    """An instruction as an event of the tape, with plain values; None if it is not for the tape."""
    reason = instruction.reason
    match instruction:
        case Note():
            return {"kind": instruction.what, "reason": reason, **plain(instruction.details)}
        case Tell():
            if not instruction.on_tape:
                return None
            said = {**plain(instruction.message), **plain(instruction.details), "reason": reason}
            return {"kind": instruction.on_tape, **said}
    return {"kind": instruction.kind, **plain(instruction)} if instruction.kind else None


def plain(value: Any) -> Any:
    """As JSON and msgpack have it, without claims: where a payload lies says nothing to people."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, BaseModel):
        return plain(dict(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items() if not isinstance(item, Claim)}
    return value


class Tape:
    """Events that are already stored in Redis, kept for the page and appended to `tape.jsonl`.

    Lines are flushed to the operating system as they come and fsynced on `close`. Wall-clock time is only a
    remark for people: nothing is decided by it. `id` numbers a run's events over all leaders; what a crash kept out
    of the file is filled in from the stream by the next one.

    The file is bounded: when it is full it becomes `tape.1.jsonl`, that `tape.2.jsonl` …, and the oldest goes.
    """

    def __init__(self, directory: Path | None, limit_bytes: int = DEFAULT_MB * 2**20) -> None:
        """`limit_bytes`: what all files together may grow to, give or take an event; 0: no limit, one file."""
        self.recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self.number = 0
        self.last_id = 0  # of the newest event stored
        self._next_id = 1
        self._directory = directory
        self._part_bytes = limit_bytes // PARTS
        self._written = 0  # bytes in the current file
        self._file: IO[str] | None = None
        self.failing = False  # the file cannot be written: the stream must keep what is missing
        if directory is not None:
            for event in _last_events(directory, _RECENT):
                self._remember(event)
            self._file = self._open(directory / FILE_NAME)

    def _open(self, path: Path) -> IO[str]:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a", encoding="utf-8")
        if _cut_short(path):
            file.write("\n")
        self._written = path.stat().st_size
        return file

    def stamp(self, event: dict[str, Any]) -> dict[str, Any]:
        """Add the id and the wall-clock time that the stored event carries."""
        self._next_id += 1
        return {"id": self._next_id - 1, "time": round(time.time(), 3), **event}

    def catch_up(self, stored: list[dict[str, Any]]) -> None:
        """Take over from another leader, or a former life: what the stream has and the file lacks, oldest first."""
        for event in stored:
            if event.get("id", 0) > self.last_id:
                self.append(event)
        self._next_id = self.last_id + 1
        self.flush()

    def append(self, event: dict[str, Any]) -> None:
        self._remember(event)
        if self._file is not None:
            line = json.dumps(event, separators=(",", ":")) + "\n"  # ASCII: as many bytes as characters
            if self._part_bytes and self._written and self._written + len(line) > self._part_bytes:
                self._guarded(self._begin_another)
            self._guarded(partial(self._file.write, line))
            self._written += len(line)

    def _begin_another(self) -> None:
        """The file is full: it moves on, and so do those before it. If that fails it goes on to grow."""
        assert self._directory is not None
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        names = [FILE_NAME, *(f"tape.{number}.jsonl" for number in range(1, PARTS))]
        moves = (
            list(itertools.pairwise(names)) if (self._directory / FILE_NAME).exists() else []
        )  # else: a second try
        for newer, older in reversed(moves):
            with suppress(FileNotFoundError):
                (self._directory / newer).replace(self._directory / older)
        full, self._file = self._file, self._open(self._directory / FILE_NAME)
        full.close()

    def _remember(self, event: dict[str, Any]) -> None:
        self.number += 1
        self.last_id = max(self.last_id, event.get("id", 0))
        self.recent.append({"number": self.number, **event})

    def flush(self) -> None:
        if self._file is not None:
            self._guarded(self._file.flush)

    def _guarded(self, action: Callable[[], object]) -> None:
        """A full disk must not end the run: the stream in Redis still has every event."""
        try:
            action()
        except OSError as error:
            if not self.failing:
                log.error("%s cannot be written: %s", FILE_NAME, error)
            self.failing = True
        else:
            self.failing = False

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.flush()
                os.fsync(self._file.fileno())
            with suppress(OSError):
                self._file.close()
            self._file = None


def parts(directory: Path) -> list[Path]:
    """The tape's files in a run directory, oldest first."""
    older = [directory / f"tape.{number}.jsonl" for number in range(PARTS - 1, 0, -1)]
    return [path for path in [*older, directory / FILE_NAME] if path.exists()]


def _cut_short(path: Path) -> bool:
    """Whether a crash left the last line without its end."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _last_events(directory: Path, most: int) -> list[dict[str, Any]]:
    """The end of a tape from an earlier life, oldest first."""
    events: list[dict[str, Any]] = []
    for path in reversed(parts(directory)):
        if len(events) < most:
            events = [*_events_at_the_end(path, most - len(events)), *events]
    return events


def _events_at_the_end(path: Path, most: int) -> list[dict[str, Any]]:
    """A line that a crash cut short is left out."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - most * _LINE_BYTES))
        lines = file.read().splitlines()
    events = []
    for line in lines[-most:]:
        with suppress(ValueError):
            event = json.loads(line)
            if isinstance(event, dict):
                events.append(event)
    return events
