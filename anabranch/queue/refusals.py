"""What a server's error replies mean: which pass by themselves, and what is said about the others.

redis-py cuts the first word off replies that it has a class for (NOPERM, READONLY, OOM …) and leaves it on others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from anabranch.errors import CommandRefused

#: Errors of a server that pass by themselves: failing over, loading, out of disk, busy, without replicas.
_PASSING = (
    "READONLY",
    "LOADING",
    "MISCONF",
    "MASTERDOWN",
    "BUSY",
    "NOREPLICAS",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "OOM",
    "UNBLOCKED",
)
_CLASSES = {NoPermissionError: "NOPERM", ReadOnlyError: "READONLY", OutOfMemoryError: "OOM"}

PERMISSIONS = "ACL SETUSER NAME ~anabranch:* &anabranch:* +@all -@dangerous +info +config|get"
_BULK = "the server's proto-max-bulk-len is lower: raise it (CONFIG SET proto-max-bulk-len 512mb)"


def code_of(error: RedisError) -> str:
    """The reply's first word: `WRONGTYPE`, `NOPERM`, `MISCONF` …; `ERR` where there is none."""
    if (code := next((c for kind, c in _CLASSES.items() if isinstance(error, kind)), None)) is not None:
        return code
    first = str(error).partition(" ")[0]
    return first if first.isupper() and first.isalpha() else "ERR"


def is_passing(error: ResponseError) -> bool:
    """Whether the same command may succeed later."""
    return code_of(error) in _PASSING


_WORDS = {
    "NOREPLICAS": "the server refuses writes: too few replicas are in sync (min-replicas-to-write)",
    "MISCONF": "the server refuses writes: it cannot save to its disk (MISCONF: full, or not writable)",
    "READONLY": (_REPLICA := "the server refuses writes: it is a replica, by a fail-over or the URL"),
    "UNBLOCKED": _REPLICA,  # what a command that waited is told when its server becomes one
    "OOM": "the server refuses writes: its maxmemory is used up",
    "LOADING": "the server is loading its data",
    "BUSY": "the server is busy with a script of somebody's",
}
NO_ANSWER = "Redis does not answer"
_NO_MORE_CLIENTS = "the server takes no more clients (maxclients)"


def words(error: BaseException) -> str:
    """What an outage is, in one sentence: page, health check, log and `anabranch status` say the same."""
    if isinstance(error, BusyLoadingError):
        return _WORDS["LOADING"]
    if isinstance(error, AuthenticationError):
        return f"the server does not take our password: {error}"
    if isinstance(error, RedisError):
        if "max number of clients" in str(error):
            return _NO_MORE_CLIENTS
        if (said := _WORDS.get(code_of(error))) is not None:
            return said
        if isinstance(error, ResponseError):
            return f"the server refuses for now: {' '.join(str(error).split()):.120}"
    return NO_ANSWER


def refused(error: RedisError, command: Sequence[Any]) -> CommandRefused:
    """An error reply as one line: which command, what the server says, and what to do about it."""
    said, code = " ".join(str(error).split()), code_of(error)
    return CommandRefused(f"the server refuses {named(command)}: {said}; {_advice(code, said)}", code)


def too_large(command: Sequence[Any], limit: int, setting: str) -> CommandRefused:
    """`limit`: bytes of the longest value, by this setting of the server's."""
    said = f"a value of {largest(command):,} bytes, and its {setting} allows {limit:,}"
    return CommandRefused(f"the server refuses {named(command)}: {said}; raise it (CONFIG SET {setting})")


def perhaps_too_large(command: Sequence[Any]) -> str:
    """What may be the reason if a connection ends with this command each time, where the limit cannot be read."""
    limits = "proto-max-bulk-len or client-query-buffer-limit"
    return f"if it ends so each time, {limits} may be below the {largest(command):,} bytes of this value"


def named(command: Sequence[Any]) -> str:
    """A command and the key it is about, without its values."""
    words = [_text(word) for word in command]
    name, keys = words[0], words[1:2]
    if name in ("EVAL", "EVALSHA"):
        name, keys = f"{name} (a script)", words[3:4]
    elif "STREAMS" in words:
        keys = words[words.index("STREAMS") + 1 :][:1]
    return " ".join([name, *(key for key in keys if key)])


def largest(command: Sequence[Any]) -> int:
    """Bytes of the longest value in a command."""
    return max((memoryview(word).nbytes for word in command if isinstance(word, bytes | memoryview)), default=0)


def _text(word: Any) -> str:
    """A word of a command; "" for a value that says nothing to people."""
    if isinstance(word, bytes | bytearray | memoryview):
        return ""
    text = str(word)
    return text if len(text) <= 200 and text.isprintable() else ""


def _advice(code: str, said: str) -> str:
    lower = said.lower()
    if code == "NOPERM" or "no permissions" in lower or "acl failure" in lower or "can't run this command" in lower:
        return f"the URL's user needs that permission: {PERMISSIONS}"
    if code == "WRONGTYPE":
        return "something else was written there: rename or delete that key"
    if "bulk length" in lower or "exceeds maximum allowed size" in lower:
        return _BULK
    if "unknown command" in lower or "unknown subcommand" in lower:
        return "use Redis 7.0 or newer, or Valkey, with all commands enabled (rename-command, a proxy's list)"
    if code in ("MOVED", "ASK", "CROSSSLOT"):
        return "this is one node of a cluster: name a server that is none"
    if code == "DENIED":
        return "give the server a password, or turn its protected-mode off"
    if "db index is out of range" in lower:
        return "the number after the host names a database that the server has not (`databases`)"
    return "look at the server's log and settings"
