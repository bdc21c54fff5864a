"""Folders and object stores: numbers, reservations, leftovers, and what a URL may be."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from anabranch.checkpoints.place import MANIFEST, Folder, ObjectStore, Place, above, below, open_place
from anabranch.errors import UsageError
from tests.saved import memory_url


@pytest.fixture(params=["folder", "memory"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "c") if request.param == "folder" else memory_url()


def put(place: Place, *files: str, timeline: str = "0-a") -> str:
    with place.saving(timeline) as (name, create):
        for file in files:
            with create(file) as opened:
                opened.write(file.encode())
    return name


def test_names_are_numbered_and_numbers_only_grow(where: str) -> None:
    place = open_place(where)
    assert place.names() == []
    first, second = put(place, "a", MANIFEST), put(place, "a", MANIFEST, timeline="1-b")
    assert (first, second) == ("00000001-0-a", "00000002-1-b")
    place.remove(first)
    assert put(place, MANIFEST) == "00000003-0-a"
    assert place.names() == ["00000002-1-b", "00000003-0-a"]


def test_after_eight_digits_the_order_is_still_that_of_numbers(tmp_path: Path) -> None:
    for name in ("99999999-0-a", "100000000-0-a", "not-ours", "123-4"):
        (tmp_path / name).mkdir()
    assert Folder(tmp_path).names() == ["99999999-0-a", "100000000-0-a"]
    assert put(Folder(tmp_path), MANIFEST) == "100000001-0-a"


def test_files_are_found_with_their_sizes(where: str) -> None:
    place = open_place(where)
    name = put(place, "some", MANIFEST)
    assert place.size(name, "some") == 4
    assert place.size(name, "none") is None
    assert place.size("00000009-x", "some") is None
    with place.open(name, "some") as file:
        assert file.read() == b"some"
    assert place.location(name) == f"{where}/{name}"


def test_what_is_unfinished_does_not_count_as_a_checkpoint(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    with place.saving("0-a") as (name, create):
        with create("a") as file:
            file.write(b"1")
        assert place.names() == []
        assert [p.name for p in tmp_path.iterdir()] == [".00000001.partial"]
    assert place.names() == [name]


def test_a_failure_gives_its_space_back_at_once(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    with pytest.raises(OSError, match="full"), place.saving("0-a") as (_, create), create("a"):
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == []


def test_a_save_in_progress_is_left_alone_and_keeps_its_number(tmp_path: Path) -> None:
    place = Folder(tmp_path)
    with place.saving("0-a") as (first, create):
        second = put(Folder(tmp_path), MANIFEST, timeline="0-b")
        with create(MANIFEST) as file:
            file.write(b"{}")
    assert place.names() == [first, second] == ["00000001-0-a", "00000002-0-b"]


def test_a_dead_writers_leftover_goes_at_the_next_save(tmp_path: Path) -> None:
    (tmp_path / ".00000007.partial").mkdir()
    (tmp_path / ".00000007.partial" / "theta.safetensors").write_bytes(b"half")
    put(Folder(tmp_path), MANIFEST)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001-0-a"]


def test_a_leftover_that_another_swept_meanwhile_is_not_swept_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between our open and our lock it went, and its name is the folder of somebody who writes now."""
    (tmp_path / ".00000007.partial").mkdir()
    flock = fcntl.flock

    def overtaken(descriptor: int, operation: int) -> None:
        monkeypatch.undo()
        (tmp_path / ".00000007.partial").rmdir()
        (tmp_path / ".00000007.partial").mkdir()
        flock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", overtaken)
    put(Folder(tmp_path), MANIFEST)
    assert (tmp_path / ".00000007.partial").is_dir()


def test_writers_at_the_same_time_get_numbers_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        names = list(pool.map(lambda i: put(Folder(tmp_path), MANIFEST, timeline=f"0-{i}"), range(40)))
    numbers = sorted(int(name[:8]) for name in names)
    assert len(set(numbers)) == 40
    assert sorted(names) == Folder(tmp_path).names()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


