"""Exactly once: wherever the synchronizer is killed, nothing is applied twice and nothing valid is refused.

Real processes and a real SIGKILL at the n-th passage of each named point; n is drawn from the seed. Afterwards the
versions are contiguous, both halves of the ledger agree, and Θ and momentum have the bits of the same script
without faults.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from anabranch.faults import POINTS
from anabranch.orchestrator.tape import FILE_NAME
from anabranch.queue.control import send_command
from anabranch.queue.scripts import FencedWriter, Transaction, Written
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.harness import bench
from tests.promises import lives
from tests.promises.lives import Script, Stored, Zygote, scripted_spec, scripted_workers, stored_run
from tests.promises.proxy import losing_proxy
from tests.promises.results import progress, write_results
from tests.wait import wait_until

#: At which passage of a point a life may end, at most: some die at once, some after a few versions.
PASSAGES = {
    "after read": 40,
    "after fetch": 9,
    "after merge": 4,
    "before commit": 4,
    "after commit": 4,
    "during checkpoint": 3,
}
ANYWHERE = "anywhere"  # between the named points, too
CHECKPOINT_EVERY_S = 0.1
KILLS = 20  # at each point, in the long form
COMMIT = b"\xa1t\xa6merged"  # the broadcast's envelope in the script call of a commit


@pytest.fixture(scope="module")
def mother() -> Iterator[Zygote]:
    with lives.zygote() as made:
        yield made


@pytest.fixture(autouse=True)
def _frequent_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds follow reports: ten a second would make most of the time of these tests."""
    monkeypatch.setattr("anabranch.workers.member.heart.LEAST_S", 0.02)


def test_every_point_of_the_synchronizer_is_killed_at() -> None:
    assert set(PASSAGES) == {point for point in POINTS if not point.startswith("worker ")}


class Story:
    """One life of the synchronizer after the other, each ended by SIGKILL."""

    def __init__(self, mother: Zygote, url: RunUrl, spec: RunSpec, directory: Path) -> None:
        self.seconds: list[float] = []  # from the beginning of a life to its end
        self._mother = mother
        self._url, self._spec, self._directory = url, spec, directory

    async def tell(self, stored: Stored, faults: Sequence[str | int]) -> None:
        """Live and die at each fault. A number instead of a named point: killed from outside, wherever it is, so
        many versions later."""
        for fault in faults:
            started = time.monotonic()
            await (self._die_at(fault) if isinstance(fault, str) else self._die_after(fault, stored))
            self.seconds.append(time.monotonic() - started)

    @asynccontextmanager
    async def last_life(self) -> AsyncIterator[None]:
        """Nothing happens to it until the block ends; if it fails, what the lives said."""
        life = self._begin(None)
        try:
            yield
        except AssertionError as error:
            raise AssertionError(f"{error}\n{lives.last_words(self._directory)}") from None
        finally:
            await self._mother.kill(life)

    async def _die_at(self, fault: str) -> None:
        status = await self._mother.end(self._begin(fault), f"it dies at {fault}")
        assert status == -9, f"{fault}: it ended with {status}\n{lives.last_words(self._directory)}"

    async def _die_after(self, versions: int, stored: Stored) -> None:
        target = sum(await stored.versions()) + versions

        async def reached() -> bool:
            return sum(await stored.versions()) >= target

        life = self._begin(None)
        await wait_until(reached, f"{target} versions are stored")
        await self._mother.kill(life)

    def _begin(self, fault: str | None) -> lives.Life:
        return self._mother.begin(self._url, self._spec, self._directory, fault)


async def scripted_story(
    mother: Zygote, url: RunUrl, spec: RunSpec, directory: Path, faults: Sequence[str | int]
) -> dict[str, float]:
    """Scripted workers through all of it; checks every promise and returns a few figures."""
    script, story = Script(), Story(mother, url, spec, directory)
    async with stored_run(url) as stored, scripted_workers(url, script) as workers:
        await story.tell(stored, faults)
        async with story.last_life():
            await to_the_end(stored, workers, script)
        await check_everything(stored, workers, script, spec)
        check_file(directory / FILE_NAME)
    seconds = statistics.median(story.seconds) if story.seconds else 0.0
    return {"kills": len(faults), "versions_per_fragment": script.last, "seconds_per_life": round(seconds, 2)}


async def to_the_end(stored: Stored, workers: dict[str, SyntheticWorker], script: Script) -> None:
    """Let the script go on for two versions more and end: nothing is on its way any more."""
    await stored.reach(1)
    script.last = max(await stored.versions()) + 2
    await stored.reach(script.last)
    await lives.adopted_by_all(workers, script.last)


async def check_everything(
    stored: Stored, workers: dict[str, SyntheticWorker], script: Script, spec: RunSpec
) -> None:
    lives.check_tape(await stored.tape(), script)
    await lives.check_ledger(stored, workers, script)
    assert await stored.bits() == lives.expected_bits(spec, script)


def check_file(path: Path) -> None:
    """The tape in the run directory says nothing twice."""
    events = [json.loads(line) for line in path.read_text().splitlines()]
    merged = [(event["fragment"], event["version"]) for event in events if event["kind"] == "merged"]
    assert len(merged) == len(set(merged))


def faults_at(point: str, kills: int, seed: int) -> list[str | int]:
    generator = random.Random(f"{seed}/{point}")
    if point == ANYWHERE:
        return [generator.randint(0, 6) for _ in range(kills)]
    return [f"{point}:{generator.randint(1, PASSAGES[point])}:kill" for _ in range(kills)]


