"""Typed wrappers of the Lua scripts: the lease, and the one fenced write every change of state goes through.

A `Transaction` collects checks and writes; `FencedWriter.write` carries all of them out in one script call that
first checks the epoch, then recognises repeats, then checks everything, and only then writes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from anabranch.errors import AnabranchError, Fenced, ServerChanged

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from anabranch.queue.keys import Keys
    from anabranch.queue.messages import Claim

_ARGUMENTS = 2000  # per operation: Lua's unpack has a limited stack

Value = bytes | str | int


class WriteRefused(AnabranchError):
    """A check of a fenced write did not hold; nothing was written."""


def load_script(name: str) -> str:
    """The source of `lua/<name>.lua`."""
    return (resources.files("anabranch.queue") / "lua" / f"{name}.lua").read_text(encoding="utf-8")


@dataclass
class Transaction:
    """Checks and writes to be carried out as one. Key names are collected for KEYS."""

    keys: Keys
    script_keys: list[str] = field(default_factory=list)
    script_arguments: list[Value] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.script_keys = [self.keys.epoch, self.keys.state, self.keys.broadcast]
        self._indexes = {name: position for position, name in enumerate(self.script_keys, start=1)}  # Lua's, from 1

    def _add(self, name: str, key: str, *arguments: Value) -> None:
        if (index := self._indexes.get(key)) is None:
            self.script_keys.append(key)
            index = self._indexes[key] = len(self.script_keys)
        self.script_arguments += [name, index, len(arguments), *arguments]

    def _add_many(self, name: str, key: str, arguments: Sequence[Value]) -> None:
        for start in range(0, len(arguments), _ARGUMENTS):
            self._add(name, key, *arguments[start : start + _ARGUMENTS])

    # checks

    def require_absent(self, key: str, hash_field: str) -> None:
        """Fail unless the hash lacks the field."""
        self._add("absent", key, hash_field)

    def require_blob(self, claim: Claim) -> None:
        """Fail unless every chunk exists."""
        for key in chunk_keys(self.keys, claim):
            self._add("exists", key)

    # writes

    def hset(self, key: str, mapping: Mapping[str, Value]) -> None:
        self._add_many("hset", key, [item for pair in mapping.items() for item in pair])

    def hdel(self, key: str, fields: Sequence[str]) -> None:
        self._add_many("hdel", key, fields)

    def hincrby(self, key: str, hash_field: str, amount: int) -> None:
        self._add("hincrby", key, hash_field, amount)

    def broadcast(self, envelope: bytes, max_length: int) -> None:
        """Append to `broadcast` under the next number."""
        self._add("broadcast", self.keys.broadcast, max_length, envelope)

    def xadd(self, key: str, fields: Mapping[str, Value]) -> None:
        self._add("xadd", key, *[item for pair in fields.items() for item in pair])

    def xdel(self, key: str, ids: Sequence[bytes]) -> None:
        self._add_many("xdel", key, ids)

    def trim(self, key: str, max_length: int) -> None:
        self._add("trim", key, max_length)

    def drop_if_empty(self, key: str) -> None:
        """Delete a stream that holds no entry."""
        self._add("drop_if_empty", key)

    def set(self, key: str, value: bytes) -> None:
        self._add("set", key, value)

    def unlink(self, key: str) -> None:
        self._add("unlink", key)

    def keep_blob(self, claim: Claim) -> None:
        """Take the TTL off a blob that the state now names."""
        for key in chunk_keys(self.keys, claim):
            self._add("persist", key)

    def expire_blob(self, claim: Claim, ttl_s: float) -> None:
        for key in chunk_keys(self.keys, claim):
            self._add("expire", key, int(ttl_s * 1000))

    def drop_blob(self, claim: Claim) -> None:
        for key in chunk_keys(self.keys, claim):
            self._add("unlink", key)


def chunk_keys(keys: Keys, claim: Claim) -> list[str]:
    """Names of a blob's chunks, in order."""
    return [keys.blob(claim.owner, claim.id, n) for n in range(len(claim.hashes))]


