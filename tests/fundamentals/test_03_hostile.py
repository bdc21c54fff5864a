"""What must not enter the model: rejected with its reason, Θ unchanged, the others go on."""

from __future__ import annotations

import logging
import secrets
from typing import Any

import numpy as np
import pytest

from anabranch.merge.codecs import encode
from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs
from anabranch.workers.member.synthetic import Pace
from tests.harness import Bench, bench, make_spec
from tests.wait import wait_until

DEEP_MAP = b"\x81\xa1a" * 5000 + b"\x80"


class Attacker:
    """A registered member that writes its own messages."""

    def __init__(self, run: Bench, name: str = "mallory") -> None:
        self.run = run
        self.name = name
        self.incarnation = 0

    async def join(self) -> None:
        await self.run.redis.publish(self.run.keys.knock, self.name)
        await self.run.post(self.name, messages.Register(nonce=secrets.token_bytes(16), name=self.name))
        state = self.run.state
        await wait_until(lambda: any(m.name == self.name for m in state.members.values()), "the attacker is in")
        self.incarnation = next(m.incarnation for m in state.members.values() if m.name == self.name)

    async def contribute(self, values: Any, *, base: int | None = None, fragment: int = 0) -> None:
        run = self.run
        blobs = RedisBlobs(run.redis, run.keys)
        claim = await blobs.put(self.name, encode("fp32", np.asarray(values, np.float32)), "fp32", 60.0)
        target = run.state.fragments[fragment]
        message = messages.Contribution(
            incarnation=self.incarnation,
            fragment=fragment,
            timeline=run.state.timeline,
            base=target.version if base is None else base,
            base_digest=target.digest,
            round=1,
            tokens=10**6,
            steps=1,
            figures=messages.Figures(processed=10**6, discarded=0, pending=10**6),
            claim=claim,
        )
        await run.post(self.name, message)


async def _attack(attacker: Attacker, kind: str) -> str:
    """Do one bad thing; returns words its reason must contain."""
    size = attacker.run.state.fragments[0].size
    if kind == "nan":
        await attacker.contribute(np.full(size, np.nan))
        return "non-finite"
    if kind == "shape":
        await attacker.contribute(np.zeros(size + 1))
        return "wrong shape"
    if kind == "base":
        await attacker.contribute(np.zeros(size), base=10**6)
        return "unknown base"
    await attacker.run.send(attacker.name, DEEP_MAP)
    return "not valid msgpack"


@pytest.mark.parametrize("kind", ["nan", "shape", "base", "deep map"])
async def test_bad_member_changes_nothing(
    run_url: str, run_name: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    spec = make_spec(run_name)
    async with bench(run_url, spec) as run:
        run.add("honest", Pace(step_s=0.005, steps=0))
        await run.reach(0)
        before = [run.theta(p).copy() for p in range(2)]
        attacker = Attacker(run)
        await attacker.join()
        words = await _attack(attacker, kind)

        def reasons() -> list[str]:
            return [e["reason"] for e in run.synchronizer.tape.recent if e["kind"] in {"rejected", "refused"}]

        await wait_until(lambda: any(words in reason for reason in reasons()), f"{words!r} is on the tape")
        assert any(words in record.getMessage() for record in caplog.records), "and in the log"
        for p in range(2):
            np.testing.assert_array_equal(run.theta(p), before[p])
        assert await run.redis.xlen(run.keys.contributions(attacker.name)) == 0, "the entry is consumed"
        run.add("second", Pace(step_s=0.003))
        await run.reach(2)
        assert all(np.isfinite(run.theta(p)).all() for p in range(2))


async def test_oversized_envelope_is_refused_before_decoding(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("honest")
        await run.reach(0)
        attacker = Attacker(run)
        await attacker.join()
        await run.send("mallory", b"\xdd" + b"\xff" * (messages.ENVELOPE_LIMIT + 1))
        await wait_until(
            lambda: any("the limit is 65536" in e["reason"] for e in run.tape("refused")), "the size is named"
        )
        await run.reach(run.versions()[0] + 2)


async def test_nobody_speaks_for_another(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        honest = run.add("honest")
        await run.reach(0)
        attacker = Attacker(run)
        await attacker.join()
        await run.post("mallory", messages.Farewell(incarnation=honest.client.incarnation))
        await attacker.contribute(np.zeros(run.state.fragments[0].size))
        await wait_until(lambda: not run.state.verifying, "both are read")
        await run.reach(run.versions()[0] + 2)
        assert run.state.members[honest.client.incarnation].live
