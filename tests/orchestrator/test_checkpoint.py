"""Checkpoints: complete or not there at all, and loadable by anything that reads safetensors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from anabranch.faults import InjectedFault, armed
from anabranch.merge.fragments import Layout
from anabranch.model import layout_for, unflatten
from anabranch.orchestrator.checkpoint import FOLDER, MANIFEST, Checkpointer, complete_checkpoints, take_snapshot
from anabranch.orchestrator.state import Fragment, State
from anabranch.orchestrator.vault import Version
from anabranch.queue.blobs import make_claim
from anabranch.queue.control import send_command
from anabranch.spec import RunSpec, parse_spec
from anabranch.workers.synthetic import Pace
from tests.harness import bench, make_spec
from tests.wait import wait_until

SPEC = make_spec("paper")
LAYOUT = layout_for(SPEC, [("wte", (5, 3)), ("h.weight", (3, 4)), ("h.bias", (4,)), ("scale", ())])


def versions(number: int, *, merged: bool = True) -> list[Version]:
    made = []
    for fragment in LAYOUT.fragments:
        generator = np.random.default_rng([number, fragment.index])
        theta = generator.standard_normal(fragment.size).astype(np.float32)
        momentum = generator.standard_normal(fragment.size).astype(np.float32) if merged else None
        claim = make_claim("_", theta.data.cast("B"), "fp32")
        made.append(Version(theta, momentum, claim, claim if merged else None))
    return made


def state(number: int, spec: RunSpec = SPEC) -> State:
    fragments = [Fragment(index=f.index, size=f.size, version=number) for f in LAYOUT.fragments]
    return State(spec=spec, timeline="0-abcd", fragments=fragments, heldout=[(0, 3.0), (10, 2.5)])


async def write(directory: Path, number: int, *, keep: int = 3, merged: bool = True) -> Path:
    snapshot = take_snapshot(state(number), LAYOUT, versions(number, merged=merged))
    return await Checkpointer(directory, keep).write(snapshot)


def manifest_of(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
    return loaded


async def test_tensors_are_saved_under_the_models_own_names(tmp_path: Path) -> None:
    folder = await write(tmp_path, 4)
    expected = versions(4)
    for file, flats in (
        ("theta.safetensors", [v.theta for v in expected]),
        ("momentum.safetensors", [v.momentum for v in expected]),
    ):
        tensors = load_file(folder / file)
        wanted = unflatten(LAYOUT, flats)  # type: ignore[arg-type]
        assert tensors.keys() == wanted.keys() == {"wte", "h.weight", "h.bias", "scale"}
        for name, array in wanted.items():
            np.testing.assert_array_equal(tensors[name].reshape(array.shape), array)


async def test_the_manifest_names_digests_versions_layout_and_spec(tmp_path: Path) -> None:
    folder = await write(tmp_path, 4)
    manifest = manifest_of(folder)
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert set(manifest["files"]) == {path.name for path in folder.iterdir()} - {MANIFEST}
    assert manifest["versions"] == [4, 4]
    assert manifest["heldout"] == [10, 2.5]
    assert Layout.from_wire(manifest["layout"]).hash == LAYOUT.hash
    assert parse_spec(manifest["spec"]).hash == SPEC.hash
    assert manifest["timeline"] == "0-abcd"


async def test_before_the_first_merge_momentum_is_zero(tmp_path: Path) -> None:
    folder = await write(tmp_path, 0, merged=False)
    assert all(not array.any() for array in load_file(folder / "momentum.safetensors").values())


async def test_the_last_few_are_kept_oldest_first(tmp_path: Path) -> None:
    for number in (1, 2, 30, 400):
        newest = await write(tmp_path, number, keep=2)
    kept = complete_checkpoints(tmp_path)
    assert [manifest_of(folder)["versions"][0] for folder in kept] == [30, 400]
    assert kept[-1] == newest


async def test_nothing_new_is_not_written_again(tmp_path: Path) -> None:
    first = await write(tmp_path, 4)
    written = (first / MANIFEST).stat().st_mtime_ns
    assert await write(tmp_path, 4) == first
    assert (first / MANIFEST).stat().st_mtime_ns == written


async def test_a_death_in_the_middle_leaves_no_checkpoint(tmp_path: Path) -> None:
    await write(tmp_path, 1)
    with armed("during checkpoint"), pytest.raises(InjectedFault):
        await write(tmp_path, 2)
    assert len(complete_checkpoints(tmp_path)) == 1
    folder = await write(tmp_path, 2)
    assert complete_checkpoints(tmp_path)[-1] == folder
    assert not list((tmp_path / FOLDER).glob(".*")), "the remains are gone"


def test_folders_without_a_manifest_do_not_count(tmp_path: Path) -> None:
    assert complete_checkpoints(tmp_path) == []
    (tmp_path / FOLDER / "00000001-x").mkdir(parents=True)
    (tmp_path / FOLDER / ".00000002-x.partial").mkdir()
    (tmp_path / FOLDER / ".00000002-x.partial" / MANIFEST).write_text("{}")
    assert complete_checkpoints(tmp_path) == []


async def test_others_cannot_read_them(tmp_path: Path) -> None:
    folder = await write(tmp_path, 1)
    assert folder.stat().st_mode & 0o077 == 0
    assert folder.parent.stat().st_mode & 0o077 == 0


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
        wanted = unflatten(vault.layout, [version.theta for version in vault.versions])
        tensors = load_file(folder / "theta.safetensors")
        for name, array in wanted.items():
            np.testing.assert_array_equal(tensors[name], array)
        assert manifest_of(folder)["versions"] == run.versions()
        assert manifest_of(folder)["tokens"] == run.state.tokens
        assert run.synchronizer.checkpoints is not None
        assert run.synchronizer.checkpoints.latest == folder


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
    init = complete_checkpoints(first)[-1] / "theta.safetensors"
    async with bench(run_url, make_spec(run_name), directory=second, init=init) as again:
        await again.reach(0)
        for p in range(2):
            np.testing.assert_array_equal(again.theta(p), thetas[p])
