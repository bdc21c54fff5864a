"""Reading: nothing is handed out that is not exactly what was written."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest

from anabranch.checkpoints.place import MANIFEST, Place, open_place
from anabranch.checkpoints.reading import (
    FORMAT,
    MOMENTUM,
    STATE,
    THETA,
    Restored,
    is_complete,
    newest,
    read_checkpoint,
    verify,
)
from anabranch.errors import CheckpointError
from anabranch.orchestrator.checkpoint import Checkpoints
from tests.saved import (
    LAYOUT,
    SPEC,
    delete,
    flip,
    manifest_of,
    memory_url,
    names,
    read_bytes,
    save,
    snapshot,
    versions,
    write_bytes,
)

FILES = [THETA, MOMENTUM, STATE, MANIFEST]


@pytest.fixture(params=["folder", "memory", "file url"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return {"folder": f"{tmp_path}/c", "memory": memory_url(), "file url": f"file://{tmp_path}/c"}[request.param]


def assert_is(restored: Restored, number: int) -> None:
    for made, theta, momentum in zip(versions(number), restored.thetas, restored.momenta, strict=True):
        np.testing.assert_array_equal(made.theta, theta)
        np.testing.assert_array_equal(made.momentum, momentum)
    assert restored.layout.hash == LAYOUT.hash
    assert restored.state == b"opaque"
    assert restored.manifest["versions"] == [number, number]


async def test_a_checkpoint_comes_back_as_it_was(where: str) -> None:
    location = await save(where, 4)
    assert_is(read_checkpoint(location), 4)
    assert read_checkpoint(location).location == location


async def test_a_folder_or_a_run_directory_gives_its_newest(where: str, tmp_path: Path) -> None:
    await save(where, 4)
    newer = await save(where, 7)
    assert read_checkpoint(where).location == newer
    parent, _, name = where.rpartition("/")
    assert name in {"c", "checkpoints"}
    if name == "checkpoints":
        assert read_checkpoint(parent).location == newer
    await save(tmp_path / "run" / "checkpoints", 9)
    assert_is(read_checkpoint(tmp_path / "run"), 9)


async def test_what_a_snapshot_gives_is_what_its_checkpoint_gives(tmp_path: Path) -> None:
    moment = snapshot(0, merged=False).restored("memory")
    read = read_checkpoint(await save(tmp_path, 0, merged=False))
    for ours, theirs in zip([*moment.thetas, *moment.momenta], [*read.thetas, *read.momenta], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert moment.manifest.items() <= read.manifest.items()
    assert moment.state == read.state


async def test_the_momentum_can_be_left_out_but_is_verified(tmp_path: Path) -> None:
    location = await save(tmp_path, 4)
    assert read_checkpoint(location, momenta=False).momenta == []
    flip(location, MOMENTUM, -1)
    with pytest.raises(CheckpointError, match=r"momentum\.safetensors is damaged"):
        read_checkpoint(location, momenta=False)


@pytest.mark.parametrize("file", FILES)
async def test_a_missing_file_is_named(where: str, file: str) -> None:
    location = await save(where, 4)
    delete(location, file)
    with pytest.raises(CheckpointError, match=rf"{re.escape(file)} is missing"):
        verify(open_place(where), names(where)[0])
    assert not is_complete(open_place(where), names(where)[0])


@pytest.mark.parametrize("file", FILES)
async def test_a_file_cut_off_anywhere_is_never_taken(tmp_path: Path, file: str, seed: int) -> None:
    location = await save(tmp_path, 4)
    data = read_bytes(location, file)
    generator = np.random.default_rng(seed)
    for length in {0, len(data) - 1, *generator.integers(0, len(data), 5).tolist()}:
        write_bytes(location, file, data[:length])
        with pytest.raises(CheckpointError, match=file):
            read_checkpoint(location)
        assert not is_complete(open_place(tmp_path), names(tmp_path)[0])


@pytest.mark.parametrize("file", [THETA, MOMENTUM, STATE])
async def test_one_flipped_bit_anywhere_is_found(tmp_path: Path, file: str, seed: int) -> None:
    location = await save(tmp_path, 4)
    data = read_bytes(location, file)
    for at in {0, 7, *np.random.default_rng(seed).integers(0, len(data), 20).tolist()} - {len(data), len(data) + 1}:
        if at >= len(data):
            continue
        flip(location, file, at)
        with pytest.raises(CheckpointError, match=f"is damaged: {file}"):
            read_checkpoint(location)
        write_bytes(location, file, data)
    read_checkpoint(location)


async def test_a_damaged_one_is_skipped_with_a_warning_that_says_why(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    damaged = [await save(where, number, keep=9) for number in (1, 2, 3, 4, 5)][2:]
    flip(damaged[0], MOMENTUM, -1)
    write_bytes(damaged[1], THETA, read_bytes(damaged[1], THETA)[:-1])
    delete(damaged[2], MANIFEST)
    with caplog.at_level(logging.WARNING):
        restored = newest(open_place(where))
    assert restored is not None
    assert_is(restored, 2)
    whys = ["manifest.json is missing", "theta.safetensors has", "momentum.safetensors is damaged: its SHA-256"]
    assert len(caplog.messages) == 3
    for message, location, why in zip(caplog.messages, reversed(damaged), whys, strict=True):
        assert message.startswith(f"checkpoint {open_place(where).location(location.rpartition('/')[2])} is not used")
        assert why in message


async def test_nothing_is_none_and_only_damage_is_an_error(where: str) -> None:
    place = open_place(where)
    assert newest(place) is None
    with pytest.raises(CheckpointError, match=r"neither a checkpoint \(manifest\.json\) nor a run directory"):
        read_checkpoint(where)
    flip(await save(where, 1), THETA, -1)
    with pytest.raises(CheckpointError, match="all of its 1 checkpoints are damaged"):
        newest(place)
    with pytest.raises(CheckpointError, match="all of its 1 checkpoints are damaged"):
        read_checkpoint(where)


async def test_a_later_format_is_no_damage_and_nothing_older_takes_its_place(where: str) -> None:
    await save(where, 1)
    location = await save(where, 2)
    later = {"format": FORMAT + 1, "release": "9.8.7"}
    write_bytes(location, MANIFEST, json.dumps(later).encode())
    message = r"has format 2, this release .* up to 1: install anabranch 9\.8\.7"
    with pytest.raises(CheckpointError, match=message):
        newest(open_place(where))
    for named in (where, location):
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(named)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "1"}, "has no `format`"),
        ({"format": True}, "has no `format`"),
        ({"versions": None}, "versions = None is no list"),
        ({"versions": [1]}, "1 versions for 2 fragments"),
        ({"layout": {}}, "layout: must be a map"),
        ({"files": {}}, "files has no 'theta.safetensors'"),
        ({"files": {THETA: "ab"}}, "files has no 'theta.safetensors' with `sha256` and `bytes`"),
    ],
)
async def test_a_manifest_that_is_none_is_explained(tmp_path: Path, change: dict[str, object], message: str) -> None:
    location = await save(tmp_path, 1)
    write_bytes(location, MANIFEST, json.dumps({**manifest_of(location), **change}).encode())
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(location)


async def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path) -> None:
    location = await save(tmp_path, 1)
    manifest = manifest_of(location)
    manifest["files"]["../x"] = manifest["files"][THETA]
    write_bytes(location, MANIFEST, json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match=r"files has no '\.\./x'"):
        read_checkpoint(location)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b'"manifest"'])
async def test_what_is_no_manifest_is_damage(tmp_path: Path, text: bytes) -> None:
    location = await save(tmp_path, 1)
    write_bytes(location, MANIFEST, text)
    with pytest.raises(CheckpointError, match=r"is damaged: manifest\.json"):
        read_checkpoint(location)


async def test_files_of_a_later_release_with_this_format_are_verified_too(tmp_path: Path) -> None:
    location = await save(tmp_path, 1)
    manifest = manifest_of(location)
    write_bytes(location, "extra", b"opaque")
    manifest["files"]["extra"] = manifest["files"][STATE]
    write_bytes(location, MANIFEST, json.dumps(manifest).encode())
    read_checkpoint(location)
    write_bytes(location, "extra", b"changed"[:6])
    with pytest.raises(CheckpointError, match="extra is damaged"):
        read_checkpoint(location)


class Unreachable:
    """A place whose reads fail as a network's do."""

    def __init__(self, place: Place, error: OSError) -> None:
        self._place, self._error = place, error
        self.where, self.names, self.location, self.size = place.where, place.names, place.location, place.size

    def open(self, name: str, file: str) -> object:
        if file == THETA:
            raise self._error
        return self._place.open(name, file)


