"""The journal: what a core was given, replayed; the first difference is named."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.errors import UsageError
from anabranch.orchestrator.core import frames
from anabranch.orchestrator.core import instructions as do
from anabranch.orchestrator.core.state import State
from anabranch.orchestrator.journal import FOLDER, SEGMENTS, Journal, JournaledCore, segments
from anabranch.queue.url import RunUrl
from anabranch.simulate.engine import Engine
from anabranch.simulate.replay import read_frames, replay_decisions
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.conftest import ServerFactory
from tests.harness import make_spec as make_spec_of
from tests.orchestrator.bench import Bench, make_spec, one
from tests.promises.lives import Stored, at_work, stored_run, zygote
from tests.wait import wait_until


class Recorded(Bench):
    """A bench whose cores write a journal."""

    def __init__(self, directory: Path, limit_bytes: int = 2**24) -> None:
        self.journal = Journal(directory, limit_bytes)
        super().__init__(make_spec(quorum=2))

    def make_engine(self, state: State) -> Engine:
        return Engine(state, self, lambda state: JournaledCore(state, self.journal, "a test"))


def some_life(bench: Bench) -> None:
    """Members come, train, are merged, and go."""
    bench.worker("a")
    bench.worker("b")
    for _ in range(3):
        bench.steps(a=2, b=2)
        for round_ in list(bench.state.rounds.values()):
            said = [*bench.contribute("a", round_.fragment), *bench.contribute("b", round_.fragment)]
            bench.merge(one(do.Merge, said))
    bench.leave("b")
    bench.elapse(4.0)


def test_the_same_events_give_the_same_decisions(tmp_path: Path) -> None:
    bench = Recorded(tmp_path)
    some_life(bench)
    bench.journal.close()
    again = replay_decisions(segments(tmp_path))
    assert again.difference is None
    assert (again.terms, again.segments) == (1, 1)
    assert again.decisions == len(bench.log) > 30
    assert again.summary.startswith(f"the same again: {len(bench.log)} decisions")


def test_another_leader_begins_from_the_state_recorded_there(tmp_path: Path) -> None:
    bench = Recorded(tmp_path)
    some_life(bench)
    for life in range(2, 4):
        state = bench.reload()
        state.nonce = f"leader-{life}"
        bench.engine.succeed(state)
        bench.elapse(3.0)
    bench.journal.close()
    again = replay_decisions(segments(tmp_path))
    assert again.difference is None
    assert (again.terms, again.segments) == (3, 3)


def test_it_is_bounded_and_each_segment_stands_alone(tmp_path: Path) -> None:
    bench = Recorded(tmp_path, limit_bytes=SEGMENTS * 1024)
    bench.worker("a")
    while len(segments(tmp_path)) < SEGMENTS or segments(tmp_path)[0].name.startswith("00000001"):
        bench.steps(a=1)
        bench.elapse(2.0)
    bench.journal.close()
    found = segments(tmp_path)
    assert len(found) == SEGMENTS
    assert all(path.stat().st_size < 8 * 1024 for path in found)
    assert replay_decisions(found).difference is None
    assert replay_decisions(found[3:5]).difference is None


def test_states_at_the_seam_of_two_segments_are_compared(tmp_path: Path) -> None:
    bench = Recorded(tmp_path, limit_bytes=SEGMENTS * 1024)
    bench.worker("a")
    while len(segments(tmp_path)) < 3:
        bench.steps(a=1)
        bench.elapse(2.0)
    bench.journal.close()
    first, second, third, *_ = segments(tmp_path)
    second.unlink()
    difference = replay_decisions([first, third]).difference
    assert difference is not None
    assert "begins with another state than the segment before it ended with" in difference


def change(path: Path, edit: Callable[[list[Any]], None]) -> None:
    """Rewrite a segment with its frames changed."""
    found = list(read_frames(path))
    edit(found)
    path.write_bytes(zlib.compress(b"".join(msgpack.packb(frame) for frame in found)))


def decided(found: list[list[Any]], kind: str) -> list[Any]:
    """The first recorded decision of this kind."""
    return next(said for frame in found if frame[0] == frames.TAKEN for said in frame[2] if said[0] == kind)


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("reason", "Merge", "recorded is Merge “because”, decided now Merge “all arrived"),
        ("content", "Tell call", "Tell call “b made 2 steps (H/P = 2)” has another content now: Tell("),
        ("missing", "Tell merged", "Tell merged “all arrived after"),
        ("invented", "Tell merged", "recorded is Tell stop “no”, it is not decided now"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, what: str, kind: str, words: str) -> None:
    bench = Recorded(tmp_path)
    some_life(bench)
    bench.journal.close()
    [path] = segments(tmp_path)

    def edit(found: list[list[Any]]) -> None:
        if what in ("missing", "invented"):
            said = next(f[2] for f in found if f[0] == frames.TAKEN and any(s[0] == kind for s in f[2]))
            said[:] = said[:-1] if what == "missing" else [*said, ["Tell stop", "no", 1]]
        else:
            at = 1 if what == "reason" else 2
            decided(found, kind)[at] = "because" if what == "reason" else 12345

    change(path, edit)
    done = replay_decisions([path])
    assert done.difference is not None
    assert words in done.difference, done.difference
    assert done.summary.startswith("first difference, after ")
    result = CliRunner().invoke(app, ["replay", "decisions", str(tmp_path)])
    assert result.exit_code == 1
    assert words in result.output


def test_a_segment_that_a_crash_cut_short_is_read_up_to_there(tmp_path: Path) -> None:
    bench = Recorded(tmp_path)
    some_life(bench)
    bench.journal.close()
    [path] = segments(tmp_path)
    whole = replay_decisions([path])
    path.write_bytes(path.read_bytes()[:-200])
    part = replay_decisions([path])
    assert part.difference is None
    assert 0 < part.events < whole.events


def test_without_a_journal_it_says_where_one_comes_from(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dir RUN write RUN/journal"):
        replay_decisions(segments(tmp_path))


def test_a_full_disk_ends_the_journal_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / FOLDER).write_text("a file where the folder should be")
    bench = Recorded(tmp_path)
    some_life(bench)
    assert bench.state.counts["all arrived"] >= 1
    assert [record.message for record in caplog.records if "cannot be written" in record.message]


# --- a real run -------------------------------------------------------------------------------------------


async def test_a_run_in_which_worker_leader_and_server_are_killed_is_decided_the_same_again(
    server_factory: ServerFactory, run_name: str, tmp_path: Path
) -> None:
    server = server_factory(appendfsync="always")
    url = RunUrl.parse(f"{server.url}?run={run_name}")
    spec = make_spec_of(run_name, rounds={"quorum": 2})
    directory = tmp_path / "run"
    directory.mkdir()
    a, b, c = (SyntheticWorker(url, name, Pace(step_s=0.005)) for name in ("a", "b", "c"))
    with zygote() as mother:
        async with stored_run(url) as stored, at_work({"a": a, "b": b}):
            life = mother.begin(url, spec, directory)
            async with at_work({"c": c}):
                await goes_on(stored)
            await books_closed(stored, "c")
            await goes_on(stored)
            await mother.kill(life)
            life = mother.begin(url, spec, directory)
            await goes_on(stored)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            await goes_on(stored)
            await mother.kill(life)
    done = replay_decisions(segments(directory))
    assert done.difference is None, done.difference
    assert done.terms >= 3
    taken = [frame for path in segments(directory) for frame in read_frames(path) if frame[0] == frames.TAKEN]
    kinds = [said[0] for frame in taken for said in frame[2]]
    assert kinds.count("Tell merged") >= 8
    assert {"NewTimeline", "Tell call", "Tell closed"} <= set(kinds)


async def goes_on(stored: Stored, rounds: int = 2) -> None:
    versions = await stored.versions()
    await stored.reach(max(versions, default=0) + rounds)


async def books_closed(stored: Stored, name: str) -> None:
    async def closed() -> bool:
        return any(event["kind"] == "closed" and event["name"] == name for event in await stored.tape())

    await wait_until(closed, f"the books of {name} are closed")
