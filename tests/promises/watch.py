"""What must never happen, watched while it might: bits, versions, books, blobs that stay for ever."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import Redis

from anabranch.queue.keys import SYNCHRONIZER, Keys
from anabranch.queue.scripts import chunk_keys
from anabranch.workers.member.incarnation import Incarnation
from anabranch.workers.member.learner import NewVersion
from anabranch.workers.member.synthetic import SyntheticWorker
from tests.harness import each_life, stored_claims

#: Events that would mean that something is wrong; the tape must have none of them.
UNEXPECTED = frozenset({"ledger mismatch", "trouble", "orphaned"})


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Watch:
    """Everything that anybody was ever told, and what in it contradicts itself."""

    bits: dict[tuple[str, int, int], bytes] = field(default_factory=dict)  # timeline, fragment, version: digest
    merged: dict[tuple[str, int, int], Any] = field(default_factory=dict)  # the same: what was applied
    kinds: Counter[str] = field(default_factory=Counter)
    noted: list[str] = field(default_factory=list)  # refusals and the like, for the report
    timelines: list[str] = field(default_factory=list)  # with why each began
    departed: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    _seen: set[tuple[Any, ...]] = field(default_factory=set)

    def member(self, worker: SyntheticWorker) -> None:
        """Note the bits of every version that this worker is given."""

        def watched(life: Incarnation) -> None:
            offer = life.learner.offer

            def note(version: NewVersion) -> None:
                name = (version.timeline, version.fragment, version.version)
                if self.bits.setdefault(name, version.digest) != version.digest:
                    self.broken.append(f"{name} came back with other bits")
                offer(version)

            life.learner.offer = note  # type: ignore[method-assign]

        each_life(worker.client, watched)

    def event(self, event: dict[str, Any]) -> None:
        """One of the tape; the same one may be seen many times."""
        who = (event["id"], event["time"], event["kind"], event["reason"])
        if who in self._seen:
            return
        self._seen.add(who)
        self.kinds[event["kind"]] += 1
        if event["kind"] == "merged":
            self._merged(event)
        elif event["kind"] == "timeline":
            self.timelines.append(f"{event['timeline']}: {event['reason']}")
        elif event["kind"] in {"refused", "turned away", "trouble", "ledger mismatch", "orphaned", "born"}:
            self.noted.append(f"{event['kind']}: {event['reason']}")
            if event["kind"] in UNEXPECTED:
                self.broken.append(f"{event['kind']}: {event['reason']} (tape {event['id']})")
        if event["kind"] == "born" and self.kinds["born"] > 1:
            self.broken.append("the run was born twice")

    def _merged(self, event: dict[str, Any]) -> None:
        name = (event["timeline"], event["fragment"], event["version"])
        applied = [(v["incarnation"], v["base"], v["tokens"]) for v in event["verdicts"] if v["applied"]]
        if self.merged.setdefault(name, applied) != applied:
            self.broken.append(f"{name} was committed twice: {self.merged[name]}, {applied}")
        if len({(incarnation, base) for incarnation, base, _ in applied}) != len(applied):
            self.broken.append(f"{name} applied a contribution twice: {applied}")
        if any(base != event["version"] - 1 for _, base, _ in applied):
            self.broken.append(f"{name} applied a contribution on another base: {applied}")

    def core(self, core: dict[str, Any]) -> None:
        """The stored record of the core."""
        for gone in core["departed"]:
            if (gone["incarnation"], core["timeline"]) in self.departed:
                continue
            self.departed[gone["incarnation"], core["timeline"]] = gone
            booked = gone["applied"] + gone["rejected"] + gone["discarded"] + gone["lost"]
            if abs(gone["processed"] - booked) > 1e-6:
                self.broken.append(f"books of a departed member do not balance: {gone}")

    def gaps(self) -> list[str]:
        """Versions missing from a timeline: each has all between its first and its last."""
        found = []
        for timeline, fragment in sorted({(t, f) for t, f, _ in self.merged}):
            versions = sorted(v for t, f, v in self.merged if (t, f) == (timeline, fragment))
            if versions != list(range(versions[0], versions[0] + len(versions))):
                missing = sorted(set(range(versions[0], versions[-1])) - set(versions))
                found.append(f"timeline {timeline}, fragment {fragment}: no event of versions {missing}")
        return found

    def applied_since(self, known: set[tuple[str, int, int]]) -> set[int]:
        """Incarnations that were merged in anything newer than `known`."""
        return {part[0] for name, parts in self.merged.items() if name not in known for part in parts}


async def orphans(redis: Redis, keys: Keys) -> list[str]:
    """Blobs of the synchronizer that never run out although no state names them."""
    before = await _named(redis, keys)
    pattern = f"{escaped(keys.prefix)}blob:{SYNCHRONIZER}:*"
    lasting = [key async for key in redis.scan_iter(match=pattern, count=1000) if await redis.pttl(key) == -1]
    named = before | await _named(redis, keys)
    return [key.decode() for key in lasting if key.decode() not in named and await redis.pttl(key) == -1]


async def _named(redis: Redis, keys: Keys) -> set[str]:
    fields: list[Any] = await redis.hkeys(keys.state)
    fragments = [int(name[9:]) for name in fields if name.startswith(b"fragment:")]
    claims = [claim for index in fragments for claim in await stored_claims(redis, keys, index) if claim is not None]
    return {key for claim in claims for key in chunk_keys(keys, claim)}


def escaped(prefix: str) -> str:
    return prefix.replace("[", "\\[").replace("{", "\\{")
