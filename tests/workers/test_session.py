"""What a torch training loop calls, with a tiny model against a real synchronizer."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import anabranch
from anabranch.errors import CommandRefused, LayoutMismatch, MemberRefused, ServerUnreachable, UsageError
from anabranch.model import Float32, unflatten
from anabranch.queue.control import send_command
from anabranch.spec import RunSpec
from anabranch.workers.session import Session
from anabranch.workers.shards import TokenWindows
from tests.conftest import ServerFactory
from tests.harness import Bench, bench, make_spec
from tests.wait import PATIENCE_S, wait_until, wait_until_sync
from tests.workers.test_copies import Hidden, ScheduleFree
from tests.workers.test_copies import train as stepping

TOKENS = 8
HEARTBEAT_S = 1.0  # where a silence is tried: three of them are more than a busy machine keeps anybody waiting
SILENT_S = 3.5 * HEARTBEAT_S  # longer than a member may be silent


def tiny(seed: int = 0, hidden: int = 8) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))


def parameters(model: torch.nn.Module) -> dict[str, Float32]:
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}


def equal(one: dict[str, Float32], other: dict[str, Float32]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def run_model(run: Bench) -> dict[str, Float32]:
    """The global model as the synchronizer holds it."""
    vault = run.synchronizer.vault
    assert vault is not None
    assert vault.layout is not None
    return unflatten(vault.layout, [version.theta for version in vault.versions])


def spec_of(run: str, **sections: Any) -> RunSpec:
    return make_spec(run, task={"name": "x:Y", "options": {}}, **sections)


@asynccontextmanager
async def joined(run: Bench, name: str, model: torch.nn.Module, **options: Any) -> AsyncIterator[Session]:
    """A session whose I/O thread is ended whatever happens."""
    session = await asyncio.to_thread(anabranch.join, run.url, model, name=name, **options)
    assert isinstance(session, Session)
    try:
        await run.reach(0)  # a member has the model a moment before the synchronizer notes that it is stored
        yield session
    finally:
        await asyncio.to_thread(session.close)


def train_step(session: Session, model: torch.nn.Module) -> None:
    """A step that changes every parameter, without an optimizer's cost."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(0.99)
    session.step(TOKENS, loss=1.0)


async def train_until(session: Session, model: torch.nn.Module, run: Bench, version: int) -> None:
    def reached() -> bool:
        train_step(session, model)
        return bool(run.versions()) and min(run.versions()) >= version

    await wait_until(reached, f"version {version}")


async def test_a_permission_taken_away_meanwhile_is_an_error_of_ours(server_factory: ServerFactory) -> None:
    model, admin = tiny(), server_factory()
    async with bench(f"{admin.url}?run=few", spec_of("few")) as run:
        await run.redis.execute_command("ACL", "SETUSER", "few", "on", ">secret", "~*", "&*", "+@all")  # type: ignore[no-untyped-call]
        url = f"{admin.url.replace('redis://', 'redis://few:secret@')}?run=few"
        session = await asyncio.to_thread(anabranch.join, url, model, name="w")
        assert isinstance(session, Session)
        await run.redis.execute_command("ACL", "SETUSER", "few", "-xadd")  # type: ignore[no-untyped-call]

        def step() -> None:
            while True:
                train_step(session, model)

        with pytest.raises(CommandRefused, match=r"XADD .*'xadd'.*ACL SETUSER"):
            await asyncio.to_thread(step)
        await asyncio.to_thread(session.close)
    assert not _io_threads()


# --- joining ----------------------------------------------------------------------------------------------


async def test_joining_adopts_the_global_model(run_url: str, run_name: str) -> None:
    first, second = tiny(1), tiny(2)
    initial = parameters(first)
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "first", first):
        assert equal(run_model(run), initial), "the first worker gave version 0"
        assert not equal(parameters(second), initial)
        async with joined(run, "second", second) as session:
            assert equal(parameters(second), initial)
            assert session.versions() == [0, 0]


