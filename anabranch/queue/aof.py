"""Repairing the end of a server's append-only file.

A server starts with a last file that was cut short (`aof-load-truncated`), but not with one whose end is something
else, as a crash of the machine may leave it. Then everything after the last whole command goes; the file as it was is
kept.
"""

from __future__ import annotations

import mmap
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

FOLDER = "appendonlydir"
_HEADER = re.compile(rb"([*$])(\d{1,10})\r\n")
_MOST_HEADER_BYTES = 16


@dataclass(frozen=True)
class Repaired:
    """What was cut off the end of `file`, in bytes, and where all of it still is."""

    file: Path
    cut: int
    copy: Path


def repair(data: Path) -> Repaired | None:
    """Cut the last append-only file in a server's folder after its last whole command; None if that is its end.

    The server must not run. OSError if the files cannot be read or written.
    """
    if (file := _last(data / FOLDER)) is None:
        return None
    size, whole = file.stat().st_size, _whole(file)
    if whole == size:
        return None
    copy = _free_name(data, file.name)
    shutil.copyfile(file, copy)
    copy.chmod(0o600)
    with file.open("r+b") as opened:
        opened.truncate(whole)
    return Repaired(file, size - whole, copy)


def _last(folder: Path) -> Path | None:
    """The file that the server appended to last, as its manifest says."""
    newest: tuple[int, Path] | None = None
    for manifest in folder.glob("*.manifest"):
        for line in manifest.read_text(encoding="utf-8", errors="replace").splitlines():
            words = line.split()
            said = dict(zip(words[::2], words[1::2], strict=False))
            if said.get("type") == "i" and said.get("seq", "").isdecimal() and (folder / said["file"]).is_file():
                newest = max(newest or (0, folder), (int(said["seq"]), folder / said["file"]))
    return newest[1] if newest is not None else None


def _whole(file: Path) -> int:
    """Bytes up to the end of the last whole command outside of a transaction, or of the last whole transaction."""
    if file.stat().st_size == 0:
        return 0
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = whole = 0
        in_transaction = False
        while (found := _command(data, at)) is not None:
            at, name = found
            in_transaction = (in_transaction or name == b"MULTI") and name != b"EXEC"
            if not in_transaction:
                whole = at
        return whole


def _command(data: mmap.mmap, at: int) -> tuple[int, bytes] | None:
    """The command at a position: where it ends, and its name; None if there is no whole one."""
    if data[at : at + 1] == b"#":  # a remark, such as the time
        end = data.find(b"\r\n", at, at + 1024)
        return (end + 2, b"") if end >= 0 else None
    if (header := _header(data, at, b"*")) is None or header[1] == 0:
        return None
    (at, count), name = header, b""
    for word in range(count):
        if (header := _header(data, at, b"$")) is None:
            return None
        start, length = header
        at = start + length + 2
        if data[at - 2 : at] != b"\r\n":
            return None
        if word == 0:
            name = data[start : start + min(length, 64)].upper()
            if not re.fullmatch(rb"[A-Z.|_-]+", name):
                return None
    return at, name


def _header(data: mmap.mmap, at: int, kind: bytes) -> tuple[int, int] | None:
    """The number in a line `*N` or `$N`, after the position behind it."""
    found = _HEADER.match(data[at : at + _MOST_HEADER_BYTES])
    return (at + found.end(), int(found[2])) if found is not None and found[1] == kind else None


def _free_name(data: Path, name: str) -> Path:
    number = 1
    while (copy := data / f"damaged-{number}-{name}").exists():
        number += 1
    return copy
