"""Text as bytes: which files, which of them are held out, and windows to train on. No torch here.

Without a folder the text is the Python standard library's own source, which every machine that runs this has.
"""

from __future__ import annotations

import codecs
import hashlib
import logging
import os
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from anabranch.errors import UsageError

log = logging.getLogger("anabranch.worker")

Bytes = NDArray[np.uint8]
_Item = TypeVar("_Item", bound=np.generic)

_SUFFIXES = """
    .c .cfg .cpp .css .csv .go .h .hpp .htm .html .ini .java .js .json .jsonl .kt .lua .md .py .pyi .rb .rs
    .rst .scala .sh .sql .swift .tex .text .toml .ts .tsv .tsx .txt .xml .yaml .yml
"""
TEXT_SUFFIXES = frozenset(_SUFFIXES.split())
_TESTS = {"test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3"}  # as large as the library itself
_TABLES = {"encodings", "pydoc_data"}  # generated; one of these files would be two thirds of the held-out text
_STDLIB_SKIPS = frozenset({"site-packages", "dist-packages", "__pycache__"} | _TESTS | _TABLES)
_FOLDER_SKIPS = frozenset({"__pycache__", ".git", ".venv", "node_modules"})

_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32", codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16", codecs.BOM_UTF8: "utf-8",
}  # fmt: skip

MAX_BYTES = 32 << 20
HELDOUT_SHARE = 0.05
SEPARATOR = b"\n"


def text_files(directory: Path | None) -> list[Path]:
    """The text files below `directory`, or the standard library's sources for None, in a fixed order.

    UsageError when there are none.
    """
    if directory is None:
        root, skips, suffixes = _stdlib(), _STDLIB_SKIPS, frozenset({".py"})
    else:
        root, skips, suffixes = directory, _FOLDER_SKIPS, TEXT_SUFFIXES
        if not root.is_dir():
            raise UsageError(f"data folder {root} is not a folder: name one that holds text files")
    found = list(_walk(root, skips, suffixes))
    if not found:
        raise UsageError(
            f"no text files in {root}: it needs at least one ending in {' '.join(sorted(suffixes))} "
            f"outside of {', '.join(sorted(skips))}"
        )
    return sorted(found, key=lambda path: _name(path, root))


def is_heldout(name: str) -> bool:
    """Whether the file of this relative path is held out: by its SHA-256, so alike on every machine."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") < HELDOUT_SHARE * 2**64


def sides(files: list[Path], directory: Path | None, max_bytes: int) -> list[tuple[list[Path], int]]:
    """The files (of `text_files(directory)`) to train on and those held out, each with the bytes to read at most."""
    root = directory or _stdlib()
    heldout = {path for path in files if is_heldout(_name(path, root))}
    return [
        ([path for path in files if path not in heldout], int(max_bytes * (1 - HELDOUT_SHARE))),
        ([path for path in files if path in heldout], int(max_bytes * HELDOUT_SHARE)),
    ]


def none_empty(parts: list[NDArray[_Item]], unit: str, directory: Path | None) -> list[NDArray[_Item]]:
    """Training and held-out `parts`; if the split by files left one empty (very few files), the last twentieth is
    held out instead.

    UsageError when there is too little text for that.
    """
    if not all(part.size for part in parts):
        text = np.concatenate(parts)
        parts = np.split(text, [text.size - int(text.size * HELDOUT_SHARE)])
    if not all(part.size for part in parts):
        root = directory or _stdlib()
        raise UsageError(f"the text files in {root} are too short, {parts[0].size} {unit}: some kilobytes are needed")
    return parts


class Decoder:
    """One file's bytes as text, piece by piece. `UsageError` names the file and what in it is not in `encoding`."""

    def __init__(self, path: Path, encoding: str) -> None:
        self._path = path
        self._encoding = encoding
        signed = codecs.lookup(encoding).name == "utf-8"  # then a mark at the start is no text
        self._decoder = codecs.getincrementaldecoder("utf-8-sig" if signed else encoding)("strict")
        self._read = 0
        self._first = b""

    def decode(self, piece: bytes, *, final: bool = False) -> str:
        """The characters that are whole; one that a border cuts comes with the next piece."""
        self._first = self._first or piece[:4]
        waiting = self._decoder.getstate()[0]
        try:
            text = self._decoder.decode(piece, final)
        except UnicodeError as error:
            start = getattr(error, "start", 0)
            raise UsageError(
                self._refusal(self._read - len(waiting) + start, (waiting + piece)[start:][:1])
            ) from None
        self._read += len(piece)
        return text

    def end(self) -> None:
        """The whole file was read: nothing may wait for more."""
        self.decode(b"", final=True)

    def _refusal(self, place: int, byte: bytes) -> str:
        guess = next((name for mark, name in _MARKS.items() if self._first.startswith(mark)), None)
        looks = f"; it looks like {guess}" if guess else ""
        return (
            f"{self._path} is not {self._encoding}: byte 0x{byte.hex() or '??'} at {place:,}{looks}. Name the "
            "encoding of the folder's files with task.options.encoding (say, latin-1), convert the file, or remove it"
        )


