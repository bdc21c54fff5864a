"""What a run decided, decided once more: its journal fed to a fresh core, every decision and reason compared."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from anabranch.errors import UsageError
from anabranch.orchestrator.core import frames
from anabranch.orchestrator.core.port import Batch, Core
from anabranch.orchestrator.core.record import from_image, image

_CHUNK = 1 << 20


@dataclass
class Replayed:
    """What was compared. `difference`: the first one, in a sentence; None if there is none."""

    segments: int = 0
    terms: int = 0
    events: int = 0
    batches: int = 0
    decisions: int = 0
    difference: str | None = None

    @property
    def summary(self) -> str:
        """For people."""
        what = f"{self.decisions:,} decisions in {self.batches:,} batches over {self.events:,} events"
        if self.difference is None:
            return f"the same again: {what}, {self.terms} term{'s' * (self.terms != 1)}"
        return f"first difference, after {what}: {self.difference}"


def replay_decisions(paths: list[Path], on_segment: Callable[[Path, Replayed], None] = lambda p, r: None) -> Replayed:
    """Replay segments, oldest first, up to the first difference. `UsageError` if there are none."""
    if not paths:
        raise UsageError("no journal there: `anabranch orchestrator` and `up` with --dir RUN write RUN/journal")
    total, core = Replayed(), None
    for path in paths:
        core = _replay_segment(path, core, total)
        on_segment(path, total)
        if total.difference is not None:
            total.difference = f"{path.name}: {total.difference}"
            break
    return total


def read_frames(path: Path) -> Iterator[list[Any]]:
    """A segment's frames; one that a crash cut short is left out."""
    decompressor = zlib.decompressobj()
    unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            unpacker.feed(decompressor.decompress(chunk))
            yield from unpacker


def _replay_segment(path: Path, before: Core | None, total: Replayed) -> Core | None:
    """Feed one segment to a core of its own. `before`: the core at the end of the segment before, which has to be as
    this one begins if both are of one term."""
    core: Core | None = None
    out: Batch | None = None
    now = 0.0
    for frame in read_frames(path):
        if frame[0] == frames.IMAGE:
            core = Core(from_image(frame[2]))
            same_term = before is not None and before.state.nonce == core.state.nonce
            total.segments += 1
            total.terms += not same_term
            if before is not None and same_term and image(before.state) != frame[2]:
                total.difference = "it begins with another state than the segment before it ended with"
                return core
            continue
        if core is None:
            total.difference = "it does not begin with a state"
            return None
        match frame[0]:
            case frames.EVENT:
                event, now = frames.read_event(frame, core.state.spec.name)
                core.step(event, now)
                total.events += 1
            case frames.TAKEN:
                out = core.take(everything=frame[1])
                total.difference = _compare(out, frame[2], now)
                total.batches += 1
                total.decisions += len(frame[2])
            case frames.STORED:
                assert out is not None
                core.stored(out, frame[1], frame[2])
        if total.difference is not None:
            return core
    return core


def _compare(batch: Batch | None, recorded: list[list[Any]], now: float) -> str | None:
    """What differs first between a batch and its record."""
    if batch is None:
        return f"at {now:.3f} s nothing is decided, recorded are {len(recorded)} decisions"
    where = f"batch {batch.number}, at {now:.3f} s"
    for index, instruction in enumerate(batch.instructions):
        kind, reason, checksum = frames.said(instruction)
        if index >= len(recorded):
            return f"{where}: {kind} “{reason}” is decided, nothing of it is recorded"
        if [kind, reason] != recorded[index][:2]:
            then = f"{recorded[index][0]} “{recorded[index][1]}”"
            return f"{where}, decision {index + 1}: recorded is {then}, decided now {kind} “{reason}”"
        if checksum != recorded[index][2]:
            return f"{where}, decision {index + 1}: {kind} “{reason}” has another content now: {instruction!r:.400}"
    if len(recorded) > len(batch.instructions):
        kind, reason, _ = recorded[len(batch.instructions)]
        return f"{where}: recorded is {kind} “{reason}”, it is not decided now"
    return None
