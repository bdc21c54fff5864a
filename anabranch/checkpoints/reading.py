"""Reading checkpoints: what makes one complete, and the newest one that is.

A checkpoint is complete exactly if its manifest is there and every file in it has the size and the SHA-256 that the
manifest says. Nothing is handed out before that was checked.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anabranch._version import VERSION
from anabranch.checkpoints.place import FOLDER, MANIFEST, Place, above, below, log, number_of, open_place
from anabranch.checkpoints.tensors import HashedSource, Source, drain, read_all, read_tensors
from anabranch.errors import CheckpointError, MalformedMessage
from anabranch.merge.fragments import Layout
from anabranch.model import Float32

FORMAT = 1
THETA = "theta.safetensors"
MOMENTUM = "momentum.safetensors"
STATE = "state.msgpack"

_KEYS: dict[str, type] = {
    "release": str,
    "run": str,
    "timeline": str,
    "tokens": int,
    "versions": list,
    "layout": dict,
    "spec": dict,
    "files": dict,
}

T = TypeVar("T")


@dataclass(frozen=True)
class Restored:
    """A verified checkpoint. `momenta` is empty if it was not asked for."""

    location: str
    manifest: dict[str, Any]
    layout: Layout
    thetas: list[Float32]  # per fragment: [size]
    momenta: list[Float32]
    state: bytes

    @property
    def tokens(self) -> int:
        """Global tokens applied."""
        return int(self.manifest["tokens"])


def read_checkpoint(where: str | Path, *, momenta: bool = True) -> Restored:
    """Read one: `where` is a checkpoint, or a run directory or folder of checkpoints (its newest complete one).

    CheckpointError if there is none, or if the one that was named is damaged; UsageError for an unusable URL.
    `momenta` False verifies the momentum but does not keep it.
    """
    try:
        if (upper := above(where)) is not None:
            place, name = open_place(upper[0]), upper[1]
            if name and place.size(name, MANIFEST) is not None:
                return _read_named(place, name, momenta)
        for folder in (below(where, FOLDER), where):
            if (restored := newest(open_place(folder), momenta=momenta)) is not None:
                return restored
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error}") from error
    raise CheckpointError(f"{where}: neither a checkpoint ({MANIFEST}) nor a run directory or folder that has one")


def newest(place: Place, *, momenta: bool = True) -> Restored | None:
    """The newest complete checkpoint; None if there is none at all. Damaged ones are skipped with a warning.

    CheckpointError if all are damaged, or if the newest was written by a later release: that is no damage, and
    something older must not quietly take its place. OSError if the place cannot be reached, for the same reason.
    """
    names = place.names()
    found: list[tuple[tuple[int, ...], str, dict[str, Any]]] = []
    for name in reversed(names):
        try:
            manifest = load_manifest(place, name)
        except CheckpointError as error:
            log.warning("checkpoint %s is not used: %s", place.location(name), error)
            continue
        if is_readable(manifest):
            found.append((rank(name, manifest), name, manifest))
        elif not found:
            raise _too_new(place.location(name), manifest)
    for _, name, manifest in sorted(found, key=lambda item: item[0], reverse=True):
        try:
            return _read(place, name, manifest, momenta)
        except CheckpointError as error:
            log.warning("checkpoint %s is not used: %s", place.location(name), error)
    if names:
        raise CheckpointError(
            f"{place.where}: all of its {len(names)} checkpoints are damaged (the warnings say how); bring back a "
            "copy of one, or name another folder to begin anew"
        )
    return None


def rank(name: str, manifest: dict[str, Any]) -> tuple[int, ...]:
    """Where in a run's history a checkpoint was made: a later timeline first, then more tokens, then the number.

    Not the number alone: a leader that stalled and was replaced may finish an old save under the highest one.
    """
    timeline = manifest["timeline"].partition("-")[0]
    return (int(timeline) if timeline.isdecimal() else -1, manifest["tokens"], number_of(name))


def load_manifest(place: Place, name: str) -> dict[str, Any]:
    """The manifest as far as this release knows it; of a later format only `format` and `release` are checked."""
    if place.size(name, MANIFEST) is None:
        raise CheckpointError(f"{MANIFEST} is missing: it was not completely written, or lost it")
    try:
        with place.open(name, MANIFEST) as file:
            manifest = json.loads(file.read())
    except ValueError as error:
        raise CheckpointError(f"{MANIFEST} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or type(manifest.get("format")) is not int:
        raise CheckpointError(f"{MANIFEST} has no `format`, a whole number: it is not one of a checkpoint")
    if is_readable(manifest):
        for key, kind in _KEYS.items():
            if not isinstance(manifest.get(key), kind):
                raise CheckpointError(f"{MANIFEST}: {key} = {manifest.get(key)!r:.100} is no {kind.__name__}")
        for file_name in (THETA, MOMENTUM, STATE):
            _file_entry(manifest, file_name)
    return manifest


def is_readable(manifest: dict[str, Any]) -> bool:
    """Whether this release knows the format."""
    return bool(manifest["format"] <= FORMAT)


def is_complete(place: Place, name: str) -> bool:
    """A quick look: the manifest is there and all sizes fit. Digests are left to reading."""
    try:
        manifest = load_manifest(place, name)
        if is_readable(manifest):
            for file in manifest["files"]:
                _check_size(place, name, file, manifest)
    except CheckpointError:
        return False
    return True


def verify(place: Place, name: str) -> None:
    """CheckpointError if anything in the checkpoint is not as its manifest says."""
    manifest = load_manifest(place, name)
    for file in manifest["files"]:
        _verified(place, name, file, manifest, drain)


def _read_named(place: Place, name: str, momenta: bool) -> Restored:
    location = place.location(name)
    try:
        manifest = load_manifest(place, name)
        if is_readable(manifest):
            return _read(place, name, manifest, momenta)
    except CheckpointError as error:
        raise CheckpointError(f"{location} is damaged: {error}") from None
    raise _too_new(location, manifest)


def _read(place: Place, name: str, manifest: dict[str, Any], momenta: bool) -> Restored:
    try:
        layout = Layout.from_wire(manifest["layout"])
    except MalformedMessage as error:
        raise CheckpointError(f"{MANIFEST}: {error}") from None
    if len(manifest["versions"]) != len(layout.fragments):
        raise CheckpointError(
            f"{MANIFEST}: {len(manifest['versions'])} versions for {len(layout.fragments)} fragments"
        )
    for file in manifest["files"]:  # all sizes first: a truncated file is found before the others are read
        _check_size(place, name, file, manifest)
    verified = partial(_verified, place, name)
    tensors = partial(read_tensors, layout=layout)
    thetas = verified(THETA, manifest, tensors)
    kept = verified(MOMENTUM, manifest, tensors) if momenta else []
    state = verified(STATE, manifest, lambda source: read_all(source, manifest["files"][STATE]["bytes"]))
    for file in manifest["files"].keys() - ({THETA, MOMENTUM, STATE} if momenta else {THETA, STATE}):
        verified(file, manifest, drain)
    return Restored(place.location(name), manifest, layout, thetas, kept, state)


def _verified(place: Place, name: str, file: str, manifest: dict[str, Any], read: Callable[[Source], T]) -> T:
    """What `read` makes of the file, once its size and digest were found right."""
    _check_size(place, name, file, manifest)
    try:
        with place.open(name, file) as opened:
            source = HashedSource(opened)  # type: ignore[arg-type]
            result = read(source)
            drain(source)
    except CheckpointError as error:
        raise CheckpointError(f"{file} {error}") from None
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing") from None
    except OSError as error:
        if error.errno != errno.EIO:  # of a disk: what it cannot read is damaged; of a network: it may come back
            raise
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if source.hexdigest() != manifest["files"][file]["sha256"]:
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in {MANIFEST}")
    return result


def _check_size(place: Place, name: str, file: str, manifest: dict[str, Any]) -> None:
    expected, found = _file_entry(manifest, file)["bytes"], place.size(name, file)
    if found is None:
        raise CheckpointError(f"{file} is missing")
    if found != expected:
        raise CheckpointError(f"{file} has {found} bytes, {MANIFEST} says {expected}")


def _file_entry(manifest: dict[str, Any], file: str) -> dict[str, Any]:
    entry = manifest["files"].get(file)
    plain = isinstance(file, str) and "/" not in file and not file.startswith(".")
    if plain and isinstance(entry, dict) and isinstance(entry.get("sha256"), str) and type(entry.get("bytes")) is int:
        return entry
    raise CheckpointError(f"{MANIFEST}: files has no {file!r} with `sha256` and `bytes`")


def _too_new(location: str, manifest: dict[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"{location} has format {manifest['format']}, this release ({VERSION}) reads formats up to {FORMAT}: "
        f"install anabranch {manifest.get('release', 'of a later release')} or later"
    )