@dataclass(frozen=True)
class Written:
    """What a fenced write answered: the last broadcast number, and whether it was a repeat."""

    broadcast: int
    repeat: bool


@dataclass(frozen=True)
class Holder:
    """Who holds the lease, and for how many seconds more unless it is renewed."""

    owner: str
    left_s: float


class FencedWriter:
    """The leader's pen: numbers its writes within its epoch and refuses to go on once fenced."""

    def __init__(self, redis: Redis, keys: Keys, owner: str) -> None:
        self._redis = redis
        self._keys = keys
        self._owner = owner
        self._write = redis.register_script(load_script("fenced_write"))
        self._acquire = redis.register_script(load_script("acquire_lease"))
        self._renew = redis.register_script(load_script("renew_lease"))
        self._set_aside = redis.register_script(load_script("set_aside"))
        self._number = 0
        self._unanswered: Transaction | None = None
        self.epoch = 0

    @property
    def token(self) -> str:
        return f"{self.epoch}:{self._owner}"

    async def acquire(self, lease_s: float) -> Holder | None:
        """Try to become leader, under a new epoch: None on success, else who holds the lease and for how long."""
        answer = await self._acquire(
            keys=[self._keys.lease, self._keys.epoch, self._keys.state],
            args=[self._owner, int(lease_s * 1000)],
        )
        if answer[0] != b"leader":
            return Holder(answer[1].decode(), max(0, int(answer[2])) / 1000)
        self.epoch, self._number, self._unanswered = int(answer[1]), 0, None
        return None

    async def renew(self, lease_s: float) -> None:
        """Renew the lease, or release it with 0; `Fenced` if somebody else leads."""
        answer = await self._renew(
            keys=[self._keys.lease, self._keys.epoch], args=[self.token, self._owner, int(lease_s * 1000)]
        )
        self._check_fence(answer)

    async def set_aside(self, names: Sequence[str]) -> None:
        """Rename keys that cannot be read to `NAME:damaged`; `Fenced` if somebody else leads."""
        pairs = [key for name in names for key in (name, f"{name}:damaged")]
        self._check_fence(await self._set_aside(keys=[self._keys.epoch, *pairs], args=[self.token]))

    async def write(self, transaction: Transaction) -> Written:
        """Carry out a transaction. Safe to repeat after a lost reply: until an answer came, the number stays, and
        whatever else is written next comes after it.

        Raises `Fenced` when a newer leader holds the run, `ServerChanged` when the server lost what it had
        acknowledged, `WriteRefused` when a check did not hold.
        """
        if self._unanswered is not None and self._unanswered is not transaction:
            with suppress(WriteRefused):
                await self.write(self._unanswered)
        self._unanswered = transaction
        answer: list[Any] = await self._write(
            keys=transaction.script_keys,
            args=[self.token, self.epoch, self._number + 1, *transaction.script_arguments],
        )
        self._unanswered = None
        self._check_fence(answer)
        if answer[0] == b"lost":
            raise ServerChanged(f"the server lost acknowledged writes: {answer[1].decode(errors='replace')}")
        if answer[0] == b"failed":
            raise WriteRefused(answer[1].decode(errors="replace"))
        self._number += 1
        return Written(broadcast=int(answer[1]), repeat=answer[0] == b"already")

    def _check_fence(self, answer: list[Any]) -> None:
        if answer[0] == b"fenced":
            holder = answer[1].decode(errors="replace")
            number = holder.partition(":")[0]
            if not number.isdecimal() or int(number) <= self.epoch:  # epochs only rise: the server went back
                raise ServerChanged(f"the server lost epoch {self.epoch} of the run: it has {holder or 'none'}")
            raise Fenced(f"epoch {self.epoch} is over: the run is held by {holder}")
