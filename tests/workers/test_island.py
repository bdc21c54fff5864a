"""Several processes as one worker: real ranks over gloo, a real synchronizer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import anabranch
from anabranch.spec import RunSpec
from anabranch.workers.island import Island, _Others, share_of
from anabranch.workers.muon import Muon
from anabranch.workers.session import Session
from anabranch.workers.tensors import shapes
from anabranch.workers.trains import Trains
from tests.harness import Bench, bench, make_spec
from tests.ranks import Ranks, moments, started, tiny
from tests.wait import wait_until
from tests.workers.test_session import joined
from tests.workers.test_warm_start import adamw, optimize, stepping, warm_up


@pytest.fixture(scope="module")
def troupe() -> Iterator[list[tuple[Ranks, ExitStack]]]:
    """Where `ranks` keeps its processes from test to test."""
    kept: list[tuple[Ranks, ExitStack]] = []
    yield kept
    for _, stack in kept:
        stack.close()


@pytest.fixture
def ranks(troupe: list[tuple[Ranks, ExitStack]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes that play the tests' scenes one after the other; new ones after a test that left a scene."""
    if not troupe:
        stack = ExitStack()
        troupe.append((stack.enter_context(started(tmp_path_factory.mktemp("ranks"))), stack))
    yield troupe[0][0]
    if not troupe[0][0].resting:
        troupe.pop()[1].close()


def spec_of(run: str, **sections: Any) -> RunSpec:
    return make_spec(run, task={"name": "x:Y", "options": {}}, **sections)


def members(run: Bench) -> list[str]:
    return [member.name for member in run.state.members.values()]


def losses(run: Bench) -> list[float]:
    return [member.loss for member in run.state.members.values() if member.loss is not None]


async def departed(run: Bench) -> Any:
    await wait_until(lambda: bool(run.state.departed), "the island's books are closed")
    return run.state.departed[-1]


@pytest.mark.slow
async def test_two_ranks_are_one_worker_with_equal_bits(run_url: str, run_name: str, ranks: Ranks) -> None:
    async with bench(run_url, spec_of(run_name)) as run:
        ranks.begin("train", run_url, tokens=400)
        await wait_until(lambda: losses(run), "it tells its loss")
        assert members(run) == ["island"]
        assert losses(run) == [pytest.approx((3 * 1 + 4 * 2) / 7)], "a mean over tokens: 3 of loss 1, 4 of loss 2"
        zero, one = [await asyncio.to_thread(ranks.result, rank) for rank in (0, 1)]
        vault = run.synchronizer.vault
        assert vault is not None
        assert vault.layout is not None
        assert next(tensor.name for tensor in vault.layout.tensors) == "0.bias", "as without DDP"
        assert (zero["kind"], one["kind"]) == ("Island", "Island")
        assert zero["name"] == one["name"] == "island"
        for moment in ("begun", "after", "tokens", "steps", "warmth"):
            assert zero[moment] == one[moment], moment
        assert zero["after"] != zero["begun"]
        books = await departed(run)
        assert books.processed == 7 * zero["steps"], "tokens of both ranks: 3 and 4 a step"
        assert books.applied > 0
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_an_island_joins_a_run_that_is_under_way(run_url: str, run_name: str, ranks: Ranks) -> None:
    """Rank 0 adopts, everybody gets it; what a resting rank 0 adopts reaches the others, too."""
    async with bench(run_url, spec_of(run_name)) as run:
        await ranks.play("train", run_url, tokens=100, name="first")
        zero, one = await ranks.play("train", run_url, tokens=300, name="second", duty=0.3)
        assert zero["begun"] == one["begun"]
        assert zero["begun"] not in (zero["before"], one["before"])
        assert zero["after"] == one["after"]
        assert run.state.counts.get("ledger mismatches", 0) == 0


async def test_running_averages_reach_all_ranks(run_url: str, run_name: str, ranks: Ranks) -> None:
    """DDP gives all ranks those of rank 0 with each forward; an island does it when it adopts."""
    async with bench(run_url, spec_of(run_name)) as run:
        await ranks.play("train", run_url, tokens=100, name="first", norm=True)
        vault = run.synchronizer.vault
        assert vault is not None
        assert vault.layout is not None
        kinds = {tensor.name: tensor.kind for tensor in vault.layout.tensors if tensor.is_buffer}
        assert kinds == {
            "1.num_batches_tracked": "counter", "1.running_mean": "statistic", "1.running_var": "statistic"
        }  # fmt: skip
        zero, one = await ranks.play("train", run_url, tokens=200, name="second", norm=True)
        assert zero["begun"] == one["begun"]
        assert zero["begun"] not in (zero["before"], one["before"])


