"""A synchronizer and synthetic workers against the real server, for tests."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from redis.asyncio import Redis

from anabranch.merge.codecs import decode
from anabranch.merge.fragments import Layout
from anabranch.model import Float32
from anabranch.orchestrator.core.port import Core
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.queue import messages
from anabranch.queue.blobs import RedisBlobs
from anabranch.queue.connection import connect
from anabranch.queue.control import send_command
from anabranch.queue.keys import CORE_FIELD, Keys, fragment_field, momentum_field
from anabranch.queue.records import read_record, unpack_claim
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec, parse_spec
from anabranch.workers.member.client import Client
from anabranch.workers.member.incarnation import Incarnation
from anabranch.workers.member.synthetic import NumpyStore, Pace, SyntheticWorker
from tests.wait import PATIENCE_S, wait_until


def make_spec(run: str, **sections: Any) -> RunSpec:
    """A small, quick synthetic run; sections override parts of it."""
    base: dict[str, Any] = {
        "name": run,
        "rounds": {"fragments": 2, "inner_steps": 8, "deadline_min_s": 5.0},
        "merge": {"outer_lr": 0.7, "outer_momentum": 0.5},  # with momentum: a lost buffer has to show
        "workers": {"codec": "fp32", "heartbeat_s": 0.3},
        "task": {"name": "synthetic", "options": {"tensors": 4, "size": 64}},
    }
    for name, section in sections.items():
        base[name] = {**base.get(name, {}), **section}
    return parse_spec(base)


class Bench:
    """A leading synchronizer and the workers that were added to it."""

    def __init__(self, url: RunUrl, synchronizer: Synchronizer, redis: Redis, group: asyncio.TaskGroup) -> None:
        self.url = url
        self.synchronizer = synchronizer
        self.redis = redis
        self.keys = Keys(url.run)
        self.workers: dict[str, SyntheticWorker] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._group = group

    @property
    def core(self) -> Core:
        core = self.synchronizer.core
        assert core is not None
        return core

    @property
    def state(self) -> State:
        return self.core.state

    def add(self, name: str, pace: Pace | None = None, **options: Any) -> SyntheticWorker:
        """Start a synthetic worker."""
        worker = SyntheticWorker(self.url, name, pace or Pace(step_s=0.005), **options)
        self.workers[name] = worker
        self.tasks[name] = self._group.create_task(worker.run(), name=f"worker {name}")
        return worker

    async def listens(self) -> bool:
        """Whether a knock is heard now."""
        [(_, listeners)] = await self.redis.pubsub_numsub(self.keys.knock)
        return bool(listeners)

    def kill(self, name: str) -> None:
        """The worker vanishes without a word."""
        self.tasks.pop(name).cancel()
        del self.workers[name]

    def versions(self) -> list[int]:
        """Empty before birth, and while the synchronizer does not lead."""
        core = self.synchronizer.core
        return [fragment.version for fragment in core.state.fragments] if core is not None else []

    async def reach(self, version: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until every fragment has this version (0: until the birth is stored)."""

        def there() -> bool:
            vault = self.synchronizer.vault
            return vault is not None and bool(vault.versions) and min(self.versions(), default=-1) >= version

        await wait_until(there, f"version {version}", timeout_s)

    async def command(self, action: str) -> None:
        """Send an operator's command."""
        await send_command(self.redis, self.keys, action)

    async def forget_everything(self) -> None:
        """The server loses all keys of this run."""
        await forget_run(str(self.url))

    async def settle(self) -> None:
        """Open no more rounds and wait until those in flight are stored: versions stand still after this."""
        await self.command("pause")
        await wait_until(lambda: self.state.paused and not self.state.rounds, "no round is open")
        newest = {p: v for p, v in enumerate(self.versions()) if v > 0}
        await wait_until(
            lambda: newest.items() <= {(m["fragment"], m["version"]) for m in self.tape("merged")},
            "commits are stored",
        )
        await wait_until(lambda: self.core._out is None, "and what was decided with them")

    def tape(self, kind: str) -> list[dict[str, Any]]:
        """What is stored of it. `state` is ahead: who waits for something there may not find it here yet."""
        return [event for event in self.synchronizer.tape.recent if event["kind"] == kind]

    def theta(self, fragment: int) -> Float32:
        assert self.synchronizer.vault is not None
        return self.synchronizer.vault.versions[fragment].theta

    async def send(self, worker: str, data: bytes) -> None:
        """Put raw bytes into a worker's inbox."""
        await self.redis.xadd(self.keys.contributions(worker), {"m": data})

    async def post(self, worker: str, message: messages.Message) -> None:
        await self.send(worker, messages.encode(message, self.url.run))


async def forget_run(run_url: str) -> None:
    """The server loses all keys of a run."""
    url = RunUrl.parse(run_url)
    redis = connect(url, name="test")
    async for key in redis.scan_iter(match=Keys(url.run).prefix.replace("{", "\\{") + "*"):
        await redis.delete(key)
    await redis.aclose()


