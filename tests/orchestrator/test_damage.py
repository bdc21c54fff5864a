"""Whatever a stored record is made into: a good copy takes its place, and without one nothing is written."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from redis.asyncio import Redis

from anabranch.errors import CheckpointError
from anabranch.operate import status
from anabranch.orchestrator.restore import restore
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.queue.connection import connect
from anabranch.queue.keys import Keys
from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace
from tests.harness import bench, make_spec
from tests.promises.test_04_lost_data import checkpointed
from tests.wait import wait_until

QUICK = Pace(step_s=0.003)

#: What may have become of a record.
DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "missing": lambda data: None,
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "text": lambda data: b"\xffjunk:1:2",
    "a number": lambda data: msgpack.packb(7),
    "a list": lambda data: msgpack.packb([1, "a", None]),
    "a map": lambda data: msgpack.packb({"now": 0.0, "state": {}, "member": {}, "spec": {}, "schema": 1}),
    "another type": lambda data: msgpack.packb({"now": "x", "state": [], "member": 3, "schema": "1", "release": 0}),
}
#: Fields of the hash `state` without which the run cannot go on.
NEEDED = ("core", "member", "fragment:0", "momentum:0", "broadcast")
#: … and those that the next leader makes anew, or whose loss shows otherwise.
SPARE = ("head", "own", "picture", "server", "write", "epoch")
#: A record that is simply gone is nobody's loss here: whoever was a member asks to be let in again.
HARMLESS = {("member", "missing")}


class Stage:
    """A stored run that can be put back as it was, and a checkpoint of it."""

    def __init__(self, url: str, directory: Path, redis: Redis) -> None:
        self.url = url
        self.directory = directory
        self.redis = redis
        self.keys = Keys(RunUrl.parse(url).run)
        self.spec = make_spec(self.keys.run)
        self.dumps: dict[bytes, Any] = {}
        self.versions: list[int] = []
        self.theta = np.empty(0, np.float32)

    async def begin(self) -> None:
        async with bench(self.url, self.spec, directory=self.directory) as run:
            run.add("w", QUICK)
            await run.reach(1)
            await run.settle()
            await checkpointed(run)
            self.versions, self.theta = run.versions(), run.theta(0).copy()
        for key in await self._names():
            self.dumps[key] = await self.redis.dump(key)

    async def reset(self) -> None:
        for key in await self._names():
            await self.redis.delete(key)
        for key, data in self.dumps.items():
            await self.redis.restore(key, 0, data)

    async def field(self, name: str) -> str:
        """Its full name: the first of its kind, where there is one for each incarnation."""
        fields: Any = await self.redis.hkeys(self.keys.state)
        names = sorted(field.decode() for field in fields)
        return next((field for field in names if field.startswith(f"{name}:")), name)

    async def _names(self) -> list[Any]:
        return [key async for key in self.redis.scan_iter(match=f"*{self.keys.run}/0*", count=1000)]

    async def goes_on(self, damage: str, *, from_copy: bool | None) -> None:
        """`from_copy` None: either way."""
        async with bench(self.url, self.spec, directory=self.directory) as run:
            await wait_until(lambda: bool(run.versions()), f"{damage}: it leads")
            assert run.versions() == self.versions, damage
            np.testing.assert_array_equal(run.theta(0), self.theta)
            if from_copy is not None:
                reasons = [event["reason"] for event in run.tape("timeline")]
                assert from_copy == any("restored from" in reason for reason in reasons), (damage, reasons)
            assert (await status(RunUrl.parse(self.url)))["leader"], damage

    async def stands_still(self, damage: str) -> None:
        before = await self._told()
        with pytest.raises(CheckpointError, match="there is no checkpoint to go on from: nothing is written"):
            await Synchronizer(RunUrl.parse(self.url), self.spec).run()
        assert await self._told() == before, damage

    async def _told(self) -> dict[bytes, Any]:
        """Everything but who leads."""
        told: dict[bytes, Any] = {}
        for key in await self._names():
            if await self.redis.type(key) == b"hash":
                fields: Any = await self.redis.hgetall(key)
                told[key] = {name: value for name, value in fields.items() if name != b"epoch"}
            elif not key.endswith((b":lease", b":epoch")):
                told[key] = await self.redis.dump(key)
        return {key: value for key, value in told.items() if value}


@pytest.fixture
async def stage(run_url: str, tmp_path: Path) -> Any:
    redis = connect(RunUrl.parse(run_url), name="test")
    made = Stage(run_url, tmp_path, redis)
    await made.begin()
    yield made
    await redis.aclose()


async def each(stage: Stage, damage: Callable[[str], Awaitable[bool | None]], names: Any) -> None:
    """For each damage: with a checkpoint the run goes on, without one it stands still."""
    for name in names:
        await stage.reset()
        needed = await damage(name)
        await stage.goes_on(name, from_copy=needed)
        if needed:
            await stage.reset()
            await damage(name)
            await stage.stands_still(name)


@pytest.mark.parametrize("name", [*NEEDED, *SPARE])
async def test_a_damaged_field_of_the_state(stage: Stage, name: str) -> None:
    async def damage(kind: str) -> bool | None:
        field = await stage.field(name)
        whole: Any = await stage.redis.hget(stage.keys.state, field)
        data = DAMAGES[kind](whole or b"an order of leaving took it away")
        if data is None:
            await stage.redis.hdel(stage.keys.state, field)
        else:
            await stage.redis.hset(stage.keys.state, field, data)
        if name in SPARE or (name, kind) in HARMLESS:
            return False
        return None if data is not None and name == "broadcast" and data.isdigit() else True

    await each(stage, damage, DAMAGES)


async def test_a_damaged_definition(stage: Stage) -> None:
    async def damage(kind: str) -> bool:
        whole: Any = await stage.redis.get(stage.keys.spec)
        data = DAMAGES[kind](whole)
        if data is None:
            await stage.redis.delete(stage.keys.spec)
        else:
            await stage.redis.set(stage.keys.spec, data)
        return True

    await each(stage, damage, DAMAGES)


@pytest.mark.parametrize(
    ("field", "value"),
    [("1:0:applied", "junk"), ("1:0:applied", ""), ("junk", "1"), ("1:99:applied", "1"), ("1:0:stolen", "1")],
)
async def test_a_damaged_ledger(stage: Stage, field: str, value: str) -> None:
    async def damage(_: str) -> bool:
        await stage.redis.hset(stage.keys.ledger, field, value)
        return True

    await each(stage, damage, [f"{field} = {value!r}"])


@pytest.mark.parametrize("name", ["spec", "state", "ledger", "broadcast", "tape", "control", "epoch"])
async def test_a_key_of_another_type_or_none(stage: Stage, name: str) -> None:
    key = getattr(stage.keys, name)
    needed = name in ("spec", "state", "ledger")

    async def damage(kind: str) -> bool:
        await stage.redis.delete(key)
        if kind == "a list":
            await stage.redis.rpush(key, "junk")
        elif kind == "a hash":
            await stage.redis.hset(key, "junk", "junk")
        elif kind == "a string":
            await stage.redis.set(key, "junk")
        return needed

    kinds = ["gone", "a list", "a hash" if name not in ("state", "ledger") else "a string"]
    await each(stage, damage, kinds)


async def test_what_cannot_be_read_is_kept_beside(stage: Stage) -> None:
    await stage.reset()
    await stage.redis.hset(stage.keys.state, "core", "junk")
    await stage.goes_on("core", from_copy=True)
    assert await stage.redis.hget(f"{stage.keys.state}:damaged", "core") == b"junk"


async def test_a_checkpoint_is_put_back_by_hand_over_what_is_damaged(stage: Stage) -> None:
    await stage.reset()
    await stage.redis.hset(stage.keys.state, "core", "junk")
    await stage.redis.delete(stage.keys.ledger)
    await stage.redis.set(stage.keys.ledger, "junk")
    said = await restore(RunUrl.parse(stage.url), str(stage.directory))
    assert "restored by hand" in said
    await stage.goes_on("by hand", from_copy=None)


async def test_a_standby_outlives_a_state_that_is_none(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        await run.settle()
        versions = run.versions()
        await run.redis.delete(run.keys.state)
        await run.redis.set(run.keys.state, "junk")
        second = Synchronizer(run.url)
        task = asyncio.create_task(second.run(), name="second")
        await wait_until(lambda: run.tape("timeline"), "the leader noticed")
        await wait_until(lambda: run.versions() == versions or second.core is not None, "it is led again")
        assert not task.done()
        second.end()
        await task


async def test_a_leader_whose_run_is_damaged_goes_on_from_what_it_holds(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(1)
        await run.settle()
        versions, theta = run.versions(), run.theta(0).copy()
        await run.redis.delete(run.keys.ledger)
        await run.redis.set(run.keys.ledger, "junk")
        await run.command("resume")
        await wait_until(lambda: run.tape("timeline"), "it noticed")
        assert "this synchronizer's memory" in run.tape("timeline")[-1]["reason"]
        await wait_until(lambda: run.versions() >= versions, "it leads again")
        assert run.theta(0).shape == theta.shape
        await run.reach(max(versions) + 1)