async def test_another_model_is_refused_naming_the_tensor(run_url: str, run_name: str) -> None:
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "first", tiny()):
        words = r"'0\.bias' has shape \(9,\) here, \(8,\) in the run"
        with pytest.raises(LayoutMismatch, match=words):
            await asyncio.to_thread(anabranch.join, run.url, tiny(hidden=9), name="second")
    assert not _io_threads()


async def test_a_name_in_use_is_a_plain_error(run_url: str, run_name: str) -> None:
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "same", tiny()):
        with pytest.raises(MemberRefused, match="'same' is in use"):
            await asyncio.to_thread(anabranch.join, run.url, tiny(), name="same")


def test_no_server_is_a_plain_error() -> None:
    with pytest.raises(ServerUnreachable, match="is the server running"):
        anabranch.join("redis://127.0.0.1:1/0", tiny(), name="w")


@pytest.mark.parametrize("name", ["a b", "a\n", "_", "_hidden", "x" * 65])
def test_a_name_that_cannot_be_a_key_is_refused_at_once(name: str) -> None:
    with pytest.raises(UsageError, match="--name"):
        Session("redis://127.0.0.1:1/0", tiny(), name=name)


def test_before_it_joined_there_is_no_step() -> None:
    session = Session("redis://127.0.0.1:1/0", tiny(), name="w")
    with pytest.raises(MemberRefused, match="has not joined"):
        session.step(1)
    session.close()


# --- training ---------------------------------------------------------------------------------------------


async def test_only_what_requires_gradients_is_synchronized(run_url: str, run_name: str) -> None:
    first, second = tiny(1), tiny(2)
    for model in (first, second):
        model[0].requires_grad_(False)
    own = parameters(second)
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "first", first) as session:
        async with joined(run, "second", second):
            pass
        await train_until(session, first, run, 1)
        assert set(run_model(run)) == {"2.weight", "2.bias"}
    after = parameters(second)
    assert np.array_equal(after["0.weight"], own["0.weight"])
    assert not np.array_equal(after["2.weight"], own["2.weight"])


async def test_members_that_follow_hold_equal_parameters(run_url: str, run_name: str) -> None:
    """Two workers train; whoever has adopted the last versions holds the global model, bit for bit."""
    async with (
        bench(run_url, spec_of(run_name, rounds={"quorum": 2})) as run,
        joined(run, "a", tiny(1)) as a,
        joined(run, "b", tiny(2)) as b,
    ):
        models = {a: a._model, b: b._model}

        def both() -> bool:
            for session, model in models.items():
                train_step(session, model)
            return min(run.versions()) >= 2

        await wait_until(both, "both contribute")
        await run.settle()
        watchers = [tiny(7), tiny(8)]
        async with joined(run, "c", watchers[0]) as c, joined(run, "d", watchers[1]) as d:
            assert c.versions() == d.versions() == run.versions()
            assert equal(parameters(watchers[0]), parameters(watchers[1]))
            assert equal(parameters(watchers[0]), run_model(run))
        assert run.state.counts.get("ledger mismatches", 0) == 0
        assert {len(event["weights"]) for event in run.tape("merged")} == {2}


async def test_it_learns_how_many_tokens_the_run_has_merged(run_url: str, run_name: str) -> None:
    model = tiny()
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "w", model) as session:
        assert session.tokens == 0
        await train_until(session, model, run, 2)
        await run.settle()
        await wait_until(lambda: session.tokens == run.state.tokens, "it heard of the last merge")
        assert session.tokens > 0
        await wait_until(lambda: session.paused, "it heard of the pause")


