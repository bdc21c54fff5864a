"""The worker and evaluator processes."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import anabranch
from anabranch.errors import LayoutMismatch, MemberRefused, SpecError, UsageError
from anabranch.faults import InjectedFault, armed
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec, TaskSpec, parse_spec
from anabranch.workers.member.client import farewell_s
from anabranch.workers.member.synthetic import SyntheticWorker
from anabranch.workers.run import Ending, MemberOptions, another_task, run_evaluator, run_worker
from anabranch.workers.session import Session
from anabranch.workers.tasks.gpt import GPTTask
from anabranch.workers.tasks.named import load_task
from tests.harness import Bench, bench, make_spec, process
from tests.tiny_task import TinyTask
from tests.wait import PATIENCE_S, wait_until

NOWHERE = RunUrl.parse("redis://127.0.0.1:1/0")
TINY = "tests.tiny_task:TinyTask"


def test_a_built_in_task_has_a_name() -> None:
    assert isinstance(load_task(TaskSpec()), GPTTask)


def test_a_task_of_ones_own_is_named_by_its_place_and_gets_the_options() -> None:
    task: Any = load_task(TaskSpec(name=TINY, options={"a": 1}))
    assert (type(task).__name__, task.options) == ("TinyTask", {"a": 1})


def test_an_override_takes_the_runs_place() -> None:
    assert type(load_task(TaskSpec(), TINY)).__name__ == "TinyTask"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gtp", r"task\.name = 'gtp': unknown; allowed: gpt, hf, synthetic, or package\.module:Class"),
        ("no.such.module:Task", "cannot be imported: No module named"),
        ("tests.tiny_task:Missing", "cannot be imported"),
    ],
)
def test_a_task_that_cannot_be_had_is_named(name: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        load_task(TaskSpec(name=name))


@pytest.mark.parametrize("duty", [0.0, -1.0, 1.5])
def test_a_duty_cycle_is_a_share(duty: float) -> None:
    with pytest.raises(UsageError, match="--duty"):
        run_worker(NOWHERE, MemberOptions(duty=duty), Ending())


@pytest.mark.parametrize("run", [run_worker, run_evaluator])
@pytest.mark.parametrize(
    "options", [MemberOptions(name="a b"), MemberOptions(name="_x"), MemberOptions(label="x" * 201)]
)
def test_a_bad_name_is_refused_before_anything_is_waited_for(run: Any, options: MemberOptions) -> None:
    with pytest.raises(UsageError, match=r"--name|--label"):
        run(NOWHERE, options, Ending())


# --- who gives version 0 ----------------------------------------------------------------------------------

HF_RUN = {"name": "hf", "options": {"lora": True, "context": 64}}


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ({"name": "gpt"}, MemberOptions(), None),
        ({"name": "gpt"}, MemberOptions(task="gpt", task_options={"data": "texts"}), None),
        ({"name": "gpt"}, MemberOptions(task="synthetic"), "its task is 'gpt', this worker's 'synthetic'"),
        (HF_RUN, MemberOptions(task_options={"model": "m", "lora": True}), None),
        (
            HF_RUN,
            MemberOptions(task_options={"lora": False}),
            r"its task\.options\.lora is True, this worker's False",
        ),
        ({"name": "hf"}, MemberOptions(task_options={"lora": False}), None),
        ({"name": "hf"}, MemberOptions(task_options={"lora": True}), r"lora is None, this worker's True"),
    ],
)
def test_a_members_options_may_make_another_task(
    task: dict[str, Any], options: MemberOptions, words: str | None
) -> None:
    found = another_task(parse_spec({"task": task}), options)
    assert found is None if words is None else found is not None and re.search(words, found)


async def test_a_worker_of_another_task_does_not_give_version_0(run_url: str, run_name: str) -> None:
    async with bench(run_url, make_spec(run_name, task={"name": TINY, "options": {}})) as run:
        options = MemberOptions(name="wrong", task="synthetic")
        with pytest.raises(
            MemberRefused, match=r"has no model yet, and its task is .*TinyTask', this worker's 'synth"
        ):
            await asyncio.to_thread(run_worker, run.url, options, Ending())
        assert not run.state.members
        follows = asyncio.create_task(SyntheticWorker(run.url, "follows", can_init=False).run())
        await wait_until(lambda: run.state.members, "one that says so itself is let in")
        assert not run.tape("init asked")
        ending = Ending()
        right = asyncio.create_task(asyncio.to_thread(run_worker, run.url, MemberOptions(name="right"), ending))
        await wait_until(lambda: run.state.born, "the run's own task gives it")
        assert run.tape("init asked")[0]["reason"] == "version 0 comes from right"
        with pytest.raises(LayoutMismatch, match="this model is not the run's"):
            await follows
        ending.reason = "test"
        await right


async def _ends_with(child: Any, status: int) -> None:
    await wait_until(lambda: child.poll() is not None, "the process ended")
    assert child.returncode == status


@pytest.mark.slow
async def test_a_worker_and_an_evaluator_take_part_until_the_run_stops(
    run_url: str, run_name: str, tmp_path: Path
) -> None:
    spec = make_spec(run_name, task={"name": TINY, "options": {}}, workers={"heartbeat_s": 1.0})
    async with bench(run_url, spec) as run:
        environment = {"ANABRANCH_URL": run_url}
        with (
            process("worker", "--name", "w", "--duty", "0.5", environment=environment) as worker,
            process("evaluator", "--name", "e", "--every-s", "0.1", environment=environment) as evaluator,
        ):
            await run.reach(2)
            await wait_until(lambda: len(run.state.heldout) >= 2, "it is measured")
            roles = {m.name: m.role for m in run.state.members.values()}
            assert roles == {"w": "worker", "e": "evaluator"}
            from anabranch.operate import command

            await command(RunUrl.parse(run_url), "stop")
            await _ends_with(worker, 0)
            await _ends_with(evaluator, 0)
        await wait_until(lambda: len(run.tape("gone")) == 2, "both said farewell")
        assert run.state.counts.get("ledger mismatches", 0) == 0


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGHUP])
async def test_a_signal_is_a_farewell(run_url: str, run_name: str, asked: signal.Signals) -> None:
    async with bench(run_url, make_spec(run_name)) as run:
        with process("worker", "--name", "w", environment={"ANABRANCH_URL": run_url}) as worker:
            await run.reach(1)
            worker.send_signal(asked)
            await _ends_with(worker, 0)
        await wait_until(lambda: bool(run.tape("closed")), "its books are closed")
        assert run.tape("gone")[0]["reason"].startswith("w left")
        assert run.state.departed[0].lost == 0


def test_an_ending_remembers_the_signal() -> None:
    ending = Ending()
    assert not ending()
    ending.reason = "SIGTERM"
    assert ending()


# --- leaving, in this process (tests/promises/test_10_leaving.py has the real ones) ------------------------


@asynccontextmanager
async def joined(run: Bench, **options: Any) -> AsyncIterator[tuple[Session, torch.nn.Module]]:
    model = TinyTask({}).build_model()
    session = await asyncio.to_thread(anabranch.join, run.url, model, name="w", **options)
    assert isinstance(session, Session)
    try:
        yield session, model
    finally:
        with suppress(InjectedFault):
            await asyncio.to_thread(session.close)


def tiny_spec(run_name: str) -> RunSpec:
    return make_spec(run_name, task={"name": TINY, "options": {}})


async def test_a_rest_of_minutes_ends_when_somebody_wants_to_leave(run_url: str, run_name: str) -> None:
    async with bench(run_url, tiny_spec(run_name)) as run, joined(run, duty=1e-9) as (session, _):
        step = asyncio.create_task(asyncio.to_thread(session.step, 4))
        await wait_until(lambda: session._life().books.holds(0), "it rests after its step")
        assert not step.done()
        session.hurry()
        async with asyncio.timeout(PATIENCE_S):
            await step


async def test_a_step_that_is_dropped_and_a_close_do_not_get_in_each_others_way(run_url: str, run_name: str) -> None:
    async with bench(run_url, tiny_spec(run_name)) as run, joined(run) as (session, _):
        first, second = await asyncio.gather(
            asyncio.to_thread(session.abandon, "too long", 5.0), asyncio.to_thread(session.abandon, "too long", 5.0)
        )
        assert {first, second} == {True, False}
        await asyncio.to_thread(session.close)
        await wait_until(lambda: bool(run.tape("gone")), "it has left")
        assert run.tape("gone")[0]["reason"] == "w left: too long"


async def test_what_breaks_while_closing_is_raised(run_url: str, run_name: str) -> None:
    async with bench(run_url, tiny_spec(run_name)) as run, joined(run) as (session, _):
        await run.settle()
        session.step(4)
        with armed("worker before upload"), pytest.raises(InjectedFault):
            await asyncio.to_thread(session.close)
        await asyncio.to_thread(session.close)  # once is enough


async def test_after_a_stop_nothing_waits_for_uploads_that_will_not_end(
    run_url: str, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(run_url, tiny_spec(run_name)) as run, joined(run) as (session, _):
        uploading = asyncio.Event()

        async def never(*_: Any) -> Any:
            uploading.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(session._client.line.blobs, "put", never)

        def trains() -> bool:
            session.step(4)
            return uploading.is_set()

        await wait_until(trains, "an upload hangs")
        await run.command("stop")
        await wait_until(lambda: session.stopped, "it hears of the stop")
        began = time.monotonic()
        await asyncio.to_thread(session.close)
        assert time.monotonic() - began < 5.0


def test_a_short_drain_is_shared_by_contributions_and_farewell() -> None:
    assert (farewell_s(10.0), farewell_s(2.0), farewell_s(0.0)) == (3.0, 1.0, 0.0)
