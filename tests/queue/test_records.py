"""Records that members read: the run's definition, and `state` in one consistent picture."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis

from anabranch.errors import MalformedMessage
from anabranch.model import layout_for
from anabranch.queue.blobs import make_claim
from anabranch.queue.keys import Keys
from anabranch.queue.messages import FragmentHead, encode, pack
from anabranch.queue.records import RunRecord, pack_claim, read_record, read_run, read_snapshot, unpack_claim
from anabranch.spec import RunSpec
from anabranch.workers.member.synthetic import Pace
from tests.harness import bench, make_spec
from tests.wait import wait_until

CLAIM = make_claim("_", memoryview(b"theta"), "fp32")


@pytest.mark.parametrize("born", [True, False])
def test_a_run_record_comes_back_as_it_was(born: bool) -> None:
    spec = make_spec("r", merge={"embedding_tensors": ("*a*",)})
    layout = layout_for(spec, [("a", (3, 4)), ("b", ()), ("c", (5,))]) if born else None
    again = RunRecord.unpack(RunRecord(spec, layout).pack())
    assert again.spec == spec
    assert again.spec.hash == spec.hash
    assert again.layout == layout


def test_a_fragments_records_come_back_as_they_were() -> None:
    head = FragmentHead(version=7, claim=CLAIM)
    assert read_record(FragmentHead, encode(head, "r"), "r") == head
    assert unpack_claim(pack_claim(CLAIM)) == CLAIM


@pytest.mark.parametrize("data", [b"", b"\xc1", pack({"owner": "_"}), pack([1])])
def test_a_damaged_record_is_a_message_error(data: bytes) -> None:
    with pytest.raises(MalformedMessage):
        unpack_claim(data)
    with pytest.raises(MalformedMessage):
        read_record(FragmentHead, data, "r")


def test_a_record_that_is_gone_is_a_message_error() -> None:
    with pytest.raises(MalformedMessage, match="holds no fragment"):
        read_record(FragmentHead, None, "r")


async def test_before_anything_is_written_there_is_nothing_to_read(redis: Redis, run_name: str) -> None:
    assert await read_run(redis, Keys(run_name)) is None
    assert await read_snapshot(redis, Keys(run_name), 2, 1) is None


async def test_a_snapshot_says_what_the_run_holds(redis: Redis, run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        worker = run.add("w", Pace(step_s=0.003))
        await run.reach(2)
        await run.settle()
        record = await read_run(redis, run.keys)
        assert record is not None
        assert record.layout is not None
        assert record.spec == run.state.spec
        snapshot = await read_snapshot(redis, run.keys, 2, worker.client.incarnation)
        assert snapshot is not None
        assert [fragment.version for fragment in snapshot.fragments] == run.versions()
        assert [f.theta.digest for f in snapshot.fragments] == [f.digest for f in run.state.fragments]
        assert (snapshot.head.tokens, snapshot.head.timeline) == (run.state.tokens, run.state.timeline)
        assert snapshot.head.paused
        assert not snapshot.head.stopped
        assert snapshot.own is not None
        outcomes = [verdict for verdict in snapshot.own.outcomes if verdict.fragment == 0]
        assert outcomes[-1].base == run.versions()[0] - 1
        assert all(verdict.applied and verdict.tokens > 0 for verdict in outcomes)
        last: Any = await redis.xrevrange(run.keys.broadcast, count=1)
        assert snapshot.broadcast == int(last[0][1][b"n"])


async def test_an_incarnation_that_is_over_has_no_outcomes(redis: Redis, run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", Pace(step_s=0.003))
        await run.reach(1)
        snapshot = await read_snapshot(redis, run.keys, 2, 12345)
        assert snapshot is not None
        assert snapshot.own is None


async def test_a_member_that_has_sent_nothing_has_empty_outcomes(redis: Redis, run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        worker = run.add("w", Pace(steps=0))
        await wait_until(worker.ready.is_set, "it has adopted")
        snapshot = await read_snapshot(redis, run.keys, 2, worker.client.incarnation)
        assert snapshot is not None
        assert snapshot.own is not None
        assert snapshot.own.outcomes == []


def test_the_default_spec_survives_the_record() -> None:
    assert RunRecord.unpack(RunRecord(RunSpec(), None).pack()).spec == RunSpec()