@asynccontextmanager
async def bench(
    run_url: str,
    spec: RunSpec,
    *,
    directory: Path | None = None,
    init: Path | None = None,
    checkpoints: str | None = None,
    look_back: bool = True,
    drain_s: float = 0.0,
) -> AsyncIterator[Bench]:
    """Lead the run of `run_url` until the block ends. `look_back`: `Bench.tape` forgets nothing. `drain_s`: then take
    the time, as the command line does, to merge and save what is under way: the last checkpoint is the vault's model.
    """
    url = RunUrl.parse(run_url)
    redis = connect(url, name="test")
    synchronizer = Synchronizer(url, spec, directory=directory, init=init, checkpoints=checkpoints)
    if look_back:
        synchronizer.tape.recent = deque(synchronizer.tape.recent)
    task = asyncio.create_task(synchronizer.run(), name="synchronizer")
    try:
        async with asyncio.TaskGroup() as group:
            await wait_until(lambda: task.done() or synchronizer.core is not None, "the synchronizer leads")
            if task.done():
                await task
            made = Bench(url, synchronizer, redis, group)
            await wait_until(made.listens, "it listens for knocks")
            try:
                yield made
            except AssertionError as error:
                last = [f"{event['kind']}: {event['reason']}" for event in list(synchronizer.tape.recent)[-20:]]
                error.add_note("\n".join(["the last on the tape:", *last]))
                raise
            finally:
                for worker in made.tasks.values():
                    worker.cancel()
    finally:
        synchronizer.end(drain_s)
        await task
        await redis.aclose()


class ScriptedStore(NumpyStore):
    """A store whose Δ is a fixed function of (worker, fragment, how often the fragment was loaded)."""

    def __init__(self, layout: Layout, script: Callable[[int, int, int], Float32]) -> None:
        super().__init__(layout, seed=1)
        self._script = script
        self._loads = [-1] * len(layout.fragments)

    def load(self, fragment: int, theta: Float32) -> None:
        super().load(fragment, theta)
        self._loads[fragment] += 1

    def delta(self, fragment: int) -> Float32:
        return self._script(fragment, self._loads[fragment], self.base[fragment].size)


def scripted(worker: int) -> Callable[[int, int, int], Float32]:
    """Outer gradients that every process can compute: (fragment, version, size) -> Δ of this worker."""

    def script(fragment: int, version: int, size: int) -> Float32:
        generator = np.random.default_rng([worker, fragment, version])
        return (generator.standard_normal(size) * 0.1).astype(np.float32)

    return script


def send_everything_twice(client: Client) -> None:
    """Make a client repeat each message, as a retry after a lost reply would."""
    once = client.line.post

    async def twice(message: messages.Message, schema: int) -> None:
        await once(message, schema)
        await once(message, schema)

    change_line(client, "post", twice)


def change_line(client: Client, method: str, other: Callable[..., Any]) -> None:
    """Have a client speak or hear in another way."""
    object.__setattr__(client.line, method, other)


def each_life(client: Client, change: Callable[[Incarnation], None]) -> None:
    """Have every incarnation of a client changed as it is made."""
    begin = client._begin

    def changed(*parts: Any) -> Incarnation:
        life = begin(*parts)
        change(life)
        return life

    client._begin = changed  # type: ignore[assignment]


def life_of(client: Client) -> Incarnation:
    """Of a client that was welcome."""
    assert client.life is not None
    return client.life


@contextmanager
def process(
    *arguments: str, environment: dict[str, str] | None = None, module: str = "anabranch"
) -> Iterator[subprocess.Popen[bytes]]:
    """`anabranch ARGUMENTS` as a process of its own; killed at the end of the block if it still runs."""
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
        child.communicate()


async def stored_core(redis: Redis, keys: Keys) -> dict[str, Any] | None:
    """The core's record as the server holds it; None before the first write."""
    data: Any = await redis.hget(keys.state, CORE_FIELD)
    state: dict[str, Any] | None = messages.unpack(data)["state"] if data is not None else None
    return state


async def stored_claims(redis: Redis, keys: Keys, fragment: int) -> tuple[messages.Claim, messages.Claim | None]:
    """Where the server says that Θ and momentum of a fragment are."""
    theta: Any = await redis.hget(keys.state, fragment_field(fragment))
    momentum: Any = await redis.hget(keys.state, momentum_field(fragment))
    head = read_record(messages.FragmentHead, theta, keys.run)
    return head.claim, unpack_claim(momentum) if momentum is not None else None


async def same_bits(run: Bench, fragment: int, theta: Float32, buf: Float32 | None) -> None:
    """Compare with what Redis holds, not with what the process remembers."""
    assert buf is not None
    blobs = RedisBlobs(run.redis, run.keys)
    theta_claim, momentum_claim = await stored_claims(run.redis, run.keys, fragment)
    assert momentum_claim is not None
    stored_theta = decode("fp32", await blobs.get(theta_claim, 10**6), theta.size)
    stored_buf = decode("fp32", await blobs.get(momentum_claim, 10**6), theta.size)
    np.testing.assert_array_equal(stored_theta.view(np.uint32), theta.view(np.uint32))
    np.testing.assert_array_equal(stored_buf.view(np.uint32), buf.view(np.uint32))
