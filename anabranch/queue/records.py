"""What lies in `spec`, `state` and `tape` and is read by more than the leader."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from anabranch._version import VERSION
from anabranch.errors import CommandRefused, MalformedMessage, SchemaMismatch, SpecError
from anabranch.merge.fragments import Layout
from anabranch.queue.keys import BROADCAST_FIELD, HEAD_FIELD, SPECS, Keys, fragment_field, own_field, run_of
from anabranch.queue.messages import (
    OLDEST_SCHEMA,
    SCHEMA,
    STATE_LIMIT,
    Claim,
    FragmentHead,
    Head,
    Message,
    Own,
    decode,
    pack,
    unpack,
)
from anabranch.spec import RunSpec, parse_spec

if TYPE_CHECKING:
    from redis.asyncio import Redis

M = TypeVar("M", bound=Message)

RUNS_NAMED = 12  # in an error

#: What reading a record raises that is not what it should be: bytes of any kind may lie there.
DAMAGE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def said(error: BaseException) -> str:
    """What is wrong with a record, in a few words."""
    return f"{type(error).__name__} {' '.join(str(error).split()):.200}"


@dataclass(frozen=True)
class RunRecord:
    """What the key `spec` holds. `layout` is None before birth.

    `schema`: the newest one that members write; it stays what the run was begun with until nobody is left who may
    know no newer one. `release`: of the synchronizer that wrote this.
    """

    spec: RunSpec
    layout: Layout | None
    schema: int = SCHEMA
    release: str = VERSION

    def pack(self) -> bytes:
        layout = self.layout.to_wire() if self.layout is not None else None
        spec = self.spec.to_wire(self.schema)
        return pack(
            {"spec": spec, "hash": self.spec.hash, "layout": layout, "schema": self.schema, "release": self.release}
        )

    @classmethod
    def unpack(cls, data: bytes) -> RunRecord:
        """`SchemaMismatch` if the run speaks a schema that this release does not, `MalformedMessage` if damaged."""
        try:
            value = unpack(data)
            schema, release = value["schema"], value["release"]
            if not OLDEST_SCHEMA <= schema <= SCHEMA:
                raise SchemaMismatch(
                    f"the run speaks schema {schema} (anabranch {release}), this is anabranch {VERSION}, which "
                    f"speaks {OLDEST_SCHEMA} to {SCHEMA}: pip install anabranch=={release}"
                )
            layout = value["layout"]
            spec = parse_spec(value["spec"])
            return cls(spec, Layout.from_wire(layout) if layout is not None else None, schema, release)
        except (*DAMAGE, SpecError) as error:
            raise MalformedMessage(f"the stored definition is damaged: {said(error)}") from None


@dataclass(frozen=True)
class FragmentRecord:
    """One fragment's version as a member fetches it."""

    version: int
    theta: Claim
    timeline: str = ""


@dataclass(frozen=True)
class Snapshot:
    """`state` as a member reads it."""

    head: Head
    fragments: tuple[FragmentRecord, ...]  # empty before birth
    own: Own | None  # None: no such incarnation (any more)
    broadcast: int  # number of the last entry


def pack_claim(claim: Claim) -> bytes:
    return pack(claim.model_dump())


def unpack_claim(data: bytes) -> Claim:
    """The inverse of `pack_claim`; `MalformedMessage` if damaged."""
    try:
        return Claim.model_validate(unpack(data))
    except ValidationError as error:
        raise MalformedMessage(f"a claim's record is damaged: {error}") from None


def read_record(kind: type[M], data: bytes | None, run: str) -> M:
    """A message that the leader stored; `MalformedMessage` if it is gone or another one."""
    message = decode(data, run, STATE_LIMIT) if data is not None else None
    if not isinstance(message, kind):
        raise MalformedMessage(f"state holds no {kind.type} where one should be")
    return message


async def read_tape(redis: Redis, keys: Keys, after: int, page: int = 1000) -> list[dict[str, Any]]:
    """Events of the tape's stream with an id above `after`, oldest first."""
    newest_first: list[dict[str, Any]] = []
    end = "+"
    while True:
        entries: Any = await redis.xrevrange(keys.tape, max=end, count=page)
        for _, fields in entries:
            if (event := read_event(fields)) is None:
                continue
            if event["id"] <= after:
                return newest_first[::-1]
            newest_first.append(event)
        if len(entries) < page:
            return newest_first[::-1]
        end = f"({entries[-1][0].decode()}"


def read_event(fields: Mapping[bytes, bytes]) -> dict[str, Any] | None:
    """An entry of the tape; None if it cannot be read: nothing is decided by it."""
    with suppress(KeyError, MalformedMessage):
        event = unpack(fields[b"e"])
        if isinstance(event, dict) and isinstance(event.get("id"), int) and {"kind", "reason"} <= event.keys():
            return event
    return None


def read_picture(data: bytes) -> dict[str, Any]:
    """What the leader stored for `anabranch status`; `MalformedMessage` if damaged."""
    picture = unpack(data)
    if not isinstance(picture, dict) or not {"phase", "members", "departed"} <= picture.keys():
        raise MalformedMessage("the stored picture is damaged: the leader stores another within a second")
    return picture


async def read_run(redis: Redis, keys: Keys) -> RunRecord | None:
    data: Any = await redis.get(keys.spec)
    return RunRecord.unpack(data) if data is not None else None


async def no_such_run(redis: Redis, run: str) -> str:
    """In one sentence: it is not there, and which are, as far as we may look."""
    try:
        found = sorted({run_of(key.decode()) async for key in redis.scan_iter(SPECS, count=1000)})
    except CommandRefused:  # SCAN is not permitted
        return f"no run {run!r} on this server"
    there = f"there are: {', '.join(found[:RUNS_NAMED])}" if found else "there is none"
    return f"no run {run!r} on this server; {there}"


def _number(data: bytes | None) -> int:
    try:
        return int(data or b"0")
    except ValueError:
        raise MalformedMessage(f"the number of the last broadcast entry is {data!r:.40}") from None


async def read_snapshot(
    redis: Redis, keys: Keys, fragments: int, incarnation: int, nonce: bytes | None = None
) -> Snapshot | None:
    """`state` in one consistent read (fenced writes are atomic); None before the first write.

    `fragments`: how many the run has. `nonce`: of the life that asks; if the incarnation's is another (the number was
    given out once more after the server lost that it had been), it is nobody's.
    """
    names = [HEAD_FIELD, BROADCAST_FIELD, own_field(incarnation), *map(fragment_field, range(fragments))]
    found: list[Any] = await redis.hmget(keys.state, names)
    head_data, broadcast, own_data, *fragment_data = found
    if head_data is None:
        return None
    head = read_record(Head, head_data, keys.run)
    own = read_record(Own, own_data, keys.run) if own_data is not None else None
    born = bool(fragment_data) and fragment_data[0] is not None
    heads = [read_record(FragmentHead, data, keys.run) for data in fragment_data] if born else []
    return Snapshot(
        head,
        tuple(FragmentRecord(item.version, item.claim, head.timeline) for item in heads),
        own if own is not None and nonce in (None, own.nonce) else None,
        _number(broadcast),
    )
