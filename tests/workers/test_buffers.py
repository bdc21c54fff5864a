"""Running averages of batch normalisation, from a training loop to an exported model, with a real synchronizer."""

from __future__ import annotations

import asyncio
import itertools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as load_torch_file

from anabranch.queue.url import RunUrl
from anabranch.workers.evaluator import evaluate, heldout_loss
from anabranch.workers.export import ExportOptions, export_checkpoint
from anabranch.workers.sample import load_checkpoint_model
from anabranch.workers.session import Session
from tests.harness import Bench, bench, make_spec
from tests.tiny_task import TinyBatch, TinyTask
from tests.wait import wait_until
from tests.workers.test_session import joined, parameters, run_model, spec_of

NORM = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
TINY = "tests.workers.test_buffers:NormTask"


def normed(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))


def first_layer(model: torch.nn.Sequential) -> torch.nn.Linear:
    layer = model[0]
    assert isinstance(layer, torch.nn.Linear)
    return layer


def buffers(model: torch.nn.Module) -> dict[str, NDArray[Any]]:
    return {name: buffer.numpy().copy() for name, buffer in model.named_buffers()}


def counted(model: torch.nn.Module) -> int:
    return int(model.get_buffer(NORM[2]))


def step(session: Session, model: torch.nn.Module, seed: int, tokens: int, shift: float = 0.0) -> None:
    """Forward in training mode: the weights stay, the running averages move."""
    with torch.no_grad():
        model(torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)) + shift)
    session.step(tokens)


def same(run: Bench, model: torch.nn.Module) -> bool:
    held, ours = run_model(run), buffers(model)
    return all(np.allclose(held[name], ours[name], rtol=1e-5, atol=1e-6) for name in NORM)


class NormTask(TinyTask):
    """Its loss is how far the running mean is from zero."""

    def build_model(self, device: torch.device | str = "cpu") -> torch.nn.Module:
        return normed(5)

    def loss(self, model: torch.nn.Module, batch: TinyBatch) -> torch.Tensor:
        return model.get_buffer("1.running_mean").abs().sum()


@pytest.mark.parametrize("codec", ["bf16", "fp16"])
async def test_alone_a_workers_averages_become_the_runs(run_url: str, run_name: str, codec: str) -> None:
    """Exactly, whatever the codec and the outer step: an average of one is that one."""
    first = normed()
    spec = spec_of(run_name, workers={"codec": codec}, merge={"outer_lr": 0.5, "outer_momentum": 0.9})
    async with bench(run_url, spec) as run:
        async with joined(run, "a", first) as session:
            assert same(run, first)
            seeds = itertools.count()

            def counts() -> bool:
                step(session, first, next(seeds), tokens=8, shift=3.0)
                return counted(first) > 300  # more than bfloat16 can tell apart

            await wait_until(counts, "it has trained on so many batches")

            def merged() -> bool:
                session.step(8)
                return same(run, first)

            await wait_until(merged, "the averages are the run's")
        assert run_model(run)["1.running_mean"].any()
        second = normed(1)
        async with joined(run, "b", second):
            assert same(run, second)
            assert counted(second) == counted(first)
            assert second.get_buffer(NORM[2]).dtype == torch.int64


async def test_two_workers_averages_are_weighted_by_tokens(run_url: str, run_name: str) -> None:
    """Their means go to different places; who trains on nine times the tokens a step is nearer to the result."""
    light, heavy = normed(), normed()
    with torch.no_grad():
        for model in (light, heavy):
            first_layer(model).weight.zero_()
    async with (
        bench(run_url, spec_of(run_name, rounds={"quorum": 2})) as run,
        joined(run, "light", light) as a,
        joined(run, "heavy", heavy) as b,
    ):

        def trained() -> bool:
            for session, model, bias, tokens in ((a, light, 1.0, 4), (b, heavy, -1.0, 36)):
                with torch.no_grad():
                    first_layer(model).bias.fill_(bias)  # what the norm sees
                    model(torch.zeros(8, 3))
                session.step(tokens)
            return min(run.versions()) >= 12

        await wait_until(trained, "both contribute")
        assert {len(event["weights"]) for event in run.tape("merged")} == {2}
        means = run_model(run)["1.running_mean"]
        assert (means < -0.5).all(), means
        assert (means > -1).all(), means