@pytest.mark.parametrize("muon", [False, True])
async def test_all_ranks_begin_with_a_peers_optimizer_state(
    run_url: str, run_name: str, ranks: Ranks, muon: bool
) -> None:
    model = tiny(0)
    optimizer = Muon.of(model) if muon else adamw(model)
    optimize(model, optimizer, steps=5)
    async with bench(run_url, spec_of(run_name)) as run, joined(run, "first", model, optimizer=optimizer) as giver:
        await warm_up(run, giver, model)
        async with stepping(giver):
            results = await ranks.play("train", run_url, tokens=giver.tokens + 1, warm_start=True, muon=muon)
        for result in results:
            assert result["moments at first"] == moments(model, optimizer)
            assert result["warmth at first"] == 1.0


async def test_what_refuses_rank_0_is_raised_on_all_ranks(run_url: str, run_name: str, ranks: Ranks) -> None:
    async with bench(run_url, spec_of(run_name)):
        assert await ranks.play("join", run_url, hidden=[8, 8]) == [{}, {}]
        for result in await ranks.play("join", run_url, hidden=[9, 9]):
            assert result["error"] == "LayoutMismatch"
            assert "'0.bias' has shape (9,) here, (8,) in the run" in result["text"]


async def test_ranks_with_different_models_are_told_which_tensor(run_url: str, ranks: Ranks) -> None:
    zero, one = await ranks.play("join", run_url, hidden=[8, 9])
    assert zero["error"] == one["error"] == "IslandBroken"
    assert "('0.weight', (9, 4)) here, ('0.weight', (8, 4)) on rank 0" in one["text"]


async def test_a_sharded_model_is_refused_with_what_to_do(ranks: Ranks) -> None:
    for result in await ranks.play("join_sharded", "redis://127.0.0.1:1/0"):
        assert result["error"] == "UsageError"
        assert "'0.weight' is sharded over processes" in result["text"]
        assert "use DistributedDataParallel, or one process" in result["text"]


async def test_an_unusable_name_of_a_run_is_raised_on_all_ranks(ranks: Ranks) -> None:
    for result in await ranks.play("join", "redis://127.0.0.1:1/0?run=a b", hidden=[8, 8]):
        assert result["error"] == "UrlError"


async def test_data_of_ones_own_ends_with_the_first_rank_that_has_none(
    run_url: str, run_name: str, ranks: Ranks
) -> None:
    async with bench(run_url, spec_of(run_name)):
        zero, one = await ranks.play("own_batches", run_url, counts=[3, 5])
        assert zero == one == {"batches": [0, 1, 2], "stopped": None}


async def test_an_error_in_one_ranks_data_ends_all_ranks(run_url: str, run_name: str, ranks: Ranks) -> None:
    async with bench(run_url, spec_of(run_name)):
        zero, one = await ranks.play("own_batches", run_url, counts=[5, 2], broken=1)
        assert one == {"error": "OSError", "text": "the disk is gone"}
        assert zero["error"] == "IslandBroken"
        assert "data of another rank" in zero["text"]


async def test_the_end_of_the_run_ends_all_ranks_at_the_same_step(run_url: str, run_name: str, ranks: Ranks) -> None:
    async with bench(run_url, spec_of(run_name)) as run:
        ranks.begin("own_batches", run_url, counts=[10**9, 10**9])
        await run.reach(2)
        await run.command("stop")
        zero, one = [await asyncio.to_thread(ranks.result, rank) for rank in (0, 1)]
        assert zero["batches"] == one["batches"]
        assert zero["stopped"] == one["stopped"]
        assert zero["stopped"].startswith("stopped")


async def test_a_shared_dataset_is_shared_out_among_the_ranks(run_url: str, run_name: str, ranks: Ranks) -> None:
    """Each item once per epoch, whichever rank trains on it."""
    spec = spec_of(run_name, data={"range_items": 20, "epochs": 1})
    async with bench(run_url, spec):
        zero, one = await ranks.play("shared_batches", run_url, items=40, batch=2)
        assert sorted(zero["items"] + one["items"]) == list(range(40))
        assert len(zero["items"]) == len(one["items"]) == 20
        assert zero["stopped"] == one["stopped"] is not None


