"""Whatever one member sends, makes of its keys, or claims: the synchronizer and the others go on."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from anabranch.model import unflatten
from anabranch.orchestrator.vault import Vault
from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs, make_claim
from anabranch.workers.member.client import Client
from anabranch.workers.member.synthetic import NumpyStore, Pace, SyntheticOptions
from tests.fundamentals.test_03_hostile import Attacker
from tests.harness import Bench, bench, make_spec, send_everything_twice
from tests.wait import wait_until


async def _goes_on(run: Bench) -> None:
    await run.reach(max(run.versions()) + 2)


async def _beat(attacker: Attacker, **fields: Any) -> None:
    run = attacker.run
    zeros = [0, 0]
    standard: dict[str, Any] = {
        "incarnation": attacker.incarnation, "steps": 1, "step_s": 0.01, "adopted": [0, 0],
        "held": zeros, "processed": 0, "discarded": zeros, "pending": zeros, "read": 10**6,
    }  # fmt: skip
    progress = messages.Progress.model_construct(**{**standard, **fields})
    data = messages.encode(progress, run.url.run)
    await run.redis.xadd(run.keys.progress(attacker.name), {"m": data})


async def _absurd_figures(attacker: Attacker) -> None:
    await _beat(attacker, discarded=[2**63] * 2, pending=[2**63] * 2)


async def _mass_of_lost_tokens(attacker: Attacker) -> None:
    most = messages.Figures(processed=2**48, discarded=0, pending=0)
    await attacker.run.post(attacker.name, messages.Farewell(incarnation=attacker.incarnation, figures=[most, most]))


async def _claim_of_a_key_that_is_no_chunk(attacker: Attacker) -> None:
    run = attacker.run
    size = run.state.fragments[0].size * 4
    claim = make_claim(attacker.name, memoryview(bytes(size)), "fp32")
    await run.redis.rpush(run.keys.blob(attacker.name, claim.id, 0), b"a list")
    target = run.state.fragments[0]
    await run.post(
        attacker.name,
        messages.Contribution(
            incarnation=attacker.incarnation, fragment=0, timeline=run.state.timeline, base=target.version,
            base_digest=target.digest, round=1, tokens=1, steps=1,
            figures=messages.Figures(processed=1, discarded=0, pending=1), claim=claim,
        ),
    )  # fmt: skip


async def _streams_that_are_none(attacker: Attacker) -> None:
    run = attacker.run
    for key in (run.keys.progress(attacker.name), run.keys.contributions(attacker.name)):
        await run.redis.delete(key)
        await run.redis.set(key, b"a string")


async def _step_time_of_a_century(attacker: Attacker) -> None:
    for step in range(1, 6):
        await _beat(
            attacker, steps=step * 1000, step_s=1e9, held=[1, 1], adopted=[f.version for f in _fragments(attacker)]
        )


def _fragments(attacker: Attacker) -> Any:
    return attacker.run.state.fragments


async def _huge_gradient(attacker: Attacker) -> None:
    await attacker.contribute(np.full(attacker.run.state.fragments[0].size, 3e38))


async def _thousand_names(attacker: Attacker) -> None:
    for _ in range(1200):
        await attacker.run.redis.publish(attacker.run.keys.knock, secrets.token_hex(8))


ATTACKS = [
    _absurd_figures, _mass_of_lost_tokens, _claim_of_a_key_that_is_no_chunk, _streams_that_are_none,
    _step_time_of_a_century, _huge_gradient, _thousand_names,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__.strip("_"))
async def test_the_run_goes_on(run_url: str, run_name: str, attack: Any) -> None:
    async with bench(run_url, make_spec(run_name, rounds={"deadline_min_s": 1.0})) as run:
        run.add("honest", Pace(step_s=0.005))
        await run.reach(1)
        attacker = Attacker(run)
        await attacker.join()
        await attack(attacker)
        await _goes_on(run)
        run.add("newcomer", Pace(step_s=0.005))
        await wait_until(
            lambda: any(m.name == "newcomer" and m.last_round for m in run.state.members.values()),
            "a newcomer gets in",
        )
        await _goes_on(run)


def _gigantic(owner: str) -> tuple[bytes, list[dict[str, Any]]]:
    """A model of half a terabyte that nobody has: only claimed."""
    hashes = [bytes(32)] * 1024
    claim = messages.Claim(
        owner=owner,
        id="ab",
        bytes=2**39,
        chunk_bytes=2**29,
        codec="fp32",
        hashes=hashes,
        digest=hashlib.sha256(b"".join(hashes)).digest(),
    )
    tensors = [["a", [2**37], False], ["b", [2**37], False]]
    return messages.pack({"tensors": tensors, "fragments": 2}), [claim.model_dump()] * 2


@pytest.mark.parametrize("what", ["unhashable", "gigantic"])
async def test_version_0_that_cannot_be_used_is_refused_and_the_next_one_asked(
    run_url: str, run_name: str, what: str
) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        attacker = Attacker(run)
        run_redis, keys = run.redis, run.keys
        await run_redis.publish(keys.knock, attacker.name)
        request = messages.Register(nonce=secrets.token_bytes(16), name=attacker.name, can_init=True)
        await run.post(attacker.name, request)
        await wait_until(lambda: run.state.asked_init == 1, "the attacker was asked")
        blobs = RedisBlobs(run_redis, keys)
        layout, claims = (b"\x81\x91\x01\x01", []) if what == "unhashable" else _gigantic(attacker.name)
        layout_claim = await blobs.put(attacker.name, memoryview(layout), "msgpack", 60.0)
        listed = await blobs.put(attacker.name, memoryview(messages.pack(claims)), "msgpack", 60.0)
        await run.post(attacker.name, messages.Init(incarnation=1, layout=layout_claim, fragments=listed))
        await wait_until(lambda: bool(run.tape("refused")), "it was refused")
        run.add("honest", Pace(step_s=0.005))
        await run.reach(1)


async def test_a_repeated_version_0_is_taken_once(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        first = run.add("first", Pace(step_s=0.005))
        send_everything_twice(first.client)
        await run.reach(2)
        await run.settle()
        vault = run.synchronizer.vault
        assert vault is not None
        kept = {v.theta_claim.id for v in vault.versions} | {
            v.momentum_claim.id for v in vault.versions if v.momentum_claim
        }
        lasting = set()
        async for key in run.redis.scan_iter(match="*blob:_:*"):
            if run.url.run.encode() in key and await run.redis.ttl(key) == -1:
                lasting.add(key.decode().split(":")[-2])
        assert lasting == kept, "only what the state names has no TTL"


async def test_a_lost_upload_never_puts_a_ttl_on_the_model(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("only", Pace(step_s=0.005))
        await run.reach(1)
        vault = run.synchronizer.vault
        assert vault is not None
        upload = vault.upload
        lost: list[str] = []

        async def losing(theta: Any, momentum: Any) -> Any:
            version = await upload(theta, momentum)
            if not lost:
                lost.append(version.theta_claim.id)
                await vault.blobs.delete(version.theta_claim)
            return version

        vault.upload = losing  # type: ignore[method-assign]
        await run.reach(max(run.versions()) + 2)
        await run.settle()
        assert lost
        for version in vault.versions:
            assert await run.redis.ttl(run.keys.blob("_", version.theta_claim.id, 0)) == -1


async def test_whoever_brought_another_layout_before_birth_cannot_stay(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        attacker = Attacker(run, "other")
        await run.redis.publish(run.keys.knock, attacker.name)
        await run.post("other", messages.Register(nonce=secrets.token_bytes(16), name="other", layout_hash="ff" * 32))
        await wait_until(lambda: bool(run.state.members), "it is in before the layout is known")
        run.add("first", Pace(step_s=0.005), store=lambda layout: NumpyStore(layout, seed=1))
        await run.reach(1)
        assert not any(m.name == "other" and m.live for m in run.state.members.values())


async def test_weights_from_a_file_cannot_be_overtaken(
    run_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec(run_name)
    layout = SyntheticOptions.parse(spec.task.options).layout(spec)
    weights = NumpyStore(layout, seed=3)
    path = tmp_path / "weights.safetensors"
    save_file(unflatten(layout, weights.theta), path)
    gate, take_file = asyncio.Event(), Vault.take_file

    async def slowly(vault: Vault, source: Path) -> Any:
        await gate.wait()
        return await take_file(vault, source)

    monkeypatch.setattr(Vault, "take_file", slowly)
    async with bench(run_url, spec, init=path) as run:
        eager = run.add("eager", Pace(step_s=0.005, steps=0))
        await wait_until(eager.client.joined.is_set, "a worker is there before the file is read")
        assert not run.tape("init asked")
        gate.set()
        await run.reach(0)
        for p in range(2):
            np.testing.assert_array_equal(run.theta(p), weights.theta[p])


async def test_a_killed_worker_started_again_at_once_outlives_its_former_self(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("steady", Pace(step_s=0.005))
        run.add("twin", Pace(step_s=0.005))
        await run.reach(1)
        former = run.workers["twin"].client.incarnation
        run.kill("twin")
        again: Client = run.add("twin", Pace(step_s=0.005)).client
        await wait_until(lambda: again.joined.is_set() and again.incarnation > former, "it is let in again")