def check_encoding(encoding: str) -> str | None:
    """What is wrong with the name; None if it is one of a text encoding."""
    try:
        "".encode(encoding)
    except (LookupError, ValueError):
        return "a text encoding that Python knows, such as utf-8, latin-1, utf-16, cp1252 or shift_jis"
    return None


@dataclass(frozen=True, eq=False)
class ByteCorpus:
    """Training and held-out text as two flat byte arrays; no file is in both."""

    train: Bytes
    heldout: Bytes

    @classmethod
    def load(cls, directory: Path | None = None, max_bytes: int = MAX_BYTES, encoding: str = "") -> ByteCorpus:
        """Read the files of `text_files(directory)`, at most `max_bytes` in all. UsageError as for `none_empty`.

        `encoding`: of the files, which become UTF-8 (`UsageError` if one is not in it); empty: bytes as they are.
        """
        found = sides(text_files(directory), directory, max_bytes)
        parts = [_join(files, limit, encoding) for files, limit in found]
        return cls(*none_empty(parts, "bytes", directory))

    def random_windows(self, rng: np.random.Generator, batch: int, length: int) -> Bytes:
        """`batch` random pieces of the training text, each of `length` inputs and the byte after them."""
        last = _last_start(self.train, length, "training")
        starts = rng.integers(0, last + 1, size=batch)
        return windows(self.train, starts, length)  # [batch, length + 1]

    def heldout_windows(self, count: int, length: int) -> Bytes:
        """`count` pieces of the held-out text, evenly spaced and always the same."""
        last = _last_start(self.heldout, length, "held-out")
        starts = np.linspace(0, last, num=count).astype(np.int64)
        return windows(self.heldout, starts, length)  # [count, length + 1]


@lru_cache(maxsize=4)
def load_corpus(directory: Path | None = None, max_bytes: int = MAX_BYTES, encoding: str = "") -> ByteCorpus:
    """`ByteCorpus.load`, read once per process."""
    return ByteCorpus.load(directory, max_bytes, encoding)


def _walk(root: Path, skips: frozenset[str], suffixes: frozenset[str]) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in skips]  # not even entered
        for name in names:
            path = Path(folder, name)
            if path.suffix.lower() in suffixes and path.is_file():
                yield path


def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def _name(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _join(files: Iterable[Path], limit_bytes: int, encoding: str) -> Bytes:
    return np.frombuffer(b"".join(_pieces(files, limit_bytes, encoding)), dtype=np.uint8)


def _pieces(files: Iterable[Path], limit_bytes: int, encoding: str) -> Iterator[bytes]:
    """Each file and a separator. Files that are no UTF-8 and were not said to be are counted in one warning."""
    odd: list[Path] = []
    for path, text, whole in _texts(files, limit_bytes):
        if encoding:
            decoder = Decoder(path, encoding)
            yield (decoder.decode(text, final=whole)).encode() + SEPARATOR
            continue
        try:
            codecs.getincrementaldecoder("utf-8")().decode(text, whole)
        except UnicodeDecodeError:
            odd.append(path)
        yield text + SEPARATOR
    if odd:
        log.warning(
            "%d files are not UTF-8 (%s …); their bytes are trained on as they are: name their encoding with "
            "task.options.encoding to have them converted", len(odd), odd[0],
        )  # fmt: skip


def _texts(files: Iterable[Path], limit_bytes: int) -> Iterator[tuple[Path, bytes, bool]]:
    """Each file that is not empty, its bytes, and whether these are all of it."""
    left = limit_bytes
    for path in files:
        if left <= 0:
            return
        try:
            with path.open("rb") as file:
                text = file.read(left)
                whole = not file.read(1)
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error}") from error
        if text:
            left -= len(text) + len(SEPARATOR)
            yield path, text, whole


def _last_start(text: Bytes, length: int, which: str) -> int:
    last = text.size - (length + 1)
    if last < 0:
        raise UsageError(
            f"the {which} text has {text.size} bytes, a window of length {length} needs {length + 1}: "
            "add text or choose a smaller `context`"
        )
    return last


def windows(text: NDArray[_Item], starts: NDArray[np.int64], length: int) -> NDArray[_Item]:
    """Pieces of `text` that begin at `starts`, each of `length` inputs and what follows: [starts, length + 1]."""
    pieces: NDArray[_Item] = text[starts[:, None] + np.arange(length + 1)]
    return pieces