async def test_the_evaluator_measures_with_the_runs_averages(run_url: str, run_name: str) -> None:
    model, measured = normed(), list[float]()
    task = NormTask({})
    watching = task.build_model()

    def watch(url: RunUrl) -> None:
        with Session(url, watching, name="judge", role="evaluator") as judge:
            evaluate(judge, task, watching, every_s=0.01, ending=lambda: measured[-1:] > [0.1], on_measured=note)

    def note() -> None:
        measured.append(heldout_loss(task, watching, task.heldout_batches()))

    async with bench(run_url, spec_of(run_name)) as run, joined(run, "a", model) as session:
        judging = asyncio.create_task(asyncio.to_thread(watch, run.url))
        await wait_until(lambda: measured, "version 0 is measured")

        def told() -> bool:
            step(session, model, 3, tokens=8, shift=5.0)
            return judging.done()

        await wait_until(told, "the averages were taken over")
        await judging
        await wait_until(lambda: run.state.heldout and run.state.heldout[-1][1] > 0.1, "and told")
    assert measured[0] == 0.0


async def test_the_option_leaves_them_out(run_url: str, run_name: str, caplog: pytest.LogCaptureFixture) -> None:
    first, second = normed(), normed(1)
    caplog.set_level(logging.WARNING, "anabranch.worker")
    async with bench(run_url, spec_of(run_name, merge={"buffers": []})) as run, joined(run, "a", first) as session:
        assert not run_model(run).keys() & set(NORM)
        step(session, first, 1, tokens=8, shift=3.0)
        async with joined(run, "b", second):
            assert not second.get_buffer(NORM[0]).any()
    said = [record.getMessage() for record in caplog.records if "merge.buffers" in record.getMessage()]
    assert len(said) == 2, said


async def test_they_are_in_checkpoints_and_exports(run_url: str, run_name: str, tmp_path: Path) -> None:
    """Exported, loaded strictly, and as version 0 of another run, from a file with another order of its tensors."""
    model = normed()
    spec = make_spec(run_name, task={"name": TINY, "options": {}})
    async with bench(run_url, spec, directory=tmp_path) as run:
        async with joined(run, "a", model) as session:
            seeds = itertools.count()

            def merged() -> bool:
                step(session, model, next(seeds), tokens=8, shift=3.0)
                return min(run.versions()) >= 2

            await wait_until(merged, "the averages moved")

            def still() -> bool:
                session.step(8)
                return same(run, model)

            await wait_until(still, "the averages are the run's")
        await run.command("checkpoint")
        await wait_until(lambda: list(tmp_path.glob("checkpoints/*/manifest.json")), "it is saved")
    export_checkpoint(tmp_path, tmp_path / "out", ExportOptions(format="safetensors"))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["1.num_batches_tracked"].dtype == np.int64
    other = normed(2)
    other.load_state_dict(load_torch_file(tmp_path / "out" / "model.safetensors"), strict=True)
    assert counted(other) == counted(model)
    _, loaded = load_checkpoint_model(tmp_path)
    for name in NORM:
        np.testing.assert_allclose(loaded.get_buffer(name).numpy(), buffers(model)[name], rtol=1e-5, atol=1e-6)
    save_file({**written, "mask": np.ones(3, np.bool_)}, tmp_path / "again.safetensors")
    spec = spec_of(f"{run_name}-again", merge={"buffers": ["*"]})
    async with bench(f"{run_url}-again", spec, init=tmp_path / "again.safetensors") as run:
        await run.reach(0)
        third = normed(3)
        async with joined(run, "a", third):
            assert same(run, third)
            assert set(parameters(third)) | set(NORM) == set(run_model(run))
