"""What a run needs on a device, and the batch that makes the most of it."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from anabranch.errors import UsageError
from anabranch.shuffle import Indices
from anabranch.spec import parse_spec
from anabranch.workers import fit
from anabranch.workers.fit import Speedometer, choose_batch, memory_needed
from anabranch.workers.muon import Muon
from anabranch.workers.shards import TokenWindows
from anabranch.workers.tasks.base import SharedTask
from anabranch.workers.tasks.gpt import GPTTask

SMALL = {"layers": 1, "width": 16, "heads": 2, "context": 16, "batch": 3}


@pytest.fixture
def task(tmp_path_factory: pytest.TempPathFactory) -> GPTTask:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("all work and no play " * 400)
    return GPTTask({**SMALL, "data": str(folder)})


def test_the_built_in_task_has_a_shared_dataset(task: GPTTask) -> None:
    assert isinstance(task, SharedTask)
    assert task.dataset().batch(np.array([0, 1, 2]), 0).inputs.shape == (3, 16)


@pytest.mark.parametrize(
    ("adoption", "codec", "offload", "words"),
    [
        ("overwrite", "bf16", False, "adds 4 bytes per parameter"),
        ("blend", "bf16", False, "adoption 'blend' is on the device"),
        ("rebase", "bf16", False, "on the device, and 2 on the host for what is in flight"),
        ("rebase", "fp32", True, "adds 0 bytes per parameter"),
    ],
)
def test_what_a_policy_adds_is_said(adoption: str, codec: str, offload: bool, words: str) -> None:
    model = torch.nn.Linear(1000, 1000)
    model.bias.requires_grad_(False)
    settings = parse_spec({"workers": {"adoption": adoption, "codec": codec}}).workers
    line = memory_needed(model, settings, offload_base=offload)
    assert "1,000,000 parameters are trained together: model 4.0 MB, gradients 4.0 MB, optimizer about 8.0 MB" in line
    assert words in line


def test_muon_keeps_one_buffer_of_a_matrix() -> None:
    model = torch.nn.Linear(1000, 1000)
    settings = parse_spec({}).workers
    assert "optimizer about 4.0 MB" in memory_needed(model, settings, Muon.of(model))
    model.bias.requires_grad_(False)
    assert "optimizer about 8.0 MB" in memory_needed(model, settings, torch.optim.AdamW([model.weight]))


def test_a_number_or_what_the_task_says(task: GPTTask) -> None:
    model = task.build_model()
    assert choose_batch(task, model, None) == 3
    assert choose_batch(task, model, "7") == 7
    for wish in ("0", "-1", "many", "1.5"):
        with pytest.raises(UsageError, match=r"--batch .*: a number of items per step, or auto"):
            choose_batch(task, model, wish)


def test_probing_leaves_the_model_as_it_was(task: GPTTask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "PROBE_S", 0.01)
    model = task.build_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.random.get_rng_state()
    assert choose_batch(task, model, "auto") >= 1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())


class Tight(TokenWindows):
    """Batches above `most` items do not fit into memory."""

    most = 1

    def batch(self, indices: Indices, epoch: int) -> object:  # type: ignore[override]
        if indices.size > self.most:
            raise torch.OutOfMemoryError("out of memory")
        return super().batch(indices, epoch)


def test_what_does_not_fit_is_not_chosen(
    task: GPTTask, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fit, "PROBE_S", 0.01)
    shards = Tight(np.arange(1600) % 256, 16, "ab" * 8)
    monkeypatch.setattr(task, "dataset", lambda: shards)
    with caplog.at_level(logging.INFO):
        assert choose_batch(task, task.build_model(), "auto") == 1
    assert "2 items do not fit" in caplog.text
    shards.most = 0
    with pytest.raises(UsageError, match="not even one item fits"):
        choose_batch(task, task.build_model(), "auto")


def test_of_two_speeds_alike_the_smaller_batch_is_taken() -> None:
    assert fit._best(iter([(1, 100.0), (2, 200.0), (4, 204.0), (8, 205.0), (16, 999.0)]))[0] == 2
    assert fit._best(iter([(1, 100.0), (2, 90.0), (4, 90.0), (8, 300.0)]))[0] == 1, "two sizes without a gain: enough"
    assert fit._best(iter([(1, 100.0), (2, 101.0)]))[0] == 1


def test_the_speed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    speed = Speedometer()
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            speed.step(8)
    assert caplog.text.count("tokens/s") == 1
