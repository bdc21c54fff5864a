"""Checkpoints without a run: snapshots of made-up versions, and what tests do to files."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from numpy.typing import NDArray

from anabranch.checkpoints.place import MANIFEST, open_place
from anabranch.merge.fragments import Layout
from anabranch.merge.names import Kind
from anabranch.model import Float32, flatten, layout_for
from anabranch.orchestrator.checkpoint import Checkpoints, Snapshot, take_snapshot
from anabranch.orchestrator.core.state import Fragment, State
from anabranch.orchestrator.vault import Version
from anabranch.queue.blobs import make_claim
from anabranch.spec import RunSpec
from tests.harness import make_spec

SPEC = make_spec("paper")
LAYOUT = layout_for(SPEC, [("wte", (5, 3)), ("h.weight", (3, 4)), ("h.bias", (4,)), ("scale", ())])


def version_of(theta: Float32, momentum: Float32 | None) -> Version:
    claim = make_claim("_", theta.data.cast("B"), "fp32")
    return Version(theta, momentum, claim, claim if momentum is not None else None)


def versions(number: int, *, merged: bool = True, layout: Layout = LAYOUT) -> list[Version]:
    """Tensors that depend on the version's number; before the first merge there is no momentum."""
    made = []
    for fragment in layout.fragments:
        generator = np.random.default_rng([number, fragment.index])
        theta = generator.standard_normal(fragment.size).astype(np.float32)
        momentum = generator.standard_normal(fragment.size).astype(np.float32) if merged else None
        made.append(version_of(theta, momentum))
    return made


def state(number: int, spec: RunSpec = SPEC, *, timeline: str = "0-abcd", layout: Layout = LAYOUT) -> State:
    fragments = [Fragment(f.index, f.size, b"", version=number) for f in layout.fragments]
    return State(spec, "nonce", timeline=timeline, fragments=fragments, heldout=[(0, 3.0), (10, 2.5)])


def snapshot(number: int, *, timeline: str = "0-abcd", merged: bool = True, stored: bytes = b"opaque") -> Snapshot:
    return take_snapshot(state(number, timeline=timeline), LAYOUT, versions(number, merged=merged), stored)


async def save(
    where: str | Path, number: int, *, keep: int = 3, timeline: str = "0-abcd", merged: bool = True
) -> str:
    """Write version `number` as a process of its own would; its location."""
    return await Checkpoints(where, keep).write(snapshot(number, timeline=timeline, merged=merged))


async def save_model(
    where: str | Path,
    spec: RunSpec,
    tensors: Mapping[str, NDArray[Any]],
    buffers: Mapping[str, Kind] | None = None,
) -> str:
    """A checkpoint of these tensors, split as the run would."""
    layout = layout_for(spec, [(name, array.shape) for name, array in tensors.items()], buffers)
    made = [version_of(flatten([tensors[t.name] for t in f.tensors]), None) for f in layout.fragments]
    return await Checkpoints(where, 3).write(take_snapshot(state(1, spec, layout=layout), layout, made))


def memory_url() -> str:
    """A prefix of fsspec's in-process store that nobody else uses."""
    return f"memory://bucket-{secrets.token_hex(8)}/checkpoints"


def names(where: str | Path) -> list[str]:
    return open_place(where).names()


def manifest_of(location: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(read_bytes(location, MANIFEST))
    return loaded


def read_bytes(location: str, file: str) -> bytes:
    with fsspec.open(f"{location}/{file}", "rb") as opened:
        data: bytes = opened.read()
    return data


def write_bytes(location: str, file: str, data: bytes) -> None:
    with fsspec.open(f"{location}/{file}", "wb") as opened:
        opened.write(data)


def entries(folder: str | Path) -> list[str]:
    """Everything in a local folder, hidden or not."""
    return sorted(path.name for path in Path(folder).iterdir())


def delete(location: str, file: str) -> None:
    system, path = fsspec.core.url_to_fs(f"{location}/{file}")
    system.rm_file(path)


def flip(location: str, file: str, at: int) -> None:
    """Change one bit of the byte at `at` (negative: from the end)."""
    data = bytearray(read_bytes(location, file))
    data[at] ^= 1
    write_bytes(location, file, bytes(data))
