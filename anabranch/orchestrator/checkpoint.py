"""Checkpoints: safetensors files under the model's own parameter names, the manifest written last.

A checkpoint is complete exactly if its manifest exists and every digest in it matches: everything is written to a
temporary folder, fsynced, and renamed in one step.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from anabranch._version import VERSION
from anabranch.faults import fail_at
from anabranch.merge.fragments import Layout
from anabranch.model import unflatten
from anabranch.orchestrator.state import State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from anabranch.orchestrator.vault import Version

FOLDER = "checkpoints"
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Snapshot:
    """A consistent picture of a run: versions are never changed in place, so holding them is enough."""

    name: str
    manifest: dict[str, Any]
    layout: Layout
    versions: tuple[Version, ...]


def take_snapshot(state: State, layout: Layout, versions: Sequence[Version]) -> Snapshot:
    """What a checkpoint of this moment contains. Synchronous: nothing changes meanwhile."""
    manifest: dict[str, Any] = {
        "release": VERSION,
        "run": state.spec.name,
        "timeline": state.timeline,
        "tokens": state.tokens,
        "versions": [fragment.version for fragment in state.fragments],
        "heldout": state.heldout[-1] if state.heldout else None,
        "layout": layout.to_wire(),
        "spec": state.spec.model_dump(mode="json"),
    }
    name = f"{sum(manifest['versions']):08d}-{state.timeline}"
    return Snapshot(name, manifest, layout, tuple(versions))


def complete_checkpoints(directory: Path) -> list[Path]:
    """Checkpoints in a run directory that have a manifest, oldest first."""
    folder = directory / FOLDER
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.iterdir() if (p / MANIFEST).exists() and not p.name.startswith("."))


class Checkpointer:
    """Writes checkpoints of one run into its directory and keeps the last few."""

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory = directory
        self._folder = directory / FOLDER
        self._keep = keep
        self._lock = asyncio.Lock()
        self.latest: Path | None = None

    async def write(self, snapshot: Snapshot) -> Path:
        """Write one in a thread, so that rounds go on; returns its folder."""
        async with self._lock:
            self.latest = await asyncio.to_thread(self._write, snapshot)
        return self.latest

    def _write(self, snapshot: Snapshot) -> Path:
        target = self._folder / snapshot.name
        if (target / MANIFEST).exists():  # nothing was merged since
            return target
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f".{target.name}.partial"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        versions = snapshot.versions
        files = {"theta.safetensors": unflatten(snapshot.layout, [version.theta for version in versions])}
        momenta = [v.momentum if v.momentum is not None else np.zeros_like(v.theta) for v in versions]
        files["momentum.safetensors"] = unflatten(snapshot.layout, momenta)
        digests = {name: _write_tensors(temporary / name, tensors) for name, tensors in files.items()}
        fail_at("during checkpoint")
        _write_text(temporary / MANIFEST, json.dumps({**snapshot.manifest, "files": digests}, indent=1))
        temporary.rename(target)
        _sync(self._folder)
        for old in complete_checkpoints(self._directory)[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)
        return target


def _write_tensors(path: Path, tensors: dict[str, NDArray[np.float32]]) -> str:
    """Write a safetensors file and fsync it; its SHA-256, hex."""
    from safetensors.numpy import save_file

    save_file(tensors, path)
    _sync(path)
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