def test_where_the_file_system_has_no_locks_leftovers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(descriptor: int, operation: int) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", refused)
    (tmp_path / ".00000007.partial").mkdir()
    assert put(Folder(tmp_path), MANIFEST) == "00000008-0-a"
    assert (tmp_path / ".00000007.partial").is_dir()


def test_only_the_owner_can_read(tmp_path: Path) -> None:
    place = Folder(tmp_path / "deep" / "checkpoints")
    name = put(place, "a", MANIFEST)
    for path in (tmp_path / "deep" / "checkpoints", tmp_path / "deep" / "checkpoints" / name):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "deep" / "checkpoints" / name / "a").stat().st_mode) == 0o600


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    name = put(Folder(tmp_path), MANIFEST)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_everything_is_synced_before_and_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        seen.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", watched)
    put(Folder(tmp_path), "a", MANIFEST)
    assert seen == ["a", MANIFEST, ".00000001.partial", tmp_path.name]


def test_incomplete_uploads_are_abandoned_after_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ObjectStore(memory_url())
    left, later = put(place, "a"), put(place, MANIFEST)
    assert not place.abandoned(left, later)
    stamps: dict[str, datetime] = {}
    now = datetime.now(UTC)

    def modified(system: MemoryFileSystem, path: str) -> datetime:
        return stamps.get(path.rpartition("/")[2], now)

    monkeypatch.setattr(MemoryFileSystem, "modified", modified)
    stamps["a"] = now - timedelta(hours=23)
    assert not place.abandoned(left, later)
    stamps["a"] = now - timedelta(hours=25)
    assert place.abandoned(left, later)


def test_a_store_that_keeps_no_times_abandons_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def modified(system: MemoryFileSystem, path: str) -> datetime:
        raise NotImplementedError

    monkeypatch.setattr(MemoryFileSystem, "modified", modified)
    place = ObjectStore(memory_url())
    assert not place.abandoned(put(place, "a"), put(place, MANIFEST))


def test_a_clients_own_exceptions_become_os_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unreachable(Exception):
        pass

    def fails(*arguments: object, **options: object) -> None:
        raise Unreachable("no credentials")

    place = ObjectStore(memory_url())
    name = put(place, MANIFEST)
    monkeypatch.setattr(MemoryFileSystem, "ls", fails)
    monkeypatch.setattr(MemoryFileSystem, "open", fails)
    monkeypatch.setattr(MemoryFileSystem, "info", fails)
    reads: list[Callable[[], object]] = [
        place.names,
        lambda: place.size(name, MANIFEST),
        lambda: place.open(name, MANIFEST).__enter__(),
    ]
    for read in reads:
        with pytest.raises(OSError, match="Unreachable: no credentials"):
            read()


def test_a_plain_path_and_a_file_url_are_folders(tmp_path: Path) -> None:
    for where in (tmp_path, str(tmp_path), f"file://{tmp_path}", f"local://{tmp_path}"):
        place = open_place(where)
        assert isinstance(place, Folder)
        assert place.where == str(tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/x", r"s3://bucket/x: s3:// needs the package s3fs: `pip install s3fs`"),
        ("gs://bucket/x", r"needs the package gcsfs"),
        ("simplecache::s3://bucket/x", "needs the package s3fs"),
        ("sftp://nowhere/x", 'needs another package .*"paramiko"'),
        ("nonsense://x", "Protocol not known: nonsense; give a folder, or a URL that fsspec knows"),
    ],
)
def test_a_url_we_cannot_use_says_what_to_install(url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_place(url)


def test_the_folder_above_and_below(tmp_path: Path) -> None:
    assert above(tmp_path / "x") == (tmp_path, "x")
    assert above("s3://bucket/a/b/") == ("s3://bucket/a", "b")
    assert above("s3://bucket") is None
    assert above("memory://") is None
    assert below("s3://bucket/", "x") == "s3://bucket/x"
    assert below(tmp_path, "x") == tmp_path / "x"
