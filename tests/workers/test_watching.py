"""What becomes of a model after it joined."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from anabranch.workers.watching import Watch


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


def test_it_looks_now_and_then_only(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    watch = Watch(model, every_s=1000)
    unfreeze(model)
    watch.look()
    assert not caplog.records
