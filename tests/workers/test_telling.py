"""What a member says in its log: nobody waits long without being told for what."""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import pytest
import torch

import anabranch
from anabranch.errors import MemberRefused, UrlError
from anabranch.queue.messages import Verdict
from anabranch.queue.url import URL_VARIABLE, RunUrl
from anabranch.workers.member import telling
from anabranch.workers.member.books import Books
from anabranch.workers.member.heart import Vitals
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from anabranch.workers.member.telling import Telling, Waiting
from tests.harness import bench, make_spec
from tests.wait import wait_until, wait_until_sync


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("anabranch.workers.member.telling.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_what_is_waited_for_is_said_after_three_seconds_and_then_now_and_then(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    waiting = Waiting()
    for _ in range(40):
        waiting.on("a place")
        clock.now += 0.5
    assert [record.message for record in caplog.records] == [
        "waiting: a place (for 3 s)",
        "waiting: a place (for 18 s)",
    ]
    waiting.on("the model")
    assert len(caplog.records) == 2, "another thing is waited for from now on"
    clock.now += 3.0
    waiting.on("the model")
    assert caplog.records[-1].message == "waiting: the model (for 3 s)"


def test_how_training_goes_in_one_line(clock: Clock) -> None:
    vitals, books = Vitals(loss=4.25), Books(2)
    tell = Telling(vitals)
    for fragment in range(2):
        books.adopt(fragment, 0)
    for _ in range(10):
        books.step(100)
    assert books.send(0, books.snapshot(0))
    books.outcome(Verdict(incarnation=1, fragment=0, base=0, applied=True, tokens=1000))
    books.outcome(Verdict(incarnation=1, fragment=0, base=0, applied=True, tokens=1000))  # told again
    clock.now += 10.0
    line = tell.line(books, [3, 1], run_tokens=5000, paused=False)
    assert line == "step 10, loss 4.250, 100 tokens/s, 75% merged; the run has merged 5,000 tokens"
    clock.now += 10.0
    assert tell.line(books, [3, 1], run_tokens=5000, paused=False) == (
        "no step for 10 s; the run has merged 5,000 tokens"
    )
    vitals.idle = True
    idle = tell.line(books, [3, 1], run_tokens=5000, paused=True)
    assert idle is not None
    assert "waits for data, no rounds open: the run is paused" in idle


def test_figures_of_all_incarnations_are_summed_up_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    tell = Telling(Vitals())
    for _ in range(2):
        books = Books(1)
        books.adopt(0, 0)
        books.step(500)
        tell.over(books, [1])
    clock.now += 60.0
    tell.summary(None, [1], 2_500_000, "left (SIGTERM)")
    tell.summary(None, [1], 2_500_000, "ended")
    assert [record.message for record in caplog.records] == [
        "left (SIGTERM), after 60 s: 2 steps, 1,000 tokens trained (0% merged), 2.5 MB sent"
    ]


def test_an_evaluator_tells_each_measurement_once(clock: Clock) -> None:
    vitals = Vitals(heldout_loss=3.5, measured_tokens=700)
    tell = Telling(vitals)
    assert tell.line(Books(1), [1], run_tokens=900, paused=False) == (
        "held-out loss 3.500, measured at 700 tokens; the run has merged 900 tokens"
    )
    assert tell.line(Books(1), [1], run_tokens=900, paused=False) is None


# --- with a run -------------------------------------------------------------------------------------------


def test_who_joins_a_run_that_is_not_there_is_told_so_and_may_give_up(
    run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    monkeypatch.setattr(telling, "SAID_AFTER_S", 0.05)
    monkeypatch.setenv(URL_VARIABLE, run_url)
    with pytest.raises(MemberRefused, match=rf"within timeout_s = 1 s: no run .{run_name}. on this server"):
        anabranch.join(None, torch.nn.Linear(2, 2), timeout_s=1.0)
    assert any(record.message.startswith(f"waiting: no run {run_name!r}") for record in caplog.records)
    wait_until_sync(lambda: not [t for t in threading.enumerate() if t.name == "anabranch I/O"], "its thread ended")


def test_without_a_url_anywhere_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(URL_VARIABLE, raising=False)
    assert URL_VARIABLE not in os.environ
    with pytest.raises(UrlError, match=r"no run URL: give .* or set ANABRANCH_URL"):
        anabranch.join(None, torch.nn.Linear(2, 2))


async def test_a_run_that_is_misspelt_is_named_beside_those_that_are_there(
    run_url: str, run_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    monkeypatch.setattr(telling, "SAID_AFTER_S", 0.05)

    def said(words: str) -> bool:
        return any(words in record.message for record in caplog.records)

    async with bench(run_url, make_spec(run_name)) as run:
        other = RunUrl.parse(run_url.replace(run_name, f"{run_name}x"))
        stray = asyncio.create_task(SyntheticWorker(other, "stray", Pace(step_s=0.01)).run(), name="stray")
        await wait_until(lambda: said(f"no run '{run_name}x' on this server; there are: "), "it is said")
        assert said(run_name)
        stray.cancel()
        await asyncio.gather(stray, return_exceptions=True)
        assert run.state.members == {}


async def test_a_name_in_use_is_said_while_it_is_waited_for(
    run_url: str, run_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="anabranch")
    monkeypatch.setattr(telling, "SAID_AFTER_S", 0.05)
    async with bench(run_url, make_spec(run_name)) as run:
        run.add("w", Pace(step_s=0.01))
        await run.reach(1)
        run.kill("w")
        run.add("w", Pace(step_s=0.01))  # the former one is not taken for gone yet
        await wait_until(
            lambda: any("'w' is in use by a member heard a moment ago" in r.message for r in caplog.records),
            "it is said",
        )
        await wait_until(lambda: run.workers["w"].client.joined.is_set(), "it is let in")
