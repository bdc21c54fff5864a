"""A checkpoint is whole or not there: whatever happens while one is written, the newest whole one is found and used.

Real runs write them while rounds go on; a real process is killed in the middle; files are cut, changed and deleted;
folders and object stores alike. A machine with an empty disk takes over from what is left.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import stat
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from anabranch.checkpoints.place import FOLDER, MANIFEST
from anabranch.checkpoints.reading import MOMENTUM, THETA, Restored, read_checkpoint
from anabranch.faults import armed
from anabranch.orchestrator.checkpoint import Checkpoints
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.harness import Bench, bench, forget_run, make_spec, process
from tests.saved import delete, entries, flip, manifest_of, memory_url, names, read_bytes, save, write_bytes
from tests.wait import wait_until

QUICK = Pace(step_s=0.003)

Damage = Callable[[str], None]


def cut(location: str) -> None:
    write_bytes(location, THETA, read_bytes(location, THETA)[:-1])


def change_a_byte(location: str) -> None:
    flip(location, MOMENTUM, -3)


def lose_the_manifest(location: str) -> None:
    delete(location, MANIFEST)


def place(kind: str, tmp_path: Path) -> str:
    return {"folder": f"{tmp_path}/kept", "file url": f"file://{tmp_path}/kept", "memory": memory_url()}[kind]


async def checkpoint_of(run: Bench) -> Restored:
    """Ask for a checkpoint of what the run holds now, and read it back."""
    checkpoints = run.synchronizer.checkpoints
    assert checkpoints is not None
    before = checkpoints.latest
    await run.command("checkpoint")
    await wait_until(lambda: checkpoints.latest not in {None, before}, "a new checkpoint is written")
    assert checkpoints.latest is not None
    return read_checkpoint(checkpoints.latest)


def assert_holds(run: Bench, restored: Restored) -> None:
    """The run is exactly where the checkpoint was."""
    vault = run.synchronizer.vault
    assert vault is not None
    assert run.versions() == restored.manifest["versions"]
    assert run.state.tokens == restored.manifest["tokens"]
    for version, theta, momentum in zip(vault.versions, restored.thetas, restored.momenta, strict=True):
        np.testing.assert_array_equal(version.theta, theta)
        np.testing.assert_array_equal(
            np.zeros_like(theta) if version.momentum is None else version.momentum, momentum
        )


@asynccontextmanager
async def worker(run_url: str) -> AsyncIterator[None]:
    """A worker that outlives whoever leads."""
    task = asyncio.create_task(SyntheticWorker(RunUrl.parse(run_url), "w", QUICK).run(), name="worker")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_rounds_go_on_while_a_checkpoint_is_written(run_url: str, run_name: str, tmp_path: Path) -> None:
    writing, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        writing.set()
        assert go_on.wait(60)

    async with bench(run_url, make_spec(run_name), directory=tmp_path) as run:
        run.add("w", QUICK)
        await run.reach(1)
        with armed("during checkpoint", stand_still):
            await run.command("checkpoint")
            await wait_until(writing.is_set, "the checkpoint is half written")
            try:
                held = max(run.versions())
                await run.reach(held + 3)
                assert names(tmp_path / FOLDER) == [], "nothing shows before it is whole"
            finally:
                go_on.set()
            await wait_until(lambda: names(tmp_path / FOLDER), "it is written")
        assert max(read_checkpoint(tmp_path).manifest["versions"]) <= held, "of the moment it was begun"


@pytest.mark.parametrize("server_lost_it", [False, True], ids=["", "and the server lost everything"])
async def test_killed_in_the_middle_of_a_save_the_one_before_is_there(
    run_url: str, run_name: str, tmp_path: Path, server_lost_it: bool
) -> None:
    spec = make_spec(run_name, checkpoint={"every_s": 0.1, "keep": 1000}, leader={"lease_s": 0.5})
    (tmp_path / "run.toml").write_text(spec.to_toml())
    directory = tmp_path / "run"
    arguments = ["orchestrator", run_url, "--spec", str(tmp_path / "run.toml"), "--dir", str(directory), "--no-page"]
    with process(*arguments, environment={"ANABRANCH_FAIL_AT": "during checkpoint:2:kill"}) as child:
        async with worker(run_url):
            await wait_until(lambda: child.poll() is not None, "it is killed in its second save")
        assert child.returncode == -signal.SIGKILL
    left = entries(directory / FOLDER)
    assert left[0] == ".00000002.partial"
    assert len(left) == 2
    before = read_checkpoint(directory)
    assert left[1] == Path(before.location).name

    if server_lost_it:
        await forget_run(run_url)
    async with bench(run_url, spec, directory=directory) as run:
        if server_lost_it:
            assert_holds(run, before)
        assert all(now >= then for now, then in zip(run.versions(), before.manifest["versions"], strict=True))
        run.add("w", QUICK)
        checkpoints = run.synchronizer.checkpoints
        assert checkpoints is not None

        def newer() -> bool:
            latest = manifest_of(checkpoints.latest)["versions"] if checkpoints.latest is not None else [0]
            return bool(min(latest) > max(before.manifest["versions"]))

        await wait_until(newer, "a checkpoint of later versions is written")
        assert left[0] not in entries(directory / FOLDER), "the half one is gone"


@pytest.mark.parametrize(
    ("damage", "kind", "why"),
    [
        (cut, "folder", "theta.safetensors has"),
        (change_a_byte, "memory", "momentum.safetensors is damaged: its SHA-256"),
        (lose_the_manifest, "file url", "manifest.json is missing"),
    ],
)
async def test_a_damaged_newest_is_skipped_with_a_warning(
    run_url: str,
    run_name: str,
    tmp_path: Path,
    damage: Damage,
    kind: str,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec, where = make_spec(run_name), place(kind, tmp_path)
    async with bench(run_url, spec, checkpoints=where) as run:
        run.add("w", QUICK)
        await run.reach(1)
        older = await checkpoint_of(run)
        await run.reach(max(run.versions()) + 1)
        newer = await checkpoint_of(run)
    await forget_run(run_url)
    damage(newer.location)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        async with bench(run_url, spec, checkpoints=where) as again:
            assert_holds(again, older)
            assert again.state.timeline != older.manifest["timeline"]
            again.add("w", QUICK)
            await again.reach(max(again.versions()) + 1)
            assert (await checkpoint_of(again)).manifest["timeline"] == again.state.timeline
    warnings = [message for message in caplog.messages if "is not used" in message]
    assert warnings
    assert all(warning.startswith(f"checkpoint {newer.location} is not used: {why}") for warning in warnings)


@pytest.mark.parametrize("kind", ["folder", "memory"])
async def test_a_new_machine_takes_over_from_an_empty_disk(
    run_url: str, run_name: str, tmp_path: Path, kind: str
) -> None:
    """All that is left is where checkpoints are: another run directory, and a server that knows nothing."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    spec, where = make_spec(run_name), place(kind, tmp_path)
    async with bench(run_url, spec, directory=tmp_path / "first", checkpoints=where) as run:
        run.add("w", QUICK)
        await run.reach(2)
        kept = await checkpoint_of(run)
    await forget_run(run_url)
    assert not (tmp_path / "first" / FOLDER).exists()
    async with bench(run_url, spec, directory=tmp_path / "second", checkpoints=where) as again:
        assert_holds(again, kept)
        again.add("w", QUICK)
        await again.reach(max(kept.manifest["versions"]) + 2)