async def test_a_step_never_waits_for_the_network(server_factory: ServerFactory) -> None:
    server = server_factory()
    model = tiny()
    async with (
        bench(f"{server.url}?run=frozen", spec_of("frozen", workers={"heartbeat_s": HEARTBEAT_S})) as run,
        joined(run, "w", model) as session,
    ):
        await train_until(session, model, run, 2)
        longest = 0.0
        os.kill(server.pid, signal.SIGSTOP)
        try:
            stopped_at, merged = time.monotonic(), sum(run.versions())

            def stepped() -> bool:
                nonlocal longest
                started = time.monotonic()
                train_step(session, model)
                longest = max(longest, time.monotonic() - started)
                return time.monotonic() - stopped_at > SILENT_S

            await wait_until(stepped, "it trained through the silence")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert longest < SILENT_S / 2, "one that waits for an answer takes as long as the silence"
        await train_until(session, model, run, min(run.versions()) + 2)
        assert sum(run.versions()) > merged
        assert run.tape("gone") == []
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_a_resting_worker_answers_calls(run_url: str, run_name: str) -> None:
    """Between two steps every moment is a boundary: its round does not wait for the next step."""
    model = tiny()
    spec = spec_of(run_name, rounds={"fragments": 1, "in_flight": 1, "inner_steps": 1})
    async with bench(run_url, spec) as run, joined(run, "w", model, duty=0.05) as session:
        for _ in range(3):
            await asyncio.to_thread(train_step, session, model)

        def nothing_under_way() -> bool:  # a version that arrives with the next step would discard its tokens
            session.poll(0.0)
            # A member's first report only says where it begins: if that had the last step in it, no round were due.
            known = [member.steps for member in run.state.members.values()] == [3]
            return known and not run.state.rounds and session.versions() == run.versions()

        await wait_until(nothing_under_way, "its steps are known, everything is adopted")
        before = run.versions()[0]
        session._last -= 2.0  # as if the step had taken so long: it rests 38 s
        resting = threading.Thread(target=train_step, args=(session, model), name="training")
        resting.start()
        await run.reach(before + 1)
        assert resting.is_alive()
        await send_command(run.redis, run.keys, "stop")
        await wait_until(lambda: not resting.is_alive(), "the end of the run ends the rest")


async def test_batches_end_with_the_run(run_url: str, run_name: str) -> None:
    model = tiny()
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "w", model) as session:
        await train_until(session, model, run, 1)

        def endless() -> Iterator[int]:
            number = 0
            while True:
                yield number
                number += 1

        batches = session.batches(endless())
        assert [next(batches), next(batches)] == [0, 1]
        await send_command(run.redis, run.keys, "stop", by="test")
        await wait_until(lambda: session.stopped, "it heard of the end")
        assert list(batches) == []
        assert session.stopped == "stopped (by test)"


@pytest.mark.parametrize("loss", [math.nan, math.inf])
async def test_a_loss_that_diverges_does_not_silence_the_worker(run_url: str, run_name: str, loss: float) -> None:
    model = tiny()
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "w", model) as session:
        session._client.vitals.loss = loss
        session._loss_at = time.monotonic() + 3600
        await train_until(session, model, run, 2)
        member = next(iter(run.state.members.values()))
        assert member.live
        assert member.loss is None


async def test_an_evaluator_reports_what_it_measured(run_url: str, run_name: str) -> None:
    model = tiny()
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "w", model) as worker:
        watcher = Session(run.url, tiny(5), name="e", role="evaluator")
        await asyncio.to_thread(watcher.start)
        try:
            await train_until(worker, model, run, 1)
            await wait_until(lambda: watcher.poll(0.0) == [] and min(watcher.versions()) >= 1, "it follows")
            watcher.report_heldout(2.5, 123)
            await wait_until(lambda: (123, 2.5) in run.state.heldout, "the loss arrived")
        finally:
            await asyncio.to_thread(watcher.close)
        assert {m.role for m in run.state.members.values()} >= {"worker"}


# --- optimizers that keep copies --------------------------------------------------------------------------


