"""A storm of faults drawn from a seed, over real synchronizer processes, a real server and uneven workers.

After each fault the run has to make progress; what must never happen is watched all along (`watch.py`: the
tape, the bits that members were given; and processes that end by themselves) and looked at once more at the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError

from anabranch.errors import MemberRefused, ServerUnreachable
from anabranch.orchestrator.core.ledger import COLUMNS
from anabranch.orchestrator.core.record import core_record
from anabranch.orchestrator.journal import segments
from anabranch.orchestrator.tape import FILE_NAME
from anabranch.queue import messages
from anabranch.queue.connection import connect
from anabranch.queue.embedded import EmbeddedServer
from anabranch.queue.keys import SYNCHRONIZER, Keys
from anabranch.queue.url import RunUrl
from anabranch.simulate.replay import replay_decisions
from anabranch.workers.member.synthetic import SyntheticWorker
from tests.harness import Bench, bench, life_of, stored_core
from tests.promises.lives import Life, Zygote, last_words
from tests.promises.plans import LEASE_S, PACES, Plan
from tests.promises.watch import Broken, Watch, escaped, orphans
from tests.wait import PATIENCE_S, wait_until

NEW_VERSIONS = 3  # what counts as progress
MOST_AT_ONCE = 3  # faults in a row without waiting for progress
POINTS = ("after read", "after fetch", "after merge", "before commit", "after commit", "during checkpoint")

# --- the storm --------------------------------------------------------------------------------------------


@dataclass
class Place:
    """One synchronizer's: its directory, and whoever lives there now."""

    directory: Path
    life: Life
    fault: str | None = None  # for the next one