async def test_a_network_that_fails_is_no_damage(tmp_path: Path) -> None:
    for number in (1, 2):
        await save(tmp_path, number)
    with pytest.raises(OSError, match="timed out"):
        newest(Unreachable(open_place(tmp_path), OSError("timed out")))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="all of its 2 checkpoints are damaged"):
        newest(Unreachable(open_place(tmp_path), OSError(5, "Input/output error")))  # type: ignore[arg-type]


async def test_the_spec_in_the_manifest_is_the_runs(tmp_path: Path) -> None:
    manifest = read_checkpoint(await save(tmp_path, 1)).manifest
    assert manifest["spec"] == SPEC.model_dump(mode="json")
    assert manifest["heldout"] == [10, 2.5]
    assert manifest["format"] == FORMAT


async def test_a_late_save_of_a_replaced_leader_is_not_the_newest(tmp_path: Path) -> None:
    """It has the highest number, but shows less: it was begun before another leader took over."""
    ahead = snapshot(5)
    ahead.manifest["tokens"] = 500
    late = snapshot(4)
    late.manifest["tokens"] = 400
    checkpoints = Checkpoints(tmp_path, 1)
    await checkpoints.write(ahead)
    await checkpoints.write(late)
    restored = await checkpoints.newest()
    assert restored is not None
    assert restored.tokens == 500, "neither taken for the newest, nor does it push that one out"


async def test_a_later_timeline_comes_first(tmp_path: Path) -> None:
    """Whoever began it knew that the one before had lost something, or was rolled back by hand."""
    before, after = snapshot(5), snapshot(2, timeline="1-beef")
    before.manifest["tokens"], after.manifest["tokens"] = 500, 200
    checkpoints = Checkpoints(tmp_path, 3)
    await checkpoints.write(after)
    await checkpoints.write(before)
    restored = await checkpoints.newest()
    assert restored is not None
    assert restored.manifest["timeline"] == "1-beef"