async def test_what_rank_0_adopts_while_it_waits_for_data_reaches_all_ranks_before_the_batch(
    run_url: str, run_name: str, ranks: Ranks
) -> None:
    """Or the ranks would take their next gradients at different points."""
    done = threading.Event()

    def train_meanwhile() -> None:
        model = tiny(0)
        with anabranch.join(run_url, model, name="other") as session:
            while not done.is_set():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(0.99)
                session.step(1)
                done.wait(0.005)

    async with bench(run_url, spec_of(run_name)):
        other = asyncio.create_task(asyncio.to_thread(train_meanwhile))
        try:
            zero, one = await ranks.play("waits", run_url, versions=2)
        finally:
            done.set()
            await other
        assert zero["moved"], "it adopted something meanwhile"
        assert zero == one


async def test_an_error_of_rank_0s_session_ends_all_ranks(run_url: str, run_name: str, ranks: Ranks) -> None:
    async with bench(run_url, spec_of(run_name)) as run:
        zero, one = await ranks.play("breaks", run_url)
        assert zero["error"] == "InjectedFault"
        assert (one["error"], one["text"]) == (
            "AnabranchError",
            "rank 0 of this island: InjectedFault: worker before upload",
        )
        await wait_until(lambda: bool(run.state.departed), "the run takes it for gone")


@pytest.mark.slow
async def test_a_rank_that_dies_takes_the_island_with_it(run_url: str, run_name: str, tmp_path: Path) -> None:
    async with bench(run_url, spec_of(run_name)) as run:
        with started(tmp_path) as ranks:
            ranks.begin("own_batches", run_url, counts=[10**9, 10**9])
            await run.reach(2)
            ranks.processes[1].kill()
            zero = await asyncio.to_thread(ranks.result, 0)
        assert zero["error"] == "IslandBroken"
        assert "start the island again" in zero["text"]
        await wait_until(lambda: bool(run.tape("gone")), "it has left")
        assert run.tape("gone")[0]["reason"].startswith("island left: IslandBroken")
        books = await departed(run)
        assert books.processed == pytest.approx(books.applied + books.rejected + books.discarded + books.lost)


@pytest.mark.parametrize(("items", "ranks"), [(4, 3), (3, 3), (7, 3), (2, 3), (1, 4), (6, 2)])
def test_a_batch_is_shared_out_to_the_last_item(items: int, ranks: int) -> None:
    indices = np.arange(100, 100 + items)
    parts = [share_of(indices, rank, ranks) for rank in range(ranks)]
    assert all(part.size >= 1 for part in parts), "a rank without a batch would hang the others"
    assert max(part.size for part in parts) - min(part.size for part in parts) <= 1
    assert sorted({int(index) for part in parts for index in part}) == indices.tolist()
    if items >= ranks:
        assert sum(part.size for part in parts) == items, "each once"


def test_a_peers_optimizer_state_is_for_all_ranks_or_for_none() -> None:
    others = _Others()
    assert others.may_take_over()
    others.took_over(memoryview(b"state"))
    assert others.begin() == b"state", "rank 0 had it before the others began: they get it, too"
    assert not others.may_take_over(), "one that comes later would be rank 0's alone"
    assert _Others().begin() is None


def test_wrappers_do_not_change_a_tensors_name() -> None:
    plain = tiny(0)
    names = shapes(plain)
    parts: list[Any] = [torch.compile(part, backend="eager") for part in tiny(0).children()]
    part_compiled = torch.nn.Sequential(*parts)
    for wrapped in (torch.nn.DataParallel(plain), torch.compile(plain, backend="eager"), part_compiled):
        assert shapes(cast("torch.nn.Module", wrapped)) == names
    odd = torch.nn.Module()
    odd.module = tiny(0)  # a model that happens to call its only part so
    assert [name for name, _ in shapes(odd)] == [f"module.{name}" for name, _ in names]


def test_an_island_has_every_method_of_a_session() -> None:
    """Of those that a training loop uses; it is no session itself."""
    used = {name for name in vars(Trains) if not name.startswith("_")} | {"__enter__", "__exit__"}
    assert {"step", "batches", "close"} <= used
    assert used <= set(vars(Island)) & set(vars(Session))
    assert not issubclass(Island, Session)


async def test_a_step_of_one_rank_that_cannot_be_counted_ends_the_island(
    run_url: str, run_name: str, ranks: Ranks
) -> None:
    async with bench(run_url, spec_of(run_name)):
        zero, one = await ranks.play("miscounts", run_url)
        assert one["error"] == "UsageError"
        assert one["text"].startswith("tokens = 0.5: allowed is a whole number, 1 to")
        assert zero["error"] == "IslandBroken"
