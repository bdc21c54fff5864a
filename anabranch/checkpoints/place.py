"""Where checkpoints lie: a local folder, or a prefix of an object store (any fsspec URL).

A checkpoint is a group of files under one name, `00000012-0-1a2b3c4d`: a sequence number and the timeline. Numbers
only grow, so the order of names is the order of writing, whatever happened to versions in between.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

from anabranch.errors import UsageError

MANIFEST = "manifest.json"
FOLDER = "checkpoints"  # of a run directory
ABANDONED_AFTER = timedelta(days=1)

log = logging.getLogger("anabranch.checkpoint")

_NAME = re.compile(r"(\d{8,18})-[A-Za-z0-9._-]+")
_PARTIAL = re.compile(r"\.(\d{8,18})\.partial")

Create = Callable[[str], AbstractContextManager[BinaryIO]]


def open_place(where: str | Path) -> Place:
    """The place of a path or URL; UsageError for a protocol that does not exist or whose package is missing."""
    text = str(where)
    if isinstance(where, Path) or "://" not in text:
        return Folder(Path(where))
    protocol, _, path = text.partition("://")
    if protocol in {"file", "local"}:
        return Folder(Path(path))
    return ObjectStore(text)


def above(where: str | Path) -> tuple[str | Path, str] | None:
    """The folder that `where` lies in and its name there; None for the root of an object store."""
    if isinstance(where, Path) or "://" not in where:
        path = Path(where).absolute()
        return path.parent, path.name
    folder, _, name = where.rstrip("/").rpartition("/")
    return (folder, name) if "://" in folder else None


def below(where: str | Path, name: str) -> str | Path:
    """The folder `name` in `where`."""
    if isinstance(where, Path):
        return where / name
    return f"{where}{name}" if where.endswith("/") else f"{where}/{name}"


def number_of(name: str) -> int:
    return int(name.partition("-")[0])


def _checkpoints(names: Iterable[str]) -> list[str]:
    return sorted((name for name in names if _NAME.fullmatch(name)), key=lambda name: (number_of(name), name))


class Folder:
    """A local folder. A checkpoint appears by one rename of a finished, synced folder: final names are never partial.

    The unfinished folder is `.NUMBER.partial`: making it reserves the number among all processes, and its writer
    holds an flock on it, which the kernel gives back however the writer dies. So whoever gets that lock knows that
    nobody writes there any more. (Where the file system has no flock, leftovers stay: they are never mistaken for
    checkpoints.)
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        self.where = str(self._path)

    def names(self) -> list[str]:
        """Every checkpoint, complete or not, oldest first; [] if the folder does not exist."""
        return _checkpoints(self._listed())

    def location(self, name: str) -> str:
        return str(self._path / name)

    def size(self, name: str, file: str) -> int | None:
        """Bytes of a file; None if it is not there."""
        try:
            return (self._path / name / file).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open(self, name: str, file: str) -> BinaryIO:
        return (self._path / name / file).open("rb")

    @contextmanager
    def saving(self, timeline: str) -> Iterator[tuple[str, Create]]:
        """Begin a checkpoint with the next number: its name, and how to create its files (the manifest last)."""
        if not self._path.is_dir():
            self._path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sync(self._path.parent)
        self._sweep()
        number, temporary, lock = self._reserve()
        name = f"{number:08d}-{timeline}"
        try:
            yield name, lambda file: _created(temporary / file)
            os.fsync(lock)
            temporary.rename(self._path / name)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)  # a full disk gets its space back at once
            raise
        finally:
            os.close(lock)
        _sync(self._path)

    def abandoned(self, name: str, newest: str) -> bool:
        """Whether nobody can still be writing the incomplete `name`; `newest` is a later, complete one."""
        return True  # final names are complete when they appear: what lacks something lost it later

    def remove(self, name: str) -> None:
        folder = self._path / name
        with suppress(FileNotFoundError):
            (folder / MANIFEST).unlink()  # first: half removed is not complete
        shutil.rmtree(folder)

    def _listed(self) -> list[str]:
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def _next_number(self) -> int:
        found = [_NAME.fullmatch(name) or _PARTIAL.fullmatch(name) for name in self._listed()]
        return max((int(match.group(1)) for match in found if match), default=0) + 1

    def _reserve(self) -> tuple[int, Path, int]:
        """A number that nobody else has, the folder that says so, and our lock on it."""
        while True:
            number = self._next_number()
            temporary = self._path / f".{number:08d}.partial"
            try:
                temporary.mkdir(mode=0o700)
                lock = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileExistsError, FileNotFoundError):  # another writer was faster, or swept before we had the lock
                continue
            taken = any(number_of(name) >= number for name in self.names())  # renamed since we looked
            ours = _locked(lock) is not False and _is(temporary, lock)
            if ours and not taken:
                return number, temporary, lock
            if ours:
                shutil.rmtree(temporary, ignore_errors=True)  # under our lock: the name may be another writer's next
            os.close(lock)

    def _sweep(self) -> None:
        """Remove what writers left that died in the middle."""
        for name in self._listed():
            if not _PARTIAL.fullmatch(name):
                continue
            with suppress(FileNotFoundError, NotADirectoryError):
                lock = os.open(self._path / name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
                try:
                    if _locked(lock) and _is(self._path / name, lock):  # else swept meanwhile, the name another's
                        log.info("removing %s, which was never finished", self._path / name)
                        shutil.rmtree(self._path / name, ignore_errors=True)
                finally:
                    os.close(lock)


class ObjectStore:
    """A prefix of an object store. Files are put under their final name; the manifest, put last, makes it complete.

    There is no rename and no lock: two leaders that begin a checkpoint at the same moment may write over each other.
    The digests then say so, and the checkpoint before it is used.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self._fs, self._root = _file_system(where)

    def names(self) -> list[str]:
        with _as_os_errors(self.where), suppress(FileNotFoundError):
            self._fs.invalidate_cache()  # another machine may have written
            rows = self._fs.ls(self._root, detail=False)
            return _checkpoints(row.rstrip("/").rpartition("/")[2] for row in rows)
        return []

    def location(self, name: str) -> str:
        return str(below(self.where, name))

    def size(self, name: str, file: str) -> int | None:
        with _as_os_errors(self.location(name)), suppress(FileNotFoundError):
            return int(self._fs.info(self._key(name, file))["size"])
        return None

    @contextmanager
    def open(self, name: str, file: str) -> Iterator[BinaryIO]:
        with _as_os_errors(f"{self.location(name)}/{file}"), self._fs.open(self._key(name, file), "rb") as opened:
            yield opened

    @contextmanager
    def saving(self, timeline: str) -> Iterator[tuple[str, Create]]:
        number = max(map(number_of, self.names()), default=0) + 1
        name = f"{number:08d}-{timeline}"
        with _as_os_errors(self.location(name)):
            self._fs.makedirs(self._key(name), exist_ok=True)
        yield name, lambda file: self._created(name, file)

    def abandoned(self, name: str, newest: str) -> bool:
        """Finished once and damaged since; or untouched for a day before `newest` was, by the store's own clock."""
        if self.size(name, MANIFEST) is not None:
            return True
        with _as_os_errors(self.location(name)), suppress(FileNotFoundError, NotImplementedError):
            finished = self._fs.modified(self._key(newest, MANIFEST))
            touched = [self._fs.modified(path) for path in self._fs.find(self._key(name))]
            return all(finished - at > ABANDONED_AFTER for at in touched)
        return False

    def remove(self, name: str) -> None:
        with _as_os_errors(self.location(name)):
            with suppress(FileNotFoundError):
                self._fs.rm_file(self._key(name, MANIFEST))  # first: half removed is not complete
            with suppress(FileNotFoundError):
                self._fs.rm(self._key(name), recursive=True)

    def _key(self, *parts: str) -> str:
        return "/".join([self._root.rstrip("/"), *parts])

    @contextmanager
    def _created(self, name: str, file: str) -> Iterator[BinaryIO]:
        with _as_os_errors(f"{self.location(name)}/{file}"), self._fs.open(self._key(name, file), "wb") as opened:
            yield opened


#: A folder of checkpoints; both kinds have the same methods. Whatever the storage reports is raised as OSError.
Place = Folder | ObjectStore


def _file_system(where: str) -> tuple[Any, str]:
    import fsspec
    from fsspec.registry import known_implementations

    try:
        found: tuple[Any, str] = fsspec.core.url_to_fs(where)
    except ImportError as error:
        protocol = where.partition("://")[0].rpartition("::")[2]
        package = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
        named = f"the package {package}: `pip install {package}`" if package != "fsspec" else "another package"
        raise UsageError(f"{where}: {protocol}:// needs {named} ({error})") from None
    except Exception as error:  # each client has exceptions of its own
        raise UsageError(
            f"{where}: {error}; give a folder, or a URL that fsspec knows, such as s3://bucket/prefix"
        ) from error
    return found


@contextmanager
def _as_os_errors(where: str) -> Iterator[None]:
    """Clients of object stores have exceptions of their own; ours and OSErrors pass as they are."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if type(error).__module__.startswith("anabranch"):
            raise
        raise OSError(f"{where}: {type(error).__name__}: {error}") from error


@contextmanager
def _created(path: Path) -> Iterator[BinaryIO]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(descriptor)


def _locked(descriptor: int) -> bool | None:
    """Whether we hold the lock now; None if the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is(path: Path, descriptor: int) -> bool:
    """Whether the open folder is still the one of this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
