"""The stored run: a batch of decisions is one transaction, and a run loads as it was stored."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.errors import SpecError
from anabranch.orchestrator import store
from anabranch.orchestrator.core.record import core_record
from anabranch.queue.connection import connect
from anabranch.queue.keys import Keys
from anabranch.queue.messages import unpack
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec
from anabranch.workers.member.synthetic import Pace
from tests.harness import bench, make_spec
from tests.wait import wait_until

QUICK = Pace(step_s=0.003)


async def test_a_run_that_is_not_there_is_begun(run_url: str, run_name: str) -> None:
    redis = connect(RunUrl.parse(run_url), name="test")
    stored = await store.read_stored(redis, Keys(run_name), None, "aa", 0.0)
    state, record = stored.state, stored.record
    await redis.aclose()
    assert not state.born
    assert record.spec == RunSpec(name=run_name)
    assert record.layout is None


async def test_what_is_stored_is_loaded_again(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(2)
        await run.settle()
        stored = await store.read_stored(run.redis, run.keys, None, "ignored", 100.0)
        state, record = stored.state, stored.record
        assert record.spec == run.state.spec
        ours = unpack(core_record(state, 100.0))["state"]
        theirs = unpack(core_record(run.state, run.synchronizer.clock.now))["state"]
        volatile = {"averages", "counts", "rounds", "interval_at"}
        assert {k: v for k, v in ours.items() if k not in volatile} == {
            k: v for k, v in theirs.items() if k not in volatile
        }
        for incarnation, member in run.state.members.items():
            loaded = state.members[incarnation]
            assert loaded.account == member.account
            assert loaded.outcomes == member.outcomes
            assert loaded.register == member.register


async def test_the_ledger_in_redis_is_what_was_booked(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        worker = run.add("w", QUICK)
        await run.reach(3)
        await run.settle()
        me = worker.client.incarnation
        account = run.state.members[me].account
        for fragment in range(2):
            stored = await run.redis.hget(run.keys.ledger, f"{me}:{fragment}:applied")
            assert int(stored or 0) == account.applied[fragment] > 0


async def test_books_of_the_departed_are_added_up(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("steady", QUICK)
        guest = run.add("guest", Pace(step_s=0.003, steps=60))
        await wait_until(lambda: guest.step == 60, "it trained")
        run.kill("guest")
        await wait_until(lambda: any(d.name == "guest" for d in run.state.departed), "its books are closed")
        await run.settle()
        departed = next(d for d in run.state.departed if d.name == "guest")
        sizes = run.state.sizes
        for column in ("applied", "rejected", "lost"):
            stored = [int(await run.redis.hget(run.keys.ledger, f"departed:{f}:{column}") or 0) for f in range(2)]
            mean = sum(tokens * size for tokens, size in zip(stored, sizes, strict=True)) / sum(sizes)
            assert mean == pytest.approx(getattr(departed, column))
        fields: Any = await run.redis.hkeys(run.keys.ledger)
        assert not [key for key in fields if key.startswith(f"{departed.incarnation}:".encode())]
        again = await store.read_stored(run.redis, run.keys, None, "x", 0.0)
        assert again.state.departed_books == run.state.departed_books
        assert any(map(any, run.state.departed_books))


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rounds": {"fragments": 3}}, r"rounds\.fragments = 3 here, 2 in the run"),
        ({"workers": {"codec": "bf16"}}, r"workers\.codec = 'bf16' here, 'fp32' in the run"),
        ({"task": {"options": {"tensors": 9}}}, r"task\.options = \{'tensors': 9\} here"),
    ],
)
async def test_the_first_difference_is_named(
    run_url: str, run_name: str, sections: dict[str, dict[str, object]], words: str
) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w")
        await run.reach(0)
        with pytest.raises(SpecError, match=words):
            await store.read_stored(run.redis, run.keys, make_spec(run_name, **sections), "aa", 0.0)


@pytest.mark.parametrize("may_change", [False, True])
async def test_before_there_is_a_model_a_definition_may_change(
    run_url: str, run_name: str, *, may_change: bool
) -> None:
    other = make_spec(run_name, rounds={"fragments": 3})
    async with bench(run_url, make_spec(run_name)) as run:
        read = store.read_stored(run.redis, run.keys, other, "aa", 0.0, may_change=may_change)
        if not may_change:
            with pytest.raises(SpecError, match="another definition"):
                await read
            return
        stored = await read
        assert stored.redefined == (
            "the run's definition was changed before it had a model: rounds.fragments = 3 now, 2 before"
        )
        assert stored.state.spec == stored.record.spec == other
        run.add("w")
        await run.reach(0)
        with pytest.raises(SpecError, match="another definition"):
            await store.read_stored(run.redis, run.keys, other, "aa", 0.0, may_change=True)


async def test_settings_that_may_change_are_no_difference(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        other = make_spec(run_name, rounds={"quorum": 5, "inner_steps": 99})
        stored = await store.read_stored(run.redis, run.keys, other, "aa", 0.0)
        assert stored.state.spec.rounds.quorum == 1, "the stored ones are in force"


async def test_old_blobs_run_out_and_current_ones_stay(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", QUICK)
        await run.reach(3)
        await run.settle()
        vault = run.synchronizer.vault
        assert vault is not None
        current = {claim.id for v in vault.versions for claim in (v.theta_claim, v.momentum_claim) if claim}
        seen = set()
        async for key in run.redis.scan_iter(count=1000):
            if b":blob:_:" in key:
                blob_id = key.split(b":")[-2].decode()
                seen.add(blob_id)
                assert (await run.redis.pttl(key) == -1) == (blob_id in current), key
        assert current <= seen
