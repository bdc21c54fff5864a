"""Every example does what it says, against a real run."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import anabranch
from anabranch.model import unflatten
from anabranch.spec import RunSpec
from anabranch.workers.run import Ending, MemberOptions, run_worker
from anabranch.workers.sample import sample_checkpoint
from anabranch.workers.tensors import trainable
from tests.harness import Bench, bench, make_spec, process
from tests.wait import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
NANO = "custom_task:NanoTask"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--tee", "3")


def spec_of(run: str, task: str = NANO, **sections: Any) -> RunSpec:
    """Nobody here dies: whatever else the machine does, nobody is to be thought dead while torch begins."""
    return make_spec(run, task={"name": task, "options": {}}, workers={"heartbeat_s": 5.0}, **sections)


def global_model(run: Bench) -> dict[str, Any]:
    """Name to value, as the synchronizer has them."""
    vault = run.synchronizer.vault
    assert vault is not None
    assert vault.layout is not None
    return unflatten(vault.layout, [version.theta for version in vault.versions])


@contextmanager
def in_process(name: str) -> Iterator[Any]:
    """An example as a module."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield import_module(name)
    finally:
        sys.path.remove(str(EXAMPLES))


@contextmanager
def example(*command: str) -> Iterator[subprocess.Popen[str]]:
    """An example as a process of its own; killed at the end of the block if it still runs."""
    child = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)},
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


async def output(child: subprocess.Popen[Any], timeout_s: float = 60) -> str:
    """What it said, once it has ended well."""
    said = await asyncio.to_thread(child.communicate, timeout=timeout_s)
    text: str = said[0] if isinstance(said[0], str) else said[0].decode()
    assert child.returncode == 0, text
    return text


@pytest.mark.slow
async def test_the_loop_learns_and_an_evaluator_measures_and_samples_it(
    run_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nanogpt_loop.py trains, `anabranch evaluator` follows it with custom_task.py, `anabranch sample` writes."""
    async with bench(run_url, spec_of(run_name), directory=tmp_path, drain_s=60.0) as run:
        with (
            example(str(EXAMPLES / "nanogpt_loop.py"), run_url) as loop,
            process(
                "evaluator", run_url, "--name", "e", "--every-s", "0.1", "--prompt", "def ",
                environment={"PYTHONPATH": str(EXAMPLES)},
            ) as evaluator,
        ):  # fmt: skip
            await wait_until(lambda: {m.role for m in run.state.members.values()} == {"worker", "evaluator"}, "both")
            await run.reach(15)
            await wait_until(lambda: len(run.state.heldout) >= 3, "it is measured")
            await run.command("stop")
            said = await output(loop)
            watched = await output(evaluator)
        first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", said).groups())  # type: ignore[union-attr]
        assert last < first - 0.5
        losses = [loss for _, loss in run.state.heldout]
        assert min(losses[1:]) < losses[0]
        assert "the global model continues 'def '" in watched
        assert run.state.counts.get("ledger mismatches", 0) == 0
    monkeypatch.syspath_prepend(str(EXAMPLES))
    text = sample_checkpoint(tmp_path, "def ", 20, 0.8, 1)
    assert text.startswith("def ")
    assert len(text) > 10


async def test_a_custom_task_trains_on_what_the_run_hands_out(run_url: str, run_name: str) -> None:
    """`anabranch worker` with custom_task.py. Its model and the plain loop's are the same, as the layout tells."""
    async with bench(run_url, spec_of(run_name)) as run:
        with in_process("nanogpt_loop") as nanogpt_loop:
            ending = Ending()
            worker = asyncio.create_task(asyncio.to_thread(run_worker, run.url, MemberOptions(name="w"), ending))
            await run.reach(2)
            model = nanogpt_loop.NanoGPT()
            loop = await asyncio.to_thread(anabranch.join, run.url, model, name="loop")
            loop.step(tokens=1, loss=torch.ones((), requires_grad=True))  # as it comes out of a loop
            await asyncio.to_thread(loop.close)
            ending.reason = "test"
            await worker
        assert dict(model.named_parameters()).keys() == global_model(run).keys()
        await wait_until(lambda: any(b.applied > 0 for b in run.state.departed), "its work was merged")
        assert run.state.data is not None, "it asked for ranges"
        assert run.state.counts.get("ledger mismatches", 0) == 0


@pytest.mark.slow
async def test_a_torchrun_island_is_one_worker(run_url: str, run_name: str, tmp_path: Path) -> None:
    async with bench(run_url, spec_of(run_name)) as run:
        with example(
            *TORCHRUN,
            str(EXAMPLES / "ddp_island.py"), run_url, "--name", "island", "--save", str(tmp_path),
        ) as island:  # fmt: skip
            await run.reach(4)
            assert [m.name for m in run.state.members.values()] == ["island"]
            await run.command("stop")
            said = await output(island)
        assert "rank 0: " in said
        assert "rank 1: " in said
        zero, one = (torch.load(tmp_path / f"rank{rank}.pt") for rank in (0, 1))
        assert zero.keys() == one.keys() == global_model(run).keys()
        assert all(torch.equal(zero[name], one[name]) for name in zero)
        await wait_until(lambda: bool(run.state.departed), "its books are closed")
        assert run.state.departed[0].applied > 0
        assert run.state.counts.get("ledger mismatches", 0) == 0


# --- Hugging Face ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # by PEFT
async def test_trainers_under_torchrun_with_adapters_are_one_worker(
    run_url: str, run_name: str, tmp_path: Path
) -> None:
    """hf_trainer.py --lora on two ranks: only adapters are in the layout, and tokens of both ranks count."""
    model = tmp_path / "model"
    with in_process("hf_trainer") as hf_trainer:
        hf_trainer.make_tiny_model(model, hf_trainer.text_of(None))
        base = hf_trainer.AutoModelForCausalLM.from_pretrained(model)
        joiner = hf_trainer.with_adapters(base, seed=5)
    async with bench(run_url, spec_of(run_name, task="hf")) as run:
        with example(
            *TORCHRUN, str(EXAMPLES / "hf_trainer.py"), run_url, "--model", str(model), "--lora", "--steps", "20"
        ) as trainer:
            await output(trainer)
        await wait_until(lambda: bool(run.state.departed), "its books are closed")
        [books] = run.state.departed
        assert books.processed == 2 * 20 * 2 * 8 * 31, "ranks × steps × micro-batches × rows × predictions"
        assert books.applied > 0
        names = set(global_model(run))
        assert names
        assert all(".lora_A." in name or ".lora_B." in name for name in names)
        await run.settle()
        later = await asyncio.to_thread(anabranch.join, run.url, joiner, name="later")
        await asyncio.to_thread(later.close)
        there = global_model(run)
        for name, parameter in trainable(joiner):
            assert torch.equal(parameter.detach(), torch.from_numpy(there[name].copy())), name
        assert run.state.counts.get("ledger mismatches", 0) == 0