@pytest.mark.parametrize("kind", ["folder", "file url", "memory"])
@pytest.mark.parametrize("keep", [1, 2, 3])
async def test_keep_last_n_never_removes_the_newest_whole_one(
    tmp_path: Path, kind: str, keep: int, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Versions go up and, after roll-backs, down; saves die; files are damaged. Only names count, and they grow."""
    caplog.set_level(logging.CRITICAL)
    where, generator = place(kind, tmp_path), np.random.default_rng([seed, keep])
    version, timeline, whole = 50, 0, list[str]()
    for _ in range(30):
        version += 1
        if generator.random() < 0.2:
            version, timeline = max(0, version - int(generator.integers(2, 60))), timeline + 1
        if generator.random() < 0.2:
            with armed("during checkpoint"), pytest.raises(Exception, match="during checkpoint"):
                await save(where, version, keep=keep, timeline=f"{timeline}-t")
            continue
        whole.append(await save(where, version, keep=keep, timeline=f"{timeline}-t"))
        restored = await Checkpoints(where, keep).newest()
        assert restored is not None
        assert restored.location == whole[-1]
        assert set(whole[-keep:]) <= {f"{base(where)}/{name}" for name in names(where)}
        if keep > 1 and len(whole) > 1 and generator.random() < 0.3:
            generator.choice([cut, lose_the_manifest])(whole.pop())  # type: ignore[arg-type]
            restored = await Checkpoints(where, keep).newest()
            assert restored is not None
            assert restored.location == whole[-1]


def base(where: str) -> str:
    return where.removeprefix("file://")


async def test_nobody_else_can_read_them(run_url: str, run_name: str, tmp_path: Path) -> None:
    async with bench(run_url, make_spec(run_name), directory=tmp_path) as run:
        run.add("w", QUICK)
        await run.reach(1)
        folder = Path((await checkpoint_of(run)).location)
    for path in (folder.parent, folder, *(folder / file for file in entries(folder))):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


async def test_an_unfinished_save_of_another_process_is_left_alone(tmp_path: Path) -> None:
    """A leader that stalled in its save, and the standby that took over and saves too: both are whole in the end."""
    writing, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        writing.set()
        assert go_on.wait(60)

    with armed("during checkpoint", stand_still):
        stalled = asyncio.create_task(save(tmp_path, 4, keep=2))
        await wait_until(writing.is_set, "the first is half written")
        theirs = await save(tmp_path, 5, keep=2)
        go_on.set()
        await stalled
    assert names(tmp_path) == ["00000001-0-abcd", "00000002-0-abcd"]
    assert read_checkpoint(tmp_path).location == theirs
