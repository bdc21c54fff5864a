"""Writing checkpoints: what is in one, when none is written, and which are kept."""

from __future__ import annotations

import hashlib
import json
import logging
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.numpy import load_file

from anabranch.checkpoints.place import FOLDER, MANIFEST, open_place
from anabranch.checkpoints.reading import FORMAT, MOMENTUM, STATE, THETA, read_checkpoint
from anabranch.errors import CheckpointError, UsageError
from anabranch.faults import InjectedFault, armed
from anabranch.merge.fragments import Layout
from anabranch.model import unflatten
from anabranch.orchestrator.checkpoint import Checkpoints, complete_checkpoints
from anabranch.queue.control import send_command
from anabranch.spec import parse_spec
from anabranch.workers.member.synthetic import Pace
from tests.harness import bench, make_spec
from tests.saved import (
    LAYOUT,
    SPEC,
    delete,
    entries,
    flip,
    manifest_of,
    memory_url,
    names,
    read_bytes,
    save,
    save_model,
    snapshot,
    versions,
    write_bytes,
)
from tests.wait import wait_until


@pytest.fixture(params=["folder", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "c") if request.param == "folder" else memory_url()


def kept(where: str | Path) -> list[int]:
    """The versions of what is there."""
    place = open_place(where)
    return [manifest_of(place.location(name))["versions"][0] for name in place.names()]


# --- contents -------------------------------------------------------------------------------------------------


async def test_tensors_are_saved_under_the_models_own_names(tmp_path: Path) -> None:
    folder = Path(await save(tmp_path, 4))
    expected = versions(4)
    for file, flats in (
        (THETA, [v.theta for v in expected]),
        (MOMENTUM, [v.momentum for v in expected]),
    ):
        tensors = load_file(folder / file)
        wanted = unflatten(LAYOUT, flats)  # type: ignore[arg-type]
        assert tensors.keys() == wanted.keys() == {"wte", "h.weight", "h.bias", "scale"}
        for name, array in wanted.items():
            np.testing.assert_array_equal(tensors[name].reshape(array.shape), array)


async def test_the_manifest_names_digests_sizes_versions_layout_and_spec(where: str) -> None:
    location = await save(where, 4)
    manifest = manifest_of(location)
    assert set(manifest["files"]) == {THETA, MOMENTUM, STATE}
    for name, entry in manifest["files"].items():
        data = read_bytes(location, name)
        assert entry == {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
    assert manifest["versions"] == [4, 4]
    assert manifest["heldout"] == [10, 2.5]
    assert Layout.from_wire(manifest["layout"]).hash == LAYOUT.hash
    assert parse_spec(manifest["spec"]).hash == SPEC.hash
    assert manifest["timeline"] == "0-abcd"
    assert read_bytes(location, STATE) == b"opaque"


async def test_before_the_first_merge_momentum_is_zero(tmp_path: Path) -> None:
    folder = Path(await save(tmp_path, 0, merged=False))
    assert all(not array.any() for array in load_file(folder / MOMENTUM).values())


async def test_neither_writing_nor_reading_holds_a_second_copy(tmp_path: Path) -> None:
    tensor = np.ones((1024, 4096), np.float32)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        location = await save_model(tmp_path, make_spec("large", rounds={"fragments": 1}), {"wide": tensor})
        written = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.reset_peak()
        restored = read_checkpoint(location)
        read = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert restored.thetas[0].size == tensor.size
    assert written < 2.5 * tensor.nbytes, "a flat copy of the tensor, zeros for its momentum, no file"
    assert read < 2.7 * tensor.nbytes, "Θ and momentum, and a piece at a time"


# --- when none is written ---------------------------------------------------------------------------------------


async def test_nothing_new_is_not_written_again(where: str) -> None:
    checkpoints = Checkpoints(where, 3)
    first = await checkpoints.write(snapshot(4))
    assert await checkpoints.write(snapshot(4)) == checkpoints.latest == first
    assert await save(where, 4) == first, "by another process neither"
    assert len(names(where)) == 1
    assert await save(where, 4, timeline="1-abcd") != first


@pytest.mark.parametrize("file", [THETA, STATE])
async def test_nothing_new_is_written_again_if_what_is_there_is_damaged(where: str, file: str) -> None:
    first = await save(where, 4)
    flip(first, file, -1)
    again = await save(where, 4)
    assert again != first
    assert read_checkpoint(where).location == again


async def test_a_death_in_the_middle_leaves_no_checkpoint(tmp_path: Path) -> None:
    first = await save(tmp_path, 1)
    with armed("during checkpoint"), pytest.raises(InjectedFault):
        await save(tmp_path, 2)
    assert entries(tmp_path) == [Path(first).name]
    second = await save(tmp_path, 2)
    assert read_checkpoint(tmp_path).location == second


async def test_a_death_in_the_middle_of_an_upload_leaves_none_that_counts(caplog: pytest.LogCaptureFixture) -> None:
    where = memory_url()
    first = await save(where, 1)
    with armed("during checkpoint"), pytest.raises(InjectedFault):
        await save(where, 2)
    assert len(names(where)) == 2
    with caplog.at_level(logging.WARNING):
        restored = await Checkpoints(where, 3).newest()
    assert restored is not None
    assert restored.location == first
    assert "manifest.json is missing" in caplog.text
    assert (await save(where, 2)).rpartition("/")[2].startswith("00000003-")


async def test_a_store_that_fails_is_an_os_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Exception):
        pass

    def fails(*arguments: object, **options: object) -> None:
        raise Unreachable("no route")

    where = memory_url()
    checkpoints = Checkpoints(where, 3)
    await checkpoints.write(snapshot(1))
    monkeypatch.setattr(MemoryFileSystem, "_open", fails)
    with pytest.raises(OSError, match="no route"):
        await checkpoints.write(snapshot(2))
    with pytest.raises(CheckpointError, match=r"cannot be read: .*no route"):
        await checkpoints.newest()


def test_a_place_that_cannot_be_used_is_said_at_once() -> None:
    with pytest.raises(UsageError, match="pip install s3fs"):
        Checkpoints("s3://bucket/run", 3)


# --- keeping ----------------------------------------------------------------------------------------------------


async def test_the_last_few_are_kept(where: str) -> None:
    for number in (1, 2, 30, 400):
        newest = await save(where, number, keep=2)
    assert kept(where) == [30, 400]
    assert read_checkpoint(where).location == newest


async def test_after_a_roll_back_the_newest_are_kept_not_the_highest(where: str) -> None:
    for number, timeline in ((100, "0-a"), (200, "0-a"), (7, "1-b"), (8, "1-b")):
        newest = await save(where, number, keep=2, timeline=timeline)
    assert kept(where) == [7, 8]
    assert read_checkpoint(where).location == newest


@pytest.mark.parametrize("keep", [1, 2, 3])
async def test_damaged_ones_do_not_count_and_go(where: str, keep: int) -> None:
    locations = [await save(where, number, keep=9) for number in range(1, 7)]
    write_bytes(locations[3], THETA, b"cut")
    delete(locations[4], STATE)
    await save(where, 7, keep=keep)
    assert kept(where) == [2, 3, 6, 7][-keep:]


async def test_random_lives_always_leave_the_newest_complete_one(where: str, seed: int) -> None:
    """Saves, roll-backs, deaths in the middle and damage in any order: what was last written whole can be read."""
    generator = np.random.default_rng(seed)
    number, timeline, last = 1, 0, None
    for _ in range(40):
        keep = int(generator.integers(1, 4))
        match generator.choice(["save", "save", "death", "roll back"]):
            case "save":
                number += 1
                last = await save(where, number, keep=keep, timeline=f"{timeline}-t")
            case "death":
                with armed("during checkpoint"), pytest.raises(InjectedFault):
                    await save(where, number + 1, keep=keep, timeline=f"{timeline}-t")
            case _:
                number, timeline = max(number - 3, 0), timeline + 1
        if last is not None:
            restored = await Checkpoints(where, keep).newest()
            assert restored is not None
            assert restored.location == last


async def test_newer_ones_of_another_leader_are_left_alone(tmp_path: Path) -> None:
    ours = open_place(tmp_path)
    with ours.saving("0-a") as (name, create):
        theirs = await save(tmp_path, 5, keep=1, timeline="1-b")
        with create(MANIFEST) as file:
            file.write(b"{}")
    assert names(tmp_path) == [name, Path(theirs).name]
    await save(tmp_path, 6, keep=1, timeline="1-b")
    assert kept(tmp_path) == [6]


async def test_one_of_a_later_format_is_not_taken_for_damaged(tmp_path: Path) -> None:
    location = await save(tmp_path, 1)
    write_bytes(location, MANIFEST, json.dumps({**manifest_of(location), "format": FORMAT + 1}).encode())
    await save(tmp_path, 2, keep=2)
    assert kept(tmp_path) == [1, 2]


async def test_what_cannot_be_removed_is_only_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Path) -> None:
        raise PermissionError("not yours")

    await save(tmp_path, 1, keep=1)
    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", refused)
        await save(tmp_path, 2, keep=1)
    assert "not yours" in caplog.text
    await save(tmp_path, 3, keep=1)
    assert kept(tmp_path) == [3]