class Storm:
    """A run and what happens to it."""

    def __init__(self, plan: Plan, server: EmbeddedServer, run: str, folder: Path, mother: Zygote) -> None:
        self.plan, self.server, self.folder, self.mother = plan, server, folder, mother
        self.url = RunUrl.parse(f"{server.url}?run={run}")
        self.keys = Keys(run)
        self.spec = plan.spec(run)
        self.watch = Watch()
        self.random = random.Random(plan.seed)
        self.places: list[Place] = []
        self.workers: dict[str, SyntheticWorker] = {}
        self.log: list[str] = []
        self.struck: Counter[str] = Counter()
        self.given_up: Counter[str] = Counter()  # starts of a worker that came to nothing
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leaving: set[str] = set()
        self._tending = True
        self._began = time.monotonic()
        self.redis = connect(self.url, name="storm", retries=0)

    # --- set-up

    async def begin(self) -> None:
        for number in range(self.plan.leaders):
            directory = self.folder / f"leader-{number}"
            directory.mkdir()
            self.places.append(Place(directory, self._live(directory)))
        for name in self.plan.workers:
            self.start(name)
        await wait_until(lambda: len(self.watch.merged) > 5, "the run is under way")
        await wait_until(lambda: any(self.checkpoints.glob("0*")), "a first checkpoint is there")

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def _live(self, directory: Path, fault: str | None = None) -> Life:
        return self.mother.begin(self.url, self.spec, directory, fault, checkpoints=self.checkpoints)

    def start(self, name: str) -> None:
        """A worker of this name comes (back)."""
        self._leaving.discard(name)
        self._tasks[name] = asyncio.create_task(self._work(name, self._new(name)), name=f"worker {name}")

    def _new(self, name: str) -> SyntheticWorker:
        worker = self.workers[name] = SyntheticWorker(self.url, name, PACES[name])
        self.watch.member(worker)
        return worker

    async def _work(self, name: str, worker: SyntheticWorker) -> None:
        """As whoever starts it would: once more if the server happens to be away."""
        while True:
            try:
                await worker.run(lambda: name in self._leaving)
                return
            except (ServerUnreachable, MemberRefused) as error:
                if isinstance(error, MemberRefused) and "in use by a live member" not in str(error):
                    raise
                self.given_up[type(error).__name__] += 1
                worker = self._new(name)

    async def end(self) -> None:
        self._tending = False
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for place in self.places:
            await self._kill(place.life)
        await self.redis.aclose()

    def say(self, words: str) -> None:
        self.log.append(f"{time.strftime('%H:%M:%S')} {time.monotonic() - self._began:6.1f} s  {words}")

    # --- watching

    async def observe(self) -> None:
        """Read the tape and the state again and again, and bring back lives that were killed."""
        while self._tending:
            with suppress(RedisError, OSError, TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._look()
            self._tend()
            await asyncio.sleep(0.03)  # a beat of the observer, not a wait for anything

    async def _look(self) -> None:
        entries: Any = await self.redis.xrevrange(self.keys.tape, count=150)
        for _, fields in reversed(entries):
            self.watch.event(messages.unpack(fields[b"e"]))
        if (core := await stored_core(self.redis, self.keys)) is not None:
            self.watch.core(core)

    def _tend(self) -> None:
        self.mother.listen()
        for place in self.places:
            if place.life.status is not None:
                words = last_words(place.directory)
                if place.life.status != -signal.SIGKILL and "errors.ServerUnreachable" not in words[-1000:]:
                    self.watch.broken.append(f"a synchronizer ended by itself, status {place.life.status}: {words}")
                place.life, place.fault = self._live(place.directory, place.fault), None
        for name, task in self._tasks.items():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                self.watch.broken.append(f"worker {name} ended: {error!r}")

    def check(self) -> None:
        if self.watch.broken:
            raise Broken("; ".join(self.watch.broken[:5]))

    async def progress(self, what: str) -> None:
        """The run merges new versions."""
        known = len(self.watch.merged)
        await self.holds(lambda: len(self.watch.merged) >= known + NEW_VERSIONS, f"it merges again after: {what}")

    async def everybody(self, what: str, timeout_s: float = 30.0) -> None:
        """Every worker that is there is merged again."""
        known = set(self.watch.merged)

        def all_in() -> bool:
            applied = self.watch.applied_since(known)
            return all(worker.client.incarnation in applied for worker in self.workers.values())

        try:
            await self.holds(all_in, f"everybody takes part after: {what}", timeout_s)
        except AssertionError as error:
            applied = self.watch.applied_since(known)
            out = [n for n, w in self.workers.items() if w.client.incarnation not in applied]
            raise Broken(f"{error}; not merged: {out}") from None

    async def holds(self, predicate: Callable[[], object], what: str, timeout_s: float = PATIENCE_S) -> None:
        def broken_or_true() -> object:
            return self.watch.broken or predicate()

        await wait_until(broken_or_true, what, timeout_s)
        self.check()

    # --- faults

    async def blow(self) -> None:
        """All faults of the plan."""
        names, weights = list(self.plan.weights), list(self.plan.weights.values())
        in_a_row = 0
        for number in range(self.plan.faults):
            name = self.random.choices(names, weights)[0]
            self.say(f"fault {number}: {name}")
            await self.strike(name)
            self.struck[name] += 1
            self.check()
            in_a_row += 1
            if in_a_row < MOST_AT_ONCE and self.random.random() < self.plan.impatience:
                continue
            in_a_row = 0
            await self.progress(f"fault {number}, {name}")
            if self.random.random() < 0.3:
                await self.everybody(f"fault {number}, {name}")
            if found := await self.retried(lambda: orphans(self.redis, self.keys)):
                raise Broken(f"fault {number}, {name}: blobs that nobody names never run out: {found[:4]}")

    async def strike(self, name: str) -> None:
        faults: dict[str, Callable[[], Awaitable[object]]] = {
            "kill leader": self._kill_leader,
            "kill at a point": self._kill_at_a_point,
            "kill everybody": self._kill_everybody,
            "stall leader": self._stall_leader,
            "stall leader, kill server": partial(self._stall_leader, partial(self._kill_server, self._cut_short)),
            "stall leader, empty server": partial(self._stall_leader, self._empty),
            "kill server": self._kill_server,
            "kill server, lose the end": partial(self._kill_server, self._cut_short),
            "empty server": self._empty,
            "empty server, kill leader": self._empty_and_kill,
            "older copy": partial(self._kill_server, self._older_copy),
            "cut connections": self._cut_connections,
            "forget scripts": self._forget_scripts,
            "lose payloads": self._lose_payloads,
            "worker vanishes": self._vanish,
            "worker leaves": self._leave,
            "trim broadcast": self._trim,
        }
        await faults[name]()

    def leader(self) -> Place:
        """Who said last that it leads."""
        said = {}
        for place in self.places:
            with suppress(OSError):
                text = (place.directory / "lives.log").read_text(errors="replace")
                if times := re.findall(r"^life \d+ (\S+ \S+) leading run", text, re.MULTILINE):
                    said[times[-1]] = place
        return said[max(said)] if said else self.places[0]

    async def _kill(self, life: Life) -> None:
        with suppress(ProcessLookupError):
            await self.mother.kill(life)

    async def _kill_leader(self) -> None:
        await self._kill(self.leader().life)

    async def _kill_everybody(self) -> None:
        for place in self.places:
            await self._kill(place.life)

    async def _kill_at_a_point(self) -> None:
        place = self.leader()
        point, passage = self.random.choice(POINTS), self.random.randint(1, 4)
        self.say(f"  {point}, passage {passage}")
        before, place.fault = place.life, f"{point}:{passage}:kill"
        await self._kill(before)
        await self.holds(lambda: place.life is not before, "the next one lives")
        life = place.life
        if len(self.places) == 1:
            await self.holds(lambda: place.life is not life, f"it dies {point}")

    async def _stall_leader(self, meanwhile: Callable[[], Awaitable[object]] | None = None) -> None:
        """SIGSTOP, for less or more than its lease; SIGCONT once that, or what happens meanwhile, is over."""
        life = self.leader().life
        self.mother.listen()
        if life.status is not None:
            return
        os.kill(life.pid, signal.SIGSTOP)
        began, long_s = time.monotonic(), LEASE_S * self.random.choice((0.5, 2, 4))
        known = len(self.watch.merged)
        try:
            await self.holds(lambda: time.monotonic() - began > long_s, "it was away")
            if meanwhile is not None:
                await meanwhile()
            elif len(self.places) > 1 and long_s > LEASE_S:
                await self.holds(lambda: len(self.watch.merged) >= known + NEW_VERSIONS, "the standby leads")
        finally:
            with suppress(ProcessLookupError):
                os.kill(life.pid, signal.SIGCONT)

    async def _kill_server(self, then: Callable[[], None] | None = None) -> None:
        await asyncio.to_thread(self.server.kill)
        if then is not None:
            then()
        with_leader = self.random.random() < 0.3
        if with_leader:
            self.say("  and its leader")
            await self._kill_leader()
        await asyncio.to_thread(self.server.start)

    def _cut_short(self) -> None:
        """What `everysec` may lose, cut anywhere."""
        log = max((self.data / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)
        size = log.stat().st_size
        cut = self.random.randint(1, min(self.random.choice((3_000, 40_000, 200_000)), max(2, size // 3)))
        with log.open("r+b") as file:
            file.truncate(size - cut)

    @property
    def data(self) -> Path:
        return self.server.options.directory

    def _older_copy(self) -> None:
        """The server's files of an earlier visit; the first one only takes the copy."""
        kept = self.folder / "older"
        if kept.exists():
            newer = self.folder / "newer"
            shutil.copytree(self.data / "appendonlydir", newer)
            shutil.rmtree(self.data / "appendonlydir")
            shutil.copytree(kept, self.data / "appendonlydir")
            if self.random.random() < 0.5:
                shutil.rmtree(kept)
                newer.rename(kept)
            else:
                shutil.rmtree(newer)
        else:
            shutil.copytree(self.data / "appendonlydir", kept)

    async def retried(self, action: Callable[[], Awaitable[Any]]) -> Any:
        """The observer's own connection is cut like all others."""
        for _ in range(50):
            try:
                return await action()
            except (RedisError, OSError):
                await asyncio.sleep(0.05)  # the server was just started again
        return await action()

    async def _empty(self) -> None:
        await self.retried(self.redis.flushall)

    async def _empty_and_kill(self) -> None:
        leader = self.leader()
        if self.random.random() < 0.5:
            await self._empty()
            await self._kill(leader.life)
        else:
            await self._kill_everybody()
            await self._empty()

    async def _cut_connections(self) -> None:
        for kind in ("normal", "pubsub"):
            await self.retried(partial(self.redis.client_kill_filter, _type=kind))

    async def _forget_scripts(self) -> None:
        await self.retried(self.redis.script_flush)

    async def _lose_payloads(self) -> None:
        async def lose() -> None:
            pattern = f"{escaped(self.keys.prefix)}blob:*"
            mine = f"{self.keys.prefix}blob:{SYNCHRONIZER}:".encode()
            async for key in self.redis.scan_iter(match=pattern, count=1000):
                if not key.startswith(mine) and self.random.random() < 0.7:
                    await self.redis.delete(key)

        for _ in range(5):
            await self.retried(lose)

    async def _vanish(self) -> None:
        name = self.random.choice(sorted(self.workers))
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self.start(name)

    async def _leave(self) -> None:
        name = self.random.choice(sorted(self.workers))
        task = self._tasks[name]
        self._leaving.add(name)
        await self.holds(task.done, f"{name} has left")
        self.start(name)

    async def _trim(self) -> None:
        await self.retried(lambda: self.redis.xtrim(self.keys.broadcast, maxlen=0, approximate=False))

    # --- the end

    async def settle(self) -> None:
        """Calm: everybody is merged again, then all books are looked at."""
        await self.everybody("the storm")
        self._tending = False
        for place in self.places:
            await self._kill(place.life)
        directory = self.places[0].directory
        async with bench(str(self.url), self.spec, directory=directory, checkpoints=str(self.checkpoints)) as run:
            await self._check_books(run)
            found = await orphans(run.redis, run.keys)
            assert not found, f"blobs that nobody names never run out: {found[:4]}"
        for place in self.places:
            self._read_tape_file(place.directory)
            if journals := segments(place.directory):  # a short storm may never let it lead
                again = await asyncio.to_thread(replay_decisions, journals)
                assert again.difference is None, f"{place.directory.name} decides otherwise now: {again.difference}"
        self.check()
        assert not self.watch.gaps(), self.watch.gaps()

    async def _check_books(self, run: Bench) -> None:
        names = set(self.workers)

        def settled() -> bool:
            members = run.state.members.values()
            return {m.name for m in members if m.live and m.last_round} == names == {m.name for m in members}

        await self.holds(settled, "everybody takes part, former lives are closed")
        await run.command("pause")
        await self.holds(lambda: run.state.paused and not run.state.rounds, "no round is open")

        async def agree() -> bool:
            return not await self._imbalances(run)

        try:
            await wait_until(agree, "books agree")
        except AssertionError as error:
            raise Broken(f"{error}: {await self._imbalances(run)}") from None
        self.watch.core(messages.unpack(core_record(run.state, 0.0))["state"])
        assert run.state.counts.get("ledger mismatches", 0) == 0

    async def _imbalances(self, run: Bench) -> list[str]:
        raw: dict[Any, Any] = await run.redis.hgetall(run.keys.ledger)
        found = []
        for name, worker in self.workers.items():
            report = life_of(worker.client).books.report()
            for fragment in range(self.spec.rounds.fragments):
                settled = report["processed"] - report["discarded"][fragment] - report["pending"][fragment]
                fields = [f"{worker.client.incarnation}:{fragment}:{column}".encode() for column in COLUMNS]
                booked = sum(int(raw.get(name, 0)) for name in fields)
                if settled != booked:
                    found.append(f"{name}, fragment {fragment}: the worker counts {settled}, booked are {booked}")
        return found

    def _read_tape_file(self, directory: Path) -> None:
        for line in (directory / FILE_NAME).read_text().splitlines():
            with suppress(ValueError):  # a crash cut it short
                event = json.loads(line)
                if isinstance(event, dict) and "kind" in event:
                    event.pop("number", None)
                    self.watch.event(event)

    def report(self) -> str:
        """What happened, for people."""
        lines = [f"{self.plan}", *self.log, *(f"timeline {t}" for t in self.watch.timelines)]
        counted = Counter(re.sub(r"\d+", "N", line) for line in self.watch.noted)
        lines += [f"{count} × {line}" for line, count in counted.most_common(20)]
        lines += [str(dict(self.watch.kinds)), f"given up: {dict(self.given_up)}"]
        return "\n".join(lines)


@asynccontextmanager
async def storm(plan: Plan, server: EmbeddedServer, run: str, folder: Path, mother: Zygote) -> AsyncIterator[Storm]:
    """A run under way, observed until the block ends."""
    made = Storm(plan, server, run, folder, mother)
    observing = asyncio.create_task(made.observe(), name="storm: observe")
    try:
        await made.begin()
        yield made
    except AssertionError as error:
        words = "\n".join(f"--- {p.directory.name}\n{last_words(p.directory)}" for p in made.places)
        raise Broken(f"{error}\n{made.report()}\n{words}") from None
    finally:
        observing.cancel()
        await asyncio.gather(observing, return_exceptions=True)
        await made.end()


@contextmanager
def quiet_workers(path: Path) -> Iterator[None]:
    """Workers' log lines into a file."""
    logger = logging.getLogger("anabranch")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    level, propagate = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()
        logger.setLevel(level)
        logger.propagate = propagate
