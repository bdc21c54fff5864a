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
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anabranch._version import VERSION
from anabranch.faults import fail_at
from anabranch.merge.fragments import Layout
from anabranch.model import unflatten
from anabranch.orchestrator.state import State

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from anabranch.orchestrator.vault import Version

FOLDER = "checkpoints"
MANIFEST = "manifest.json"


class Checkpointer:
    """Writes checkpoints of one run into its directory and keeps the last few."""

    def __init__(self, directory: Path | None, keep: int) -> None:
        self._folder = directory / FOLDER if directory is not None else None
        self._keep = keep
        self._lock = asyncio.Lock()
        self.latest: Path | None = None

    async def save(self, state: State, layout: Layout, versions: Sequence[Version]) -> Path | None:
        """Write one; the tensors are the versions given, so rounds may go on meanwhile. Returns its folder."""
        if self._folder is None:
            return None
        tokens = state.tokens
        manifest: dict[str, Any] = {
            "release": VERSION,
            "run": state.spec.name,
            "timeline": state.timeline,
            "tokens": tokens,
            "versions": [fragment.version for fragment in state.fragments],
            "heldout": state.heldout[-1] if state.heldout else None,
            "layout": layout.to_wire(),
            "spec": state.spec.model_dump(mode="json"),
        }
        target = self._folder / f"{sum(manifest['versions']):08d}-{state.timeline}"
        async with self._lock:
            self.latest = await asyncio.to_thread(self._write, target, manifest, layout, versions)
        return self.latest

    def _write(self, target: Path, manifest: dict[str, Any], layout: Layout, versions: Sequence[Version]) -> Path:
        assert self._folder is not None
        if target.exists():  # nothing was merged since
            return target
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._folder / f".{target.name}.partial"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(mode=0o700)
        theta = unflatten(layout, [version.theta for version in versions])
        files = {"theta.safetensors": theta}
        if all(version.momentum is not None for version in versions):
            momenta = [version.momentum for version in versions if version.momentum is not None]
            files["momentum.safetensors"] = unflatten(layout, momenta)
        digests = {name: _write_tensors(temporary / name, tensors) for name, tensors in files.items()}
        fail_at("during checkpoint")
        _write_text(temporary / MANIFEST, json.dumps({**manifest, "files": digests}, indent=1))
        temporary.rename(target)
        _sync(self._folder)
        self._drop_old()
        return target

    def _drop_old(self) -> None:
        assert self._folder is not None
        complete = sorted(path for path in self._folder.iterdir() if (path / MANIFEST).exists())
        for path in complete[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)


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