def spec_for(run: str, point: str) -> RunSpec:
    every_s = CHECKPOINT_EVERY_S if point in {"during checkpoint", ANYWHERE} else None
    return scripted_spec(run, checkpoint={"every_s": every_s})


async def test_the_script_itself_gives_the_bits_of_a_plain_loop(
    mother: Zygote, run_url: str, run_name: str, tmp_path: Path
) -> None:
    """Without faults: what the other tests compare with."""
    await scripted_story(mother, RunUrl.parse(run_url), scripted_spec(run_name), tmp_path, [])


@pytest.mark.parametrize("point", [*PASSAGES, ANYWHERE])
async def test_killed_at_a_point(
    mother: Zygote, run_url: str, run_name: str, tmp_path: Path, seed: int, point: str
) -> None:
    faults = faults_at(point, 3, seed)
    await scripted_story(mother, RunUrl.parse(run_url), spec_for(run_name, point), tmp_path, faults)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_killed_twenty_times_at_every_point(
    mother: Zygote, run_url: str, run_name: str, tmp_path: Path, seed: int
) -> None:
    points: dict[str, dict[str, float]] = {}
    for point in [*PASSAGES, ANYWHERE]:
        name = f"{run_name[:40]}-{point.replace(' ', '-')}"
        (directory := tmp_path / name).mkdir()
        url, faults = RunUrl(RunUrl.parse(run_url).server, name), faults_at(point, KILLS, seed)
        points[point] = await scripted_story(mother, url, spec_for(name, point), directory, faults)
        progress(f"{point:20}{points[point]}")
    write_results("exactly_once", seed, {"points": points})


# --- workers as they are ----------------------------------------------------------------------------------


async def unscripted_story(
    mother: Zygote, url: RunUrl, spec: RunSpec, directory: Path, faults: Sequence[str | int]
) -> None:
    """Workers of unequal pace, K = 1: some contributions are late, which is not a fault; the books must balance."""
    story = Story(mother, url, spec, directory)
    workers = {
        name: SyntheticWorker(url, name, Pace(step_s=step_s, tokens=tokens))
        for name, step_s, tokens in (("ada", 0.003, 64), ("bob", 0.01, 100), ("cyd", 0.04, 33))
    }
    async with stored_run(url) as stored, lives.at_work(workers):
        await story.tell(stored, faults)
        async with story.last_life():
            await stored.reach(2)
            await send_command(stored.redis, stored.keys, "pause")
            await wait_until(partial(_is_quiet, stored), "no round is open any more")
            await wait_until(partial(_balanced, stored, workers), "the books agree")
        tape = await stored.tape()
        lives.check_versions([event for event in tape if event["kind"] == "merged"])
        refusals = [event["reason"] for event in tape if event["kind"] in lives.REFUSALS]
        assert not [reason for reason in refusals if not reason.startswith(("late", "stale"))], refusals
        assert await stored.count("ledger mismatches") == 0


async def _is_quiet(stored: Stored) -> bool:
    core = await stored.core()
    return core is not None and core["paused"] and not core["rounds"]


async def _balanced(stored: Stored, workers: dict[str, SyntheticWorker]) -> bool:
    return not lives.imbalances(await stored.booked(), workers)


def faults_anywhere(kills: int, seed: int) -> list[str | int]:
    generator = random.Random(f"{seed}/unscripted")
    points = [generator.choice([*PASSAGES, ANYWHERE]) for _ in range(kills)]
    return [faults_at(point, 1, generator.randrange(2**31))[0] for point in points]


def unscripted_spec(run: str) -> RunSpec:
    return scripted_spec(
        run,
        rounds={"fragments": lives.FRAGMENTS, "inner_steps": 8},
        workers={"heartbeat_s": lives.HEARTBEAT_S},
        checkpoint={"every_s": CHECKPOINT_EVERY_S},
    )


async def test_the_books_balance_whoever_is_late_and_whenever_it_dies(
    mother: Zygote, run_url: str, run_name: str, tmp_path: Path, seed: int
) -> None:
    faults = faults_anywhere(5, seed)
    await unscripted_story(mother, RunUrl.parse(run_url), unscripted_spec(run_name), tmp_path, faults)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_the_books_balance_after_a_hundred_deaths(
    mother: Zygote, run_url: str, run_name: str, tmp_path: Path, seed: int
) -> None:
    faults = faults_anywhere(100, seed)
    await unscripted_story(mother, RunUrl.parse(run_url), unscripted_spec(run_name), tmp_path, faults)


# --- lost replies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("losses", [1, 6], ids=["retried by redis-py", "retried by us, too"])
async def test_a_commit_whose_reply_was_lost_is_recognised_as_done(
    run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    """Of every commit the first so many replies are lost, and the connection with them."""
    repeats: list[bool] = []
    write = FencedWriter.write

    async def noted(writer: FencedWriter, transaction: Transaction) -> Written:
        written = await write(writer, transaction)
        repeats.append(written.repeat)
        return written

    monkeypatch.setattr(FencedWriter, "write", noted)
    spec, script = scripted_spec(run_name), Script()
    async with (
        losing_proxy(run_url, COMMIT, lambda n: n % (losses + 1) < losses) as (through, proxy),
        stored_run(RunUrl.parse(run_url)) as stored,
        bench(through, spec),
        scripted_workers(RunUrl.parse(run_url), script) as workers,
    ):
        await to_the_end(stored, workers, script)
        await check_everything(stored, workers, script, spec)
        assert proxy.lost >= losses * script.last, "each commit lost its replies (one may hold two versions)"
        await wait_until(lambda: sum(repeats) * losses == proxy.lost, "each is told in the end that it is done")
