"""Lives of a synchronizer that really dies, and workers that do the same whatever happens.

What a scripted worker sends on a base depends on (worker, fragment, base) only, never on timing: Δ comes from a
seeded generator, tokens and steps are fixed, and a call that does not name every worker is declined, so each
version merges all of them. Then the final bits are those of a plain loop, however often the synchronizer died.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from redis.asyncio import Redis

from anabranch.merge.average import MergeRules, merge_fragment
from anabranch.merge.outer import OuterOptimizer
from anabranch.merge.weights import token_weight
from anabranch.model import Float32
from anabranch.orchestrator.core.ledger import COLUMNS
from anabranch.queue import messages
from anabranch.queue.connection import connect
from anabranch.queue.keys import Keys
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec
from anabranch.workers.member.client import Client
from anabranch.workers.member.incarnation import Incarnation
from anabranch.workers.member.learner import Refusal
from anabranch.workers.member.synthetic import NumpyStore, Pace, SyntheticOptions, SyntheticWorker
from tests.harness import (
    ScriptedStore,
    change_line,
    each_life,
    life_of,
    make_spec,
    scripted,
    stored_claims,
    stored_core,
)
from tests.promises.zygote import LOG_NAME
from tests.wait import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
FRAGMENTS = 2
LEASE_S = 0.3
BEGIN_S = 30.0  # importing, on a loaded machine
HEARTBEAT_S = 5.0  # nobody expires, however slow the machine is


def scripted_spec(run: str, **sections: Any) -> RunSpec:
    """Two fragments, everybody's contribution in every version, a lease that soon runs out."""
    standard: dict[str, Any] = {
        "rounds": {"fragments": FRAGMENTS, "inner_steps": 2, "quorum": "all", "deadline_min_s": 60.0},
        "workers": {"heartbeat_s": HEARTBEAT_S, "adoption": "overwrite"},  # the script knows no carried work
        "leader": {"lease_s": LEASE_S},
    }
    return make_spec(run, **{**standard, **sections})


@dataclass
class Script:
    """What everybody does. `last`: the version of each fragment that nobody goes beyond."""

    names: tuple[str, ...] = ("ada", "bob", "cyd")
    last: int = 10**9

    def number(self, name: str) -> int:
        return self.names.index(name)

    def tokens(self, name: str) -> int:
        """In every contribution of this worker: as many as the first of its steps on a base."""
        return 64 + self.number(name)


def scripted_worker(url: RunUrl, name: str, script: Script, step_s: float = 0.005) -> SyntheticWorker:
    """A worker that follows the script."""
    number = script.number(name)
    worker = SyntheticWorker(
        url,
        name,
        Pace(step_s=step_s, tokens=script.tokens(name)),
        train=_stand_still,
        store=lambda layout: ScriptedStore(layout, scripted(number)),
    )
    _follow(worker.client, script)
    return worker


def _stand_still(store: NumpyStore, step: int) -> float | None:
    """The script says what Δ is; θ does not matter."""
    return None


def _follow(client: Client, script: Script) -> None:
    """Make what is sent independent of how many steps were made meanwhile and of who was called with us."""
    post = client.line.post
    tokens = script.tokens(client.identity.name)

    async def post_as_scripted(message: messages.Message, schema: int) -> None:
        if isinstance(message, messages.Contribution):
            message = message.model_copy(update={"tokens": tokens, "steps": 1})
        await post(message, schema)

    def hears_as_scripted(life: Incarnation) -> None:
        hear = life._hear_call

        def hear_as_scripted(call: messages.Call) -> None:
            everybody = len(call.called) == len(script.names)
            if life.number in call.called and not (everybody and call.base < script.last):
                reason = "the script says no more" if everybody else "not everybody is called"
                life.outbox.submit(Refusal(call, reason))
            else:
                hear(call)

        life._hear_call = hear_as_scripted  # type: ignore[method-assign]

    change_line(client, "post", post_as_scripted)
    each_life(client, hears_as_scripted)


@asynccontextmanager
async def scripted_workers(url: RunUrl, script: Script) -> AsyncIterator[dict[str, SyntheticWorker]]:
    """All workers of a script, at work until the block ends."""
    workers = {name: scripted_worker(url, name, script) for name in script.names}
    async with at_work(workers):
        yield workers


