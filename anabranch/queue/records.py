"""Records in `spec` and `state` that members read: the spec with its layout, a fragment's claims, outcomes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from anabranch.errors import MalformedMessage
from anabranch.merge.fragments import Layout
from anabranch.queue.keys import Keys, fragment_field, member_field
from anabranch.queue.messages import Claim, pack, unpack
from anabranch.spec import RunSpec, parse_spec

if TYPE_CHECKING:
    from redis.asyncio import Redis


@dataclass(frozen=True)
class RunRecord:
    """What the key `spec` holds. `layout` is None before birth."""

    spec: RunSpec
    layout: Layout | None

    def pack(self) -> bytes:
        layout = self.layout.to_wire() if self.layout is not None else None
        return pack({"spec": self.spec.model_dump(mode="json"), "hash": self.spec.hash, "layout": layout})

    @classmethod
    def unpack(cls, data: bytes) -> RunRecord:
        value = unpack(data)
        layout = value["layout"]
        return cls(parse_spec(value["spec"]), Layout.from_wire(layout) if layout is not None else None)


@dataclass(frozen=True)
class FragmentRecord:
    """What `state` says of one fragment: its version and where Θ is."""

    version: int
    theta: Claim


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


async def read_run(redis: Redis, keys: Keys) -> RunRecord | None:
    data: Any = await redis.get(keys.spec)
    return RunRecord.unpack(data) if data is not None else None


async def read_snapshot(redis: Redis, keys: Keys, incarnation: int) -> Snapshot | None:
    """`state` in one consistent read (fenced writes are atomic); None before the first write."""
    fields: dict[Any, Any] = await redis.hgetall(keys.state)
    if b"core" not in fields:
        return None
    core = unpack(fields[b"core"])
    versions = [fragment["version"] for fragment in core["fragments"]]
    sizes = [fragment["size"] for fragment in core["fragments"]]
    claims = [unpack_fragment(fields[fragment_field(i).encode()])[0] for i in range(len(versions))]
    member = fields.get(member_field(incarnation).encode())
    outcomes = None
    if member is not None:
        outcomes = {f: [(b, a, t) for b, a, t in items] for f, items in unpack(member)["outcomes"]}
    return Snapshot(
        timeline=core["timeline"],
        tokens=int(core["applied_parameter_tokens"]) // max(1, sum(sizes)),
        fragments=tuple(FragmentRecord(v, c) for v, c in zip(versions, claims, strict=True)),
        outcomes=outcomes,
        paused=core["paused"],
        stopped=core["stopped"],
        asked_init=core["asked_init"],
        broadcast=int(fields.get(b"broadcast", b"0")),
    )
