"""No fresh model takes over: whoever comes with weights of its own adopts the run's, and does so first.

K = 1, so a newcomer decides alone what is merged. All workers are killed for real, and one starts with other random
weights. The Δ of these workers is a multiple of what they adopted (θ shrinks towards zero), so one look at the angle
between two versions shows whether strange weights entered.
"""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from anabranch.merge.codecs import encode
from anabranch.model import Float32
from anabranch.orchestrator.tape import FILE_NAME
from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs
from anabranch.workers.member.synthetic import NumpyStore, Pace, SyntheticOptions
from tests.harness import Bench, bench, make_spec
from tests.wait import wait_until

ROOT = Path(__file__).parents[2]


@contextmanager
def stranger(run_url: str, name: str, seed: int) -> Iterator[subprocess.Popen[bytes]]:
    """A real worker process with random weights of its own, until the end of the block."""
    command = [sys.executable, "-m", "tests.promises.stranger", run_url, name, str(seed)]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def model(run: Bench) -> list[Float32]:
    return [run.theta(p).copy() for p in range(2)]


def cosine(one: Float32, other: Float32) -> float:
    return float(np.dot(one, other) / (np.linalg.norm(one) * np.linalg.norm(other)))


async def has_adopted(run: Bench, name: str) -> None:
    """Wait until a member says that it holds the current version of every fragment."""
    await wait_until(
        lambda: any(m.name == name and m.adopted == run.versions() for m in run.state.members.values()),
        f"{name} has adopted everything",
    )


async def test_after_all_were_killed_a_newcomer_adopts_the_model_first(
    run_url: str, run_name: str, tmp_path: Path
) -> None:
    spec = make_spec(run_name, rounds={"quorum": 1})
    async with bench(run_url, spec, directory=tmp_path) as run:
        with stranger(run_url, "first", seed=1) as first, stranger(run_url, "second", seed=2) as second:
            await run.reach(3)
            for child in (first, second):
                child.send_signal(signal.SIGKILL)
        await wait_until(lambda: not run.state.members, "nobody is left")
        await run.settle()
        await newcomer_adopts(run, model(run), run.versions())
        await run.settle()
        before, versions = model(run), run.versions()
    async with bench(run_url, spec, directory=tmp_path) as again:  # nor when the synchronizer is a new one
        await newcomer_adopts(again, before, versions)
    events = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert sum(event["kind"] == "init asked" for event in events) == 1, "only the very first is asked for version 0"


async def newcomer_adopts(run: Bench, before: list[Float32], versions: list[int]) -> None:
    layout = SyntheticOptions.parse(run.state.spec.task.options).layout(run.state.spec)
    own = NumpyStore(layout, seed=999).theta
    assert all(abs(cosine(mine, theirs)) < 0.5 for mine, theirs in zip(own, before, strict=True))
    with stranger(str(run.url), "newcomer", seed=999):
        await has_adopted(run, "newcomer")
        assert run.versions() == versions
        for theta, old in zip(model(run), before, strict=True):
            np.testing.assert_array_equal(theta, old)
        await run.command("resume")
        await wait_until(lambda: min(run.versions()) > min(versions), "it takes part")
    await wait_until(lambda: not run.state.members, "it is gone")
    # It shrinks with every round, and the outer momentum may carry it through zero: the direction stays.
    assert all(abs(cosine(theta, old)) > 0.9999 for theta, old in zip(model(run), before, strict=True))
    assert run.state.counts.get("ledger mismatches", 0) == 0


class Offerer:
    """A registered member that never adopts and offers its own weights as if they were an outer gradient."""

    def __init__(self, run: Bench) -> None:
        self.run = run
        self.incarnation = 0

    async def join(self) -> None:
        run = self.run
        await run.redis.publish(run.keys.knock, "fresh")
        await run.post("fresh", messages.Register(nonce=secrets.token_bytes(16), name="fresh"))
        members = run.state.members
        await wait_until(lambda: any(m.name == "fresh" for m in members.values()), "it is in")
        self.incarnation = next(m.incarnation for m in members.values() if m.name == "fresh")

    async def offer(self, *, ahead: int = 0, digest: bytes | None = None, timeline: str | None = None) -> None:
        """A contribution that would replace Θ by random weights."""
        run = self.run
        target = run.state.fragments[0]
        own = np.random.default_rng(5).standard_normal(target.size).astype(np.float32)
        claim = await RedisBlobs(run.redis, run.keys).put(
            "fresh", encode("fp32", run.theta(0) - own), "fp32", ttl_s=60.0
        )
        await run.post(
            "fresh",
            messages.Contribution(
                incarnation=self.incarnation,
                fragment=0,
                timeline=timeline or run.state.timeline,
                base=target.version + ahead,
                base_digest=digest or target.digest,
                round=1,
                tokens=64,
                steps=1,
                figures=messages.Figures(processed=64, discarded=0, pending=64),
                claim=claim,
            ),
        )


async def test_a_contribution_on_an_unknown_base_is_refused(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name, rounds={"quorum": 1})) as run:
        run.add("first", Pace(step_s=0.005))
        await run.reach(1)
        await run.settle()
        run.kill("first")
        await wait_until(lambda: not run.state.members, "nobody is left")
        await run.command("resume")
        before, versions = model(run), run.versions()
        fresh = Offerer(run)
        await fresh.join()

        await fresh.offer(ahead=7)  # a version that never was
        await refused(run, f"unknown base: version {versions[0] + 7} of fragment 0, the run is at {versions[0]}")
        await fresh.offer(ahead=1, timeline="0-00000000")  # of another run, perhaps of one that began anew
        await refused(run, f"unknown base: timeline 0-00000000, the run is on {run.state.timeline}")
        await fresh.offer(digest=b"\x01" * 32)  # the right number, but its own weights
        await refused(run, "its base has other bits than the run's (digest)")

        assert run.state.counts["contributions refused"] == 3
        assert not run.state.fragments[0].in_hand, "nothing of it waits for a quorum"
        assert run.versions() == versions
        for theta, old in zip(model(run), before, strict=True):
            np.testing.assert_array_equal(theta, old)


async def refused(run: Bench, reason: str) -> None:
    await wait_until(
        lambda: [e["reason"] for e in run.tape("rejected") if e["name"] == "fresh"][-1:] == [reason],
        f"{reason!r} is on the tape",
    )