async def test_an_optimizers_copies_follow_what_is_adopted(run_url: str, run_name: str) -> None:
    first, second = tiny(1), tiny(2)
    optimizer = ScheduleFree(second.parameters())
    optimizer.train()
    stepping(second, optimizer, 3)
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "first", first):
        session = await asyncio.to_thread(anabranch.join, run.url, second, optimizer, name="second")
        try:
            assert equal(parameters(second), parameters(first))
            stepping(second, optimizer, 10, gradients=False)
            for one, other in zip(first.parameters(), second.parameters(), strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0.3)
        finally:
            await asyncio.to_thread(session.close)


async def test_an_optimizer_whose_copies_are_not_found_needs_a_hook(run_url: str, run_name: str) -> None:
    first, second = tiny(1), tiny(2)
    optimizer = Hidden(second.parameters())
    told: set[str] = set()
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "first", first):
        with pytest.raises(UsageError, match="Hidden keeps a second copy"):
            await asyncio.to_thread(anabranch.join, run.url, second, optimizer, name="second")
        session = await asyncio.to_thread(
            partial(anabranch.join, run.url, second, optimizer, name="second", on_adopt=told.update)
        )
        await asyncio.to_thread(session.close)
    assert told == parameters(second).keys()


# --- numbers ----------------------------------------------------------------------------------------------


async def test_a_step_that_cannot_be_counted_is_refused_where_it_is_made(run_url: str, run_name: str) -> None:
    wrong: dict[str, list[Any]] = {"tokens": [0, -5, 0.5, True, None, 2**40 + 1], "loss": ["1", torch.ones(2)]}
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "w", tiny()) as session:
        for value in wrong["tokens"]:
            with pytest.raises(UsageError, match=r"^tokens = "):
                session.step(value)
        for value in wrong["loss"]:
            with pytest.raises(UsageError, match=r"^loss = "):
                session.step(8, value)
        assert session._life().books.report()["processed"] == 0, "nothing was counted"
        session.step(torch.ones(8, dtype=torch.bool).sum())
        assert session._life().books.report()["processed"] == 8


async def test_steps_that_claim_too_much_together_are_refused(run_url: str, run_name: str) -> None:
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "w", tiny()) as session:
        await run.settle()
        session.step(2**40 - 1)
        with pytest.raises(UsageError, match=r"^tokens = 2: with the 1,099,511,627,775 since"):
            session.step(2)


async def test_other_numbers_are_refused_by_name(run_url: str, run_name: str) -> None:
    with pytest.raises(UsageError, match=r"^duty = 0: allowed is a number, above 0 and at most 1"):
        Session(run_url, tiny(), duty=0)
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "w", tiny()) as session:
        with pytest.raises(UsageError, match=r"^batch = 0: "):
            session.batches([1], batch=0)
        with pytest.raises(UsageError, match=r"^timeout_s = -1: "):
            session.poll(-1)
        with pytest.raises(UsageError, match=r"^tokens = -1: "):
            session.report_heldout(1.0, -1)
        with pytest.raises(UsageError, match=r"^drain_s = -1: "):
            session.close(drain_s=-1)


# --- leaving ----------------------------------------------------------------------------------------------


def _io_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "anabranch I/O"]


def reasons(run: Bench) -> list[str]:
    return [event["reason"] for event in run.tape("gone")]


async def test_leaving_the_block_says_farewell(run_url: str, run_name: str) -> None:
    def visit(run: Bench) -> None:
        with Session(run.url, tiny(), name="w") as session:
            assert session.versions() == [0, 0]

    async with bench(run_url, spec_of(run_name)) as run:
        await asyncio.to_thread(visit, run)
        await wait_until(lambda: reasons(run) == ["w left: done"], "the farewell is read")
    assert not _io_threads()


async def test_an_error_in_the_block_is_the_reason(run_url: str, run_name: str) -> None:
    text = "boom " * 500  # longer than a message takes

    def visit(run: Bench) -> None:
        with Session(run.url, tiny(), name="w"):
            raise ValueError(text)

    async with bench(run_url, spec_of(run_name)) as run:
        with pytest.raises(ValueError, match="boom"):
            await asyncio.to_thread(visit, run)
        await wait_until(lambda: len(reasons(run)) == 1, "the farewell is read")
        assert reasons(run)[0].startswith("w left: ValueError: boom")


