"""The byte-level GPT: shapes, determinism, learning, sampling, loading, and its options."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch

from anabranch.errors import CheckpointError, SpecError
from anabranch.spec import parse_spec
from anabranch.workers.muon import Muon
from anabranch.workers.sample import load_checkpoint_model, sample_checkpoint
from anabranch.workers.tasks.base import CosineSchedule, Task
from anabranch.workers.tasks.gpt import GPT, GPTTask, generate
from tests.saved import memory_url, save_model

SMALL = {"width": 32, "layers": 2, "heads": 2, "context": 32, "batch": 4, "warmup_tokens": 0, "learning_rate": 1e-2}


@pytest.fixture
def small() -> tuple[GPTTask, GPT]:
    task = GPTTask(SMALL)
    torch.manual_seed(1)
    return task, task.build_model()


def heldout_loss(task: Task, model: torch.nn.Module) -> float:
    with torch.no_grad():
        losses = [task.loss(model, batch).item() for batch in task.heldout_batches()]
    return sum(losses) / len(losses)


def train(task: Task, model: torch.nn.Module, steps: int) -> None:
    optimizer = task.build_optimizer(model)
    tokens = 0
    for batch in itertools.islice(task.batches(1, "a"), steps):
        for group in optimizer.param_groups:
            group["lr"] = task.learning_rate(tokens)
        optimizer.zero_grad()
        task.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        tokens += batch.tokens


def test_the_default_model_has_about_a_million_parameters_in_many_tensors() -> None:
    model = GPTTask().build_model()
    parameters = list(model.parameters())
    assert 0.8e6 < sum(parameter.numel() for parameter in parameters) < 1.3e6
    assert len(parameters) >= 24
    assert all(parameter.requires_grad for parameter in parameters)


def test_a_fresh_model_knows_nothing() -> None:
    task = GPTTask()
    torch.manual_seed(0)
    assert heldout_loss(task, task.build_model()) == pytest.approx(math.log(256), abs=0.1)


def test_a_seed_gives_the_same_model_and_the_same_data() -> None:
    task = GPTTask(SMALL)
    torch.manual_seed(7)
    first = task.build_model().state_dict()
    torch.manual_seed(7)
    second = task.build_model().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    batch, again = next(task.batches(3, "a")), next(task.batches(3, "a"))
    assert torch.equal(batch.inputs, again.inputs)
    for other in (next(task.batches(4, "a")), next(task.batches(3, "b"))):
        assert not torch.equal(batch.inputs, other.inputs)


def test_a_batch_asks_for_the_next_byte() -> None:
    batch = next(GPTTask(SMALL).batches(0, "a"))
    assert batch.inputs.shape == (4, 32)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert batch.tokens == 4 * 32


def test_no_byte_sees_a_later_one(small: tuple[GPTTask, GPT]) -> None:
    _, model = small
    inputs = torch.randint(0, 256, (1, 32))
    changed = inputs.clone()
    changed[0, 20] = (changed[0, 20] + 1) % 256
    before, after = model(inputs), model(changed)
    assert before.shape == (1, 32, 256)
    assert torch.allclose(before[0, :20], after[0, :20], atol=1e-6)
    assert not torch.allclose(before[0, 20:], after[0, 20:], atol=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_lowers_the_held_out_loss(optimizer: str) -> None:
    task = GPTTask({**SMALL, "optimizer": optimizer})
    torch.manual_seed(1)
    model = task.build_model()
    before = heldout_loss(task, model)
    train(task, model, 40)
    assert heldout_loss(task, model) < before - 1.2


def test_the_option_chooses_the_optimizer(small: tuple[GPTTask, GPT]) -> None:
    _, model = small
    plain = GPTTask({**SMALL, "optimizer": "adamw"}).build_optimizer(model)
    assert type(plain) is torch.optim.AdamW
    chosen = GPTTask({**SMALL, "optimizer": "muon", "beta2": 0.9, "weight_decay": 0.2}).build_optimizer(model)
    assert type(chosen) is Muon
    found = [(g["matrices"], len(g["params"]), g["betas"], g["weight_decay"]) for g in chosen.param_groups]
    assert found == [(True, 8, (0.9, 0.9), 0.2), (False, 4, (0.9, 0.9), 0.2), (False, 5, (0.9, 0.9), 0.0)]


def test_held_out_batches_are_fixed() -> None:
    first, second = GPTTask(SMALL).heldout_batches(), GPTTask(SMALL).heldout_batches()
    assert len(first) == len(second) >= 1
    assert all(torch.equal(a.inputs, b.inputs) for a, b in zip(first, second, strict=True))


def test_the_schedule_warms_up_and_then_falls() -> None:
    schedule = CosineSchedule(peak=1.0, floor=0.1, warmup_tokens=100, total_tokens=1100)
    assert schedule.at(0) == pytest.approx(0.05)
    assert schedule.at(50) == pytest.approx(0.5)
    assert schedule.at(100) == pytest.approx(1.0)
    assert schedule.at(600) == pytest.approx(0.55)
    assert schedule.at(1100) == schedule.at(10**12) == pytest.approx(0.1)
    falling = [schedule.at(tokens) for tokens in range(100, 1200, 50)]
    assert falling == sorted(falling, reverse=True)
    task = GPTTask()
    assert task.learning_rate(task.config.warmup_tokens) == pytest.approx(task.config.learning_rate)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wdith": 3}, r"task\.options\.wdith = 3 is unknown: the task gpt knows batch, .*width"),
        ({"width": "wide"}, r"task\.options\.width = 'wide' is not of type int"),
        ({"layers": True}, r"task\.options\.layers = True is not of type int"),
        ({"width": 100, "heads": 3}, r"task\.options\.width = 100: it must be a multiple of 2 × heads = 6"),
        ({"batch": 0}, r"task\.options\.batch = 0: it must be at least 1"),
        ({"learning_rate": float("nan")}, r"task\.options\.learning_rate = nan"),
        ({"optimizer": "sgd"}, r"task\.options\.optimizer = 'sgd': it must be one of adamw, muon"),
        ({"beta2": 1}, r"task\.options\.beta2 = 1\.0: it must be at least 0, below 1"),
    ],
)
def test_an_impossible_option_is_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        GPTTask(options)


def test_sampling_repeats_with_its_seed(small: tuple[GPTTask, GPT]) -> None:
    task, model = small
    text = generate(model, task.config, b"def main" * 9, 24, temperature=1.0, seed=5)
    assert len(text) == 24
    assert text == generate(model, task.config, b"def main" * 9, 24, temperature=1.0, seed=5)
    assert text != generate(model, task.config, b"def main" * 9, 24, temperature=1.0, seed=6)
    greedy = generate(model, task.config, b"", 4, temperature=0.0, seed=1)
    assert greedy == generate(model, task.config, b"", 4, temperature=0.0, seed=2)


async def checkpoint(where: str | Path, model: GPT, task_spec: dict[str, object]) -> str:
    """A checkpoint as a run would write it; its location."""
    spec = parse_spec({"task": task_spec, "rounds": {"fragments": 2}})
    return await save_model(where, spec, {name: p.detach().numpy() for name, p in model.named_parameters()})


async def test_a_checkpoint_gives_the_same_model(tmp_path: Path, small: tuple[GPTTask, GPT]) -> None:
    task, model = small
    for where in (str(tmp_path), memory_url()):
        location = await checkpoint(where, model, {"name": "gpt", "options": SMALL})
        for named in (location, where):
            loaded_task, loaded = load_checkpoint_model(named)
            assert loaded_task.config == task.config
            for ours, theirs in zip(model.parameters(), loaded.parameters(), strict=True):
                assert torch.equal(ours, theirs)
    assert heldout_loss(loaded_task, loaded) == heldout_loss(task, model)
    assert sample_checkpoint(location, "def ", 4, 0.0, 1).startswith("def ")


async def test_an_unusable_checkpoint_is_explained(tmp_path: Path, small: tuple[GPTTask, GPT]) -> None:
    _, model = small
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        load_checkpoint_model(tmp_path)
    cases: list[tuple[dict[str, object], str]] = [
        ({"name": "resnet"}, "'resnet'"),
        ({"name": "gpt", "options": {**SMALL, "layers": 3}}, r"lacks tensor 'blocks\.2"),
        ({"name": "gpt", "options": {**SMALL, "width": 64}}, "has shape"),
    ]
    for number, (task_spec, message) in enumerate(cases):
        location = await checkpoint(tmp_path / str(number), model, task_spec)
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint_model(location)
    (Path(location) / "theta.safetensors").write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match=r"theta\.safetensors has 7 bytes"):
        load_checkpoint_model(location)
