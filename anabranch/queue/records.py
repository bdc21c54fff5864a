"""Records in `spec` and `state` that members read: the spec with its layout, a fragment's claims, outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from anabranch._version import VERSION
from anabranch.errors import MalformedMessage, SchemaMismatch
from anabranch.merge.fragments import Layout
from anabranch.queue.keys import Keys, fragment_field, member_field
from anabranch.queue.messages import OLDEST_SCHEMA, SCHEMA, Call, Claim, Lease, pack, unpack
from anabranch.spec import RunSpec, parse_spec

if TYPE_CHECKING:
    from redis.asyncio import Redis


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
        """`SchemaMismatch` if the run speaks a schema that this release does not."""
        value = unpack(data)
        schema, release = value.get("schema", 1), value.get("release", "of schema 1")
        if not OLDEST_SCHEMA <= schema <= SCHEMA:
            raise SchemaMismatch(
                f"the run speaks schema {schema} (anabranch {release}), this is anabranch {VERSION}, which speaks "
                f"{OLDEST_SCHEMA} to {SCHEMA}: pip install anabranch=={release}"
            )
        layout = value["layout"]
        spec = parse_spec(value["spec"])
        return cls(spec, Layout.from_wire(layout) if layout is not None else None, schema, release)


@dataclass(frozen=True)
class FragmentRecord:
    """What `state` says of one fragment: its version and where Θ is."""

    version: int
    theta: Claim
    timeline: str = ""


@dataclass(frozen=True)
class Snapshot:
    """`state` as a member reads it."""

    timeline: str
    tokens: int
    fragments: tuple[FragmentRecord, ...]
    outcomes: dict[int, list[tuple[int, bool, int]]] | None  # by fragment; None: no such incarnation (any more)
    paused: bool
    stopped: bool
    asked_init: int  # incarnation asked for version 0
    broadcast: int
    rounds: tuple[Call, ...] = ()  # open ones, as their calls said
    leases: tuple[Lease, ...] = ()  # data ranges of the incarnation that asks


def pack_fragment(theta: Claim, momentum: Claim | None) -> bytes:
    return pack({"theta": theta.model_dump(), "momentum": momentum.model_dump() if momentum is not None else None})


def unpack_fragment(data: bytes) -> tuple[Claim, Claim | None]:
    """(Θ, momentum)"""
    value = unpack(data)
    try:
        momentum = value["momentum"]
        return Claim.model_validate(value["theta"]), Claim.model_validate(momentum) if momentum is not None else None
    except ValidationError as error:
        raise MalformedMessage(f"a fragment's record is damaged: {error}") from None


async def read_tape(redis: Redis, keys: Keys, after: int, page: int = 1000) -> list[dict[str, Any]]:
    """Events of the tape's stream with an id above `after`, oldest first."""
    newest_first: list[dict[str, Any]] = []
    end = "+"
    while True:
        entries: Any = await redis.xrevrange(keys.tape, max=end, count=page)
        for _, fields in entries:
            event = unpack(fields[b"e"])
            if "id" not in event:  # written by a leader of schema 1, whose own file has it
                continue
            if event["id"] <= after:
                return newest_first[::-1]
            newest_first.append(event)
        if len(entries) < page:
            return newest_first[::-1]
        end = f"({entries[-1][0].decode()}"


async def read_run(redis: Redis, keys: Keys) -> RunRecord | None:
    data: Any = await redis.get(keys.spec)
    return RunRecord.unpack(data) if data is not None else None


async def read_snapshot(redis: Redis, keys: Keys, incarnation: int, nonce: bytes | None = None) -> Snapshot | None:
    """`state` in one consistent read (fenced writes are atomic); None before the first write.

    `nonce`: of the life that asks; if the incarnation's is another (the number was given out once more after the
    server lost that it had been), it is nobody's.
    """
    fields: dict[Any, Any] = await redis.hgetall(keys.state)
    if b"core" not in fields:
        return None
    core = unpack(fields[b"core"])
    versions = [fragment["version"] for fragment in core["fragments"]]
    sizes = [fragment["size"] for fragment in core["fragments"]]
    claims = [unpack_fragment(fields[fragment_field(i).encode()])[0] for i in range(len(versions))]
    data = fields.get(member_field(incarnation).encode())
    member = unpack(data) if data is not None else None
    outcomes: dict[int, list[tuple[int, bool, int]]] | None = None
    leases: tuple[Lease, ...] = ()
    if member is not None and nonce in (None, member["nonce"]):
        outcomes = {f: [(b, a, t) for b, a, t in items] for f, items in member["outcomes"]}
        leases = _leases(core.get("data"), member.get("leases", []))
    return Snapshot(
        timeline=core["timeline"],
        tokens=int(core["applied_parameter_tokens"]) // max(1, sum(sizes)),
        fragments=tuple(FragmentRecord(v, c, core["timeline"]) for v, c in zip(versions, claims, strict=True)),
        outcomes=outcomes,
        paused=core["paused"],
        stopped=core["stopped"],
        asked_init=core["asked_init"],
        broadcast=int(fields.get(b"broadcast", b"0")),
        rounds=tuple(
            Call(
                round=item["number"],
                fragment=item["fragment"],
                timeline=core["timeline"],
                base=item["base"],
                called=item["called"],
            )
            for item in core["rounds"]
        ),
        leases=leases,
    )


def _leases(data: dict[str, Any] | None, records: list[list[int]]) -> tuple[Lease, ...]:
    """A member's record lists number, epoch, range, start and stop first."""
    if data is None:
        return ()
    length = data["range_items"]
    return tuple(
        Lease(number=number, epoch=epoch, range=range_, first=range_ * length, start=start, stop=stop)
        for number, epoch, range_, start, stop, *_ in records
    )