@asynccontextmanager
async def at_work(workers: dict[str, SyntheticWorker]) -> AsyncIterator[None]:
    """Workers in this process until the block ends; then they vanish without a word."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(worker.run(), name=f"worker {name}") for name, worker in workers.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


# --- what must come out -----------------------------------------------------------------------------------

Bits = tuple[str, str]  # SHA-256 of Θ and of momentum


def sha256(array: Float32) -> str:
    return hashlib.sha256(array.astype("<f4").tobytes()).hexdigest()


def expected_bits(spec: RunSpec, script: Script) -> list[Bits]:
    """Θ and momentum of every fragment at version `script.last`, by a plain loop."""
    layout = SyntheticOptions.parse(spec.task.options).layout(spec)
    start = NumpyStore(layout, seed=1)
    names = sorted(script.names)
    weights = [token_weight(script.tokens(name), 1) for name in names]
    outer = OuterOptimizer(spec.merge.outer_lr, spec.merge.outer_momentum)
    result = []
    for fragment in layout.fragments:
        theta: Float32 = start.theta[fragment.index]
        buf: Float32 | None = None
        for version in range(script.last):
            deltas = [scripted(script.number(name))(fragment.index, version, fragment.size) for name in names]
            gradient = merge_fragment(fragment, deltas, weights, MergeRules())
            assert gradient is not None
            theta, buf = outer.step(theta, buf, gradient)
        result.append((sha256(theta), sha256(buf if buf is not None else np.zeros(0, np.float32))))
    return result


# --- what Redis holds -------------------------------------------------------------------------------------


@dataclass
class Stored:
    """A run as Redis holds it."""

    redis: Redis
    keys: Keys

    async def core(self) -> dict[str, Any] | None:
        return await stored_core(self.redis, self.keys)

    async def count(self, what: str) -> int:
        core = await self.core()
        assert core is not None
        return int(core["counts"].get(what, 0))

    async def versions(self) -> list[int]:
        core = await self.core()
        return [fragment["version"] for fragment in core["fragments"]] if core is not None else []

    async def tape(self) -> list[dict[str, Any]]:
        entries: Any = await self.redis.xrange(self.keys.tape)
        return [messages.unpack(fields[b"e"]) for _, fields in entries]

    async def bits(self) -> list[Bits]:
        found = []
        for index in range(len(await self.versions())):
            theta, momentum = await stored_claims(self.redis, self.keys, index)
            found.append((await self._sha256(theta), await self._sha256(momentum)))
        return found

    async def _sha256(self, claim: messages.Claim | None) -> str:
        """Of the bytes themselves, not of what the claim says of them."""
        assert claim is not None
        digest = hashlib.sha256()
        for chunk in range(len(claim.hashes)):
            data: Any = await self.redis.get(self.keys.blob(claim.owner, claim.id, chunk))
            assert data is not None, "a chunk that the state names is gone"
            digest.update(data)
        return digest.hexdigest()

    async def booked(self) -> dict[tuple[int, int, str], int]:
        """The synchronizer's half of the ledger: (incarnation, fragment, column) -> tokens."""
        raw: dict[Any, Any] = await self.redis.hgetall(self.keys.ledger)
        books = {}
        for key, value in raw.items():
            incarnation, fragment, column = key.decode().split(":")
            books[int(incarnation), int(fragment), column] = int(value)
        return books

    async def reach(self, version: int, timeout_s: float = PATIENCE_S) -> None:
        async def reached() -> bool:
            versions = await self.versions()
            return bool(versions) and min(versions) >= version

        await wait_until(reached, f"every fragment has version {version}", timeout_s)


@asynccontextmanager
async def stored_run(url: RunUrl) -> AsyncIterator[Stored]:
    redis = connect(url, name="test")
    try:
        yield Stored(redis, Keys(url.run))
    finally:
        await redis.aclose()


# --- the promises -----------------------------------------------------------------------------------------

REFUSALS = frozenset({"rejected", "refused", "turned away", "ledger mismatch", "trouble", "gone", "resend"})


def check_tape(tape: Sequence[dict[str, Any]], script: Script) -> None:
    """Versions are contiguous, everything is applied once, nothing is refused."""
    merged = [event for event in tape if event["kind"] == "merged"]
    check_versions(merged)
    assert len(merged) == FRAGMENTS * script.last
    verdicts = [verdict for event in merged for verdict in event["verdicts"]]
    assert len(verdicts) == len(script.names) * FRAGMENTS * script.last
    assert all(verdict["applied"] for verdict in verdicts)
    refusals = [f"{event['kind']}: {event['reason']}" for event in tape if event["kind"] in REFUSALS]
    assert not refusals, "; ".join(refusals[:5])


def check_versions(merged: Sequence[dict[str, Any]]) -> None:
    """Contiguous for every fragment, and no contribution in two of them."""
    for fragment in {event["fragment"] for event in merged}:
        versions = [event["version"] for event in merged if event["fragment"] == fragment]
        assert versions == list(range(1, len(versions) + 1)), f"fragment {fragment}: versions {versions}"
    applied = [
        (verdict["incarnation"], verdict["fragment"], verdict["base"])
        for event in merged
        for verdict in event["verdicts"]
        if verdict["applied"]
    ]
    assert len(applied) == len(set(applied)), "a contribution was applied twice"