async def test_closing_twice_does_no_harm(run_url: str, run_name: str) -> None:
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "w", tiny()) as session:
        await asyncio.to_thread(session.close, "first")
        await asyncio.to_thread(session.close, "second")
        await wait_until(lambda: reasons(run) == ["w left: first"], "one farewell")


async def test_closing_books_every_token(run_url: str, run_name: str) -> None:
    model = tiny()
    async with bench(run_url, spec_of(run_name)) as run:
        async with joined(run, "w", model) as session:
            await train_until(session, model, run, 2)
        await wait_until(lambda: bool(run.state.departed), "its books are closed")
        books = run.state.departed[0]
        assert books.lost == 0
        assert books.processed == pytest.approx(books.applied + books.rejected + books.discarded)
        assert books.applied > 0


def test_closing_while_no_run_has_begun_ends_at_once(run_url: str) -> None:
    session = Session(run_url, torch.nn.Linear(2, 2), name="early")
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(session.start)
        wait_until_sync(lambda: session._loop is not None, "the background thread waits for the run")
        thread = session._thread
        session.close()
        assert thread is not None
        assert not thread.is_alive()
        assert isinstance(starting.exception(timeout=PATIENCE_S), UsageError)


# --- a shared dataset -------------------------------------------------------------------------------------


async def test_two_loops_share_a_dataset(run_url: str, run_name: str) -> None:
    """Each item goes to one of them, and the run stops when all of them are settled."""
    spec = spec_of(run_name, data={"epochs": 1, "range_items": 16})
    tokens = np.arange(4 * 400 + 1, dtype=np.int64)
    seen: list[int] = []

    def loop(session: Session, model: torch.nn.Module) -> None:
        for batch in session.batches(TokenWindows(tokens, 4, "ab" * 16), batch=3):
            assert 1 <= batch.inputs.shape[0] <= 3
            seen.extend(int(row[0]) for row in batch.inputs)
            train_step(session, model)

    async with bench(run_url, spec) as run:
        one, two = tiny(), tiny()
        async with joined(run, "one", one) as first, joined(run, "two", two) as second:
            await asyncio.gather(asyncio.to_thread(loop, first, one), asyncio.to_thread(loop, second, two))
            assert "epochs are done" in (first.stopped or "")
        assert not run.tape("redone")
        assert run.state.counts.get("ledger mismatches", 0) == 0
    assert len(seen) == len(set(seen)) == 399


async def test_a_loop_with_another_dataset_is_told_so(run_url: str, run_name: str) -> None:
    async with bench(run_url, spec_of(run_name)) as run:
        one, two = tiny(), tiny()
        async with joined(run, "one", one) as first, joined(run, "two", two) as second:
            first_batches = first.batches(TokenWindows(np.arange(500), 4, "ab" * 16))
            await asyncio.to_thread(next, first_batches)
            batches = second.batches(TokenWindows(np.arange(500), 4, "cd" * 16))
            with pytest.raises(UsageError, match="every worker needs the same copy"):
                await asyncio.to_thread(next, batches)


async def test_data_of_ones_own_is_passed_on(run_url: str, run_name: str) -> None:
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "w", tiny()) as session:
        assert list(session.batches([1, 2, 3])) == [1, 2, 3]
        assert run.state.data is None


async def test_a_joiner_warms_up_again(run_url: str, run_name: str) -> None:
    async with bench(run_url, spec_of(run_name)) as run:
        first, second = tiny(), tiny()
        async with joined(run, "first", first) as one:
            assert one.warmth == 1.0, "with the run, everybody's optimizer is new"
            await train_until(one, first, run, 1)
            async with joined(run, "second", second) as two:
                warmth = []
                for _ in range(21):
                    warmth.append(two.warmth)
                    train_step(two, second)
                assert warmth == sorted(warmth)
                assert warmth[0] == 0.05
                assert warmth[-1] == 1.0
