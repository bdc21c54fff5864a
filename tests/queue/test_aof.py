"""The end of an append-only file as a crash may leave it: the server starts, and nothing is thrown away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from anabranch.errors import ServerError
from anabranch.queue import aof
from anabranch.queue.embedded import EmbeddedServer, ServerOptions
from tests.conftest import ServerFactory

COMMANDS = 50


def command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


SET = command(b"SET", b"k", b"a\r\n$3\r\n*2\r\n")
MULTI, EXEC = command(b"MULTI"), command(b"EXEC")

#: name: what is whole, what is not
ENDS: dict[str, tuple[bytes, bytes]] = {
    "whole": (SET * 3, b""),
    "empty": (b"", b""),
    "cut in a value": (SET * 3, SET[:-4]),
    "cut in a length": (SET * 3, b"*3\r\n$"),
    "junk": (SET * 3, b"garbage\x00\r\n"),
    "zeros": (SET * 3, bytes(4096)),
    "a command of nothing": (SET, b"*0\r\n"),
    "a length that is none": (SET, b"*1\r\n$abc\r\nFOO\r\n"),
    "no name": (SET, command(b"\x00\x01")),
    "a transaction that is whole": (SET + MULTI + SET + EXEC, b""),
    "a transaction without its end": (SET, MULTI + SET * 2),
    "a transaction with junk in it": (SET, MULTI + SET + b"junk" + EXEC),
    "junk in the middle": (SET, b"XXXX" + SET * 3),
    "a remark": (b"#TS:1700000000\r\n" + SET, b"#TS:17"),
    "nothing but junk": (b"", b"junk"),
}


def folder(data: Path, *files: tuple[str, bytes]) -> Path:
    """A server's folder with these files as increments."""
    (data / aof.FOLDER).mkdir(parents=True)
    lines = ["file appendonly.aof.1.base.rdb seq 1 type b"]
    for number, (name, content) in enumerate(files, start=1):
        (data / aof.FOLDER / name).write_bytes(content)
        lines.append(f"file {name} seq {number} type i startoffset 0")
    (data / aof.FOLDER / "appendonly.aof.manifest").write_text("\n".join(lines) + "\n")
    return data


@pytest.mark.parametrize("end", ENDS)
def test_what_is_not_whole_is_cut_off_and_kept(tmp_path: Path, end: str) -> None:
    whole, rest = ENDS[end]
    data = folder(tmp_path / "data", ("a.1.incr.aof", SET + b"junk"), ("a.2.incr.aof", whole + rest))
    repaired = aof.repair(data)
    assert (data / aof.FOLDER / "a.2.incr.aof").read_bytes() == whole
    assert (data / aof.FOLDER / "a.1.incr.aof").read_bytes() == SET + b"junk", "only the last file has an end"
    if not rest:
        assert repaired is None
    else:
        assert repaired is not None
        assert repaired.cut == len(rest)
        assert repaired.copy.read_bytes() == whole + rest
        assert repaired.copy.parent == data
        assert repaired.copy.stat().st_mode & 0o777 == 0o600
        assert aof.repair(data) is None


def test_the_last_file_is_the_one_with_the_highest_number(tmp_path: Path) -> None:
    """Whatever the order of the manifest's lines."""
    data = folder(tmp_path / "data", ("a.1.incr.aof", SET + b"junk"), ("a.2.incr.aof", SET + b"junk"))
    manifest = data / aof.FOLDER / "appendonly.aof.manifest"
    manifest.write_text("\n".join(reversed(manifest.read_text().splitlines())) + "\n")
    repaired = aof.repair(data)
    assert repaired is not None
    assert repaired.file.name == "a.2.incr.aof"


def test_no_copy_is_overwritten(tmp_path: Path) -> None:
    data = folder(tmp_path / "data", ("a.1.incr.aof", SET + b"junk"))
    copies = []
    for _ in range(3):
        repaired = aof.repair(data)
        assert repaired is not None
        copies.append(repaired.copy)
        repaired.file.write_bytes(SET + b"junk")
    assert len(set(copies)) == 3


def test_without_files_there_is_nothing_to_repair(tmp_path: Path) -> None:
    assert aof.repair(tmp_path) is None
    assert aof.repair(folder(tmp_path / "data")) is None


# --- with a real server -----------------------------------------------------------------------------------


def filled(server: EmbeddedServer) -> Path:
    """Its append-only file, after some transactions."""
    with redis.Redis.from_url(server.url) as client:
        for number in range(COMMANDS):
            pipe = client.pipeline(transaction=True)
            pipe.set(f"k{number}", "v" * 50)
            pipe.hset("h", str(number), number)
            pipe.execute()
    server.stop()
    [file] = (server.options.directory / aof.FOLDER).glob("*.incr.aof")
    return file


def held(server: EmbeddedServer) -> tuple[int, int]:
    with redis.Redis.from_url(server.url) as client:
        strings = sum(key.startswith(b"k") for key in client.scan_iter(count=1000))
        return strings, client.hlen("h")


@pytest.mark.parametrize(
    ("damage", "left", "said"),
    [
        (lambda data: data[:-20], COMMANDS - 1, False),
        (lambda data: data + b"garbage\x00\r\n", COMMANDS, True),
        (lambda data: data + bytes(4096), COMMANDS, True),
        (lambda data: data[:-20] + bytes(4096), COMMANDS - 1, True),
    ],
    ids=["cut short", "junk", "zeros", "zeros in a transaction"],
)
def test_a_server_starts_with_an_end_that_is_damaged(
    server_factory: ServerFactory,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[bytes], bytes],
    left: int,
    said: bool,
) -> None:
    caplog.set_level(logging.WARNING, logger="anabranch")
    server = server_factory()
    file = filled(server)
    before = damage(file.read_bytes())
    file.write_bytes(before)
    server.start()
    assert held(server) == (left, left)
    assert ("bytes that are no command" in caplog.text) is said
    if said:
        [copy] = server.options.directory.glob("damaged-*")
        assert copy.read_bytes() == before
        assert str(copy) in caplog.text
    with redis.Redis.from_url(server.url) as client:
        client.set("after", 1)
    server.stop()
    server.start()
    assert held(server) == (left, left)


def test_where_the_end_is_not_what_is_wrong_it_says_what_to_do(server_factory: ServerFactory) -> None:
    server = server_factory()
    filled(server)
    [base] = (server.options.directory / aof.FOLDER).glob("*.base.rdb")
    base.write_bytes(base.read_bytes()[:20])
    [file] = (server.options.directory / aof.FOLDER).glob("*.incr.aof")
    file.write_bytes(file.read_bytes() + b"junk, too")
    with pytest.raises(
        ServerError, match=r"Move .*appendonlydir away .*: a run then goes on from its newest checkpoint"
    ):
        server.start()
    (server.options.directory / aof.FOLDER).rename(server.options.directory / "away")
    again = EmbeddedServer(ServerOptions(server.options.directory))
    again.start()
    assert held(again) == (0, 0)
    again.stop()