def imbalances(booked: dict[tuple[int, int, str], int], workers: dict[str, SyntheticWorker]) -> list[str]:
    """Where a worker's own count of tokens with an outcome is not what the synchronizer booked."""
    found = []
    for name, worker in workers.items():
        report = life_of(worker.client).books.report()
        for fragment in range(FRAGMENTS):
            settled = report["processed"] - report["discarded"][fragment] - report["pending"][fragment]
            theirs = sum(booked.get((worker.client.incarnation, fragment, column), 0) for column in COLUMNS)
            if settled != theirs:
                found.append(f"{name}, fragment {fragment}: the worker counts {settled}, booked are {theirs}")
    return found


async def check_ledger(stored: Stored, workers: dict[str, SyntheticWorker], script: Script) -> None:
    """Per worker and fragment: what the worker counts is what the synchronizer booked, and what the script says."""
    booked = await stored.booked()
    assert not imbalances(booked, workers)
    for name, worker in workers.items():
        for fragment in range(FRAGMENTS):
            figures = [booked.get((worker.client.incarnation, fragment, column), 0) for column in COLUMNS]
            assert figures == [script.last * script.tokens(name), 0, 0], f"{name}, fragment {fragment}"
    assert await stored.count("ledger mismatches") == 0


async def adopted_by_all(workers: dict[str, SyntheticWorker], version: int) -> None:
    """Wait until every worker holds this version of every fragment, and so knows every outcome before it."""

    def adopted() -> bool:
        lives = [worker.client.life for worker in workers.values()]
        return all(
            life is not None and all(life.books.version(p) >= version for p in range(FRAGMENTS)) for life in lives
        )

    await wait_until(adopted, f"every worker has adopted version {version}")


# --- lives ------------------------------------------------------------------------------------------------


@dataclass
class Life:
    """One process that leads, or stands by. `status`: its exit status once it has ended, -9 after SIGKILL."""

    number: int
    pid: int = 0  # `Zygote.begin` returns when it is known: to signal 0 is to signal ourselves
    status: int | None = None


@dataclass
class Zygote:
    """Our end of `tests/promises/zygote.py`."""

    process: subprocess.Popen[bytes]
    lives: list[Life] = field(default_factory=lambda: [Life(0)])  # the first is the zygote's own
    _pending: bytes = b""

    def begin(
        self,
        url: RunUrl,
        spec: RunSpec,
        directory: Path,
        fault: str | None = None,
        *,
        checkpoints: Path | None = None,
    ) -> Life:
        """Fork a synchronizer; `fault` as ANABRANCH_FAIL_AT has it, `checkpoints` elsewhere than in `directory`."""
        life = Life(len(self.lives))
        self.lives.append(life)
        order = {
            "life": life.number,
            "url": f"{url.server}?run={url.run}",
            "spec": spec.model_dump(mode="json"),
            "directory": str(directory),
            "checkpoints": str(checkpoints) if checkpoints is not None else None,
            "fault": fault,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()
        self.await_pid(life)
        return life

    def await_pid(self, life: Life) -> None:
        """Blocks for the few milliseconds that a fork takes."""
        assert self.process.stdout is not None
        while not life.pid:
            ready, _, _ = select.select([self.process.stdout.fileno()], [], [], BEGIN_S)
            assert ready, f"nothing was born within {BEGIN_S:g} s"
            self.listen()

    async def end(self, life: Life, what: str, timeout_s: float = PATIENCE_S) -> int:
        """Wait until a life is over; its exit status."""

        def over() -> bool:
            self.listen()
            return life.status is not None

        await wait_until(over, what, timeout_s)
        assert life.status is not None
        return life.status

    async def signal(self, life: Life, number: int) -> None:
        """Send a signal to a life, once it has begun."""

        def begun() -> bool:
            self.listen()
            return life.pid > 0

        await wait_until(begun, "the life has begun")
        os.kill(life.pid, number)

    async def kill(self, life: Life) -> None:
        """SIGKILL from outside, wherever it is."""
        self.listen()
        if life.status is None:
            os.kill(life.pid, signal.SIGKILL)
        await self.end(life, "the killed life is over")

    def listen(self) -> None:
        """Take what the zygote has said meanwhile."""
        assert self.process.stdout is not None
        try:
            data = os.read(self.process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return
        assert data, f"the zygote died, status {self.process.wait(10.0)}"
        *lines, self._pending = (self._pending + data).split(b"\n")
        for line in lines:
            news = json.loads(line)
            life = self.lives[news["life"]]
            life.pid, life.status = news.get("pid", life.pid), news.get("status")


@contextmanager
def zygote() -> Iterator[Zygote]:
    """A zygote until the block ends; whatever it forked dies with it."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}  # a fork copies no threads
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.promises.zygote"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment,
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    made = Zygote(process)
    try:
        made.await_pid(made.lives[0])
        yield made
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10.0)
        process.stdout.close()


def last_words(directory: Path) -> str:
    """The end of what the lives logged, for a failure's message."""
    path = directory / LOG_NAME
    return "\n".join(path.read_text(errors="replace").splitlines()[-30:]) if path.exists() else "(no log)"