def test_folders_without_a_manifest_do_not_count(tmp_path: Path) -> None:
    assert complete_checkpoints(tmp_path) == []
    (tmp_path / FOLDER / "00000001-x").mkdir(parents=True)
    (tmp_path / FOLDER / ".00000002.partial").mkdir()
    (tmp_path / FOLDER / ".00000002.partial" / MANIFEST).write_text("{}")
    assert complete_checkpoints(tmp_path) == []


# --- of a run ---------------------------------------------------------------------------------------------------


async def test_a_checkpoint_on_command_is_what_the_run_holds(run_url: str, run_name: str, tmp_path: Path) -> None:
    async with bench(run_url, make_spec(run_name), directory=tmp_path) as run:
        run.add("w", Pace(step_s=0.003))
        await run.reach(2)
        await run.settle()
        await send_command(run.redis, run.keys, "checkpoint")
        await wait_until(lambda: complete_checkpoints(tmp_path), "it is written")
        [folder] = complete_checkpoints(tmp_path)
        vault = run.synchronizer.vault
        assert vault is not None
        assert vault.layout is not None
        restored = read_checkpoint(tmp_path)
        for theta, version in zip(restored.thetas, vault.versions, strict=True):
            np.testing.assert_array_equal(theta, version.theta)
        assert restored.manifest["versions"] == run.versions()
        assert restored.manifest["tokens"] == run.state.tokens
        checkpoints = run.synchronizer.checkpoints
        assert checkpoints is not None
        await wait_until(lambda: checkpoints.latest, "its place is known")
        assert checkpoints.latest == str(folder)


async def test_a_checkpoint_can_begin_another_run(run_url: str, run_name: str, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        directory.mkdir()
    async with bench(run_url, make_spec(run_name), directory=first) as run:
        run.add("w", Pace(step_s=0.003))
        await run.reach(1)
        await run.settle()
        await send_command(run.redis, run.keys, "stop")
        await run.synchronizer.stopped.wait()
        thetas = [run.theta(p).copy() for p in range(2)]
        await run.redis.flushall()
    init = complete_checkpoints(first)[-1] / THETA
    async with bench(run_url, make_spec(run_name), directory=second, init=init) as again:
        await again.reach(0)
        for p in range(2):
            np.testing.assert_array_equal(again.theta(p), thetas[p])
