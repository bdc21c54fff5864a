"""Writing checkpoints: safetensors under the model's own parameter names, the core's state, the manifest last.

What makes a checkpoint complete, and how one is read, is said in `anabranch/checkpoints/`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anabranch._version import VERSION
from anabranch.checkpoints import reading
from anabranch.checkpoints.place import FOLDER, MANIFEST, Create, Folder, log, number_of, open_place
from anabranch.checkpoints.reading import FORMAT, MOMENTUM, STATE, THETA, Restored
from anabranch.checkpoints.tensors import HashedSink, Sink, write_tensors
from anabranch.errors import CheckpointError
from anabranch.faults import fail_at
from anabranch.loops import in_daemon_thread
from anabranch.merge.fragments import Layout
from anabranch.model import unflatten
from anabranch.orchestrator.core.state import State

if TYPE_CHECKING:
    from anabranch.orchestrator.vault import Version

__all__ = ["FOLDER", "Checkpoints", "Restored", "Snapshot", "complete_checkpoints", "take_snapshot"]

#: Equal in two snapshots: nothing was merged between them.
_SAME = ("format", "run", "timeline", "versions", "layout", "spec")


@dataclass(frozen=True)
class Snapshot:
    """A consistent picture of a run: versions are never changed in place, so holding them is enough."""

    manifest: dict[str, Any]  # but for `files`, which is known once they are written
    layout: Layout
    versions: tuple[Version, ...]
    state: bytes  # the core's records, members and ledger: opaque here

    def restored(self, location: str) -> Restored:
        """What reading this moment back would give, without writing it. Shares its arrays."""
        thetas = [version.theta for version in self.versions]
        momenta = [v.momentum if v.momentum is not None else np.zeros_like(v.theta) for v in self.versions]
        return Restored(location, self.manifest, self.layout, thetas, momenta, self.state)


def take_snapshot(state: State, layout: Layout, versions: Sequence[Version], stored: bytes = b"") -> Snapshot:
    """What a checkpoint of this moment contains. Synchronous: nothing changes meanwhile."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "release": VERSION,
        "run": state.spec.name,
        "timeline": state.timeline,
        "tokens": state.tokens,
        "versions": [fragment.version for fragment in state.fragments],
        "heldout": list(state.heldout[-1]) if state.heldout else None,
        "layout": layout.to_wire(),
        "spec": state.spec.model_dump(mode="json"),
    }
    return Snapshot(manifest, layout, tuple(versions), stored)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints in a run directory whose manifest is there and whose files have the right sizes, oldest first."""
    place = Folder(directory / FOLDER)
    return [Path(place.location(name)) for name in place.names() if reading.is_complete(place, name)]


class Checkpoints:
    """The checkpoints of one run in a folder or an object store: written off the event loop, the last few kept.

    **Pruning** follows each save. The newest `keep` complete checkpoints stay, so the newest complete one always
    does: numbers grow with every save, whatever versions do. Of what is older than the newest complete one, other
    complete checkpoints go, and incomplete ones go if nobody can still be writing them; nothing newer is touched.
    Complete means here that the manifest is there and sizes fit: reading all digests at every save would cost more
    than the save.
    """

    def __init__(self, where: str | Path, keep: int) -> None:
        """UsageError if `where` is no folder or URL we can write to."""
        self._place = open_place(where)
        self._keep = keep
        self._lock = asyncio.Lock()
        self._known: str | None = None  # complete: written or verified by us
        self.latest: str | None = None

    async def write(self, snapshot: Snapshot) -> str:
        """Write one in a thread, so that rounds go on; its location. The newest one if nothing was merged since.

        The thread does not hold up the end of the process: a save that is cut off is an incomplete one.

        OSError if it could not be written; the checkpoints before it are untouched then.
        """
        async with self._lock:
            self.latest = await in_daemon_thread(lambda: self._write(snapshot))
        return self.latest

    async def newest(self) -> Restored | None:
        """The newest complete checkpoint; None if there is none at all. Damaged ones are skipped with a warning.

        CheckpointError if all are damaged, the newest is of a later release, or the place cannot be reached.
        """
        try:
            return await asyncio.to_thread(reading.newest, self._place)
        except OSError as error:
            raise CheckpointError(f"{self._place.where}: cannot be read: {error}") from error

    def _write(self, snapshot: Snapshot) -> str:
        if (unchanged := self._unchanged(snapshot)) is not None:
            return self._place.location(unchanged)
        moment = snapshot.restored(self._place.where)
        with self._place.saving(snapshot.manifest["timeline"]) as (name, create):
            files = {}
            for file, flats in ((THETA, moment.thetas), (MOMENTUM, moment.momenta)):
                files[file] = _put(create, file, partial(write_tensors, tensors=unflatten(moment.layout, flats)))
            files[STATE] = _put(create, STATE, lambda sink: sink.write(snapshot.state))
            fail_at("during checkpoint")
            text = json.dumps({**snapshot.manifest, "files": files}, indent=1)
            _put(create, MANIFEST, lambda sink: sink.write(text.encode("ascii")))
        self._known = name
        self._prune()
        return self._place.location(name)

    def _unchanged(self, snapshot: Snapshot) -> str | None:
        """The newest complete checkpoint if it shows the same moment, verified once in a process's life."""
        name = next((n for n in reversed(self._place.names()) if reading.is_complete(self._place, n)), None)
        if name is None:
            return None
        manifest = reading.load_manifest(self._place, name)
        if any(manifest.get(key) != snapshot.manifest[key] for key in _SAME):
            return None
        if name != self._known:
            try:
                reading.verify(self._place, name)
            except CheckpointError as error:
                log.warning("checkpoint %s is written again: %s", self._place.location(name), error)
                return None
            self._known = name
        return name

    def _prune(self) -> None:
        place = self._place
        try:
            names = place.names()
            complete = [name for name in names if reading.is_complete(place, name)]
            if not complete:  # another process removed even ours
                return
            kept, newest = self._best(complete), complete[-1]
            for name in names:
                if name in kept or number_of(name) >= number_of(newest):
                    continue
                if name in complete or place.abandoned(name, newest):
                    place.remove(name)
        except OSError as error:  # the new one is there: what could not be removed is removed next time
            log.warning("old checkpoints in %s are still there: %s", place.where, error)

    def _best(self, complete: list[str]) -> list[str]:
        """The newest few, by what is in them."""

        def rank(name: str) -> tuple[int, ...]:
            try:
                manifest = reading.load_manifest(self._place, name)
            except CheckpointError:
                return ()
            return reading.rank(name, manifest) if reading.is_readable(manifest) else (sys.maxsize,)

        return sorted(complete, key=rank)[-self._keep :]


def _put(create: Create, file: str, write: Callable[[Sink], object]) -> dict[str, Any]:
    """Write one file; its entry in the manifest."""
    with create(file) as opened:
        sink = HashedSink(opened)
        write(sink)
    return {"sha256": sink.hexdigest(), "bytes": sink.bytes}
