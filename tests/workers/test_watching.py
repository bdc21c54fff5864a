"""What becomes of a model after it joined."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from anabranch.workers.watching import Watch, warn_of_staying


def model_of() -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 1))
    model[0].requires_grad_(False)
    return model


def unfreeze(model: torch.nn.Sequential) -> None:
    model[0].requires_grad_(True)


def replace(model: torch.nn.Sequential) -> None:
    model[2].weight = torch.nn.Parameter(torch.zeros(1, 4))


def add(model: torch.nn.Sequential) -> None:
    model.append(torch.nn.Linear(1, 1, bias=False))


def remove(model: torch.nn.Sequential) -> None:
    del model[2]


CHANGES: list[tuple[Callable[[torch.nn.Sequential], object], str]] = [
    (unfreeze, "2 parameters are trained here since the session joined, but not synchronized: 0.weight, 0.bias; "),
    (add, "1 parameters are trained here since the session joined, but not synchronized: 3.weight; "),
    (replace, "1 parameters are replaced by other objects since the session joined: the new ones are not synchr"),
    (remove, "2 parameters are no longer in the model, but still synchronized: 2.weight, 2.bias; "),
    (torch.nn.Module.half, "4 parameters are of another dtype than when the session joined"),
]


@pytest.mark.parametrize(("change", "words"), CHANGES)
def test_a_change_is_named_once(
    caplog: pytest.LogCaptureFixture, change: Callable[[torch.nn.Sequential], object], words: str
) -> None:
    model = model_of()
    watch = Watch(model, every_s=0)
    watch.look()
    assert not caplog.records
    change(model)
    watch.look()
    watch.look()
    [record] = caplog.records
    assert record.getMessage().startswith(words)


def test_what_is_frozen_later_or_wrapped_is_nothing_to_speak_of(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    watch = Watch(torch.nn.DataParallel(model), every_s=0)
    model[1].requires_grad_(False)
    model.to("cpu")
    watch.look()
    assert not caplog.records


def test_running_averages_that_stay_are_named_when_a_session_joins(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2), torch.nn.InstanceNorm2d(2))
    names = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert not warn_of_staying(model, names, trains=True)
    assert not warn_of_staying(model_of(), (), trains=True)
    assert not caplog.records
    assert warn_of_staying(model, (), trains=True) == set(names)
    assert warn_of_staying(model, names[:1], trains=False) == set(names[1:])
    worker, evaluator = caplog.records
    assert worker.getMessage().startswith(
        "3 buffers are changed by training and do not travel (merge.buffers says which do): 1.running_mean, 1.ru"
    )
    assert "each worker keeps its own" in worker.getMessage()
    assert "not the run's model" in evaluator.getMessage()


@pytest.mark.parametrize("inplace", [False, True])
def test_other_buffers_are_named_once_they_change(caplog: pytest.LogCaptureFixture, inplace: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("mean", torch.zeros(2))
    model.register_buffer("still", torch.zeros(2))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    model.register_buffer("travels", torch.zeros(2))
    watch = Watch(model, ["travels"], every_s=0)
    caplog.clear()  # of the running averages
    model(torch.randn(4, 2))
    for name in ("mean", "cache", "travels"):
        if inplace:
            model.get_buffer(name).add_(1)
        else:
            setattr(model, name, torch.ones(2))
    watch.look()
    watch.look()
    [record] = caplog.records
    assert record.getMessage().startswith(
        "1 buffers are changed by training and do not travel (merge.buffers says which do): mean; each worker"
    )


def test_counters_and_what_was_named_are_nobodys_business(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.register_buffer("seen", torch.zeros(2, dtype=torch.int64))
    watch = Watch(model, (), every_s=0)
    assert len(caplog.records) == 1, "running averages that stay are named when it begins"
    for name in ("seen", "1.running_mean", "1.num_batches_tracked"):
        model.get_buffer(name).add_(1)
    watch.look()
    assert len(caplog.records) == 1


def test_it_looks_now_and_then_only(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    watch = Watch(model, every_s=1000)
    unfreeze(model)
    watch.look()
    assert not caplog.records
