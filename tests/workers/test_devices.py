"""Choosing a device: the best there is, or exactly the one asked for."""

from __future__ import annotations

import pytest
import torch

from anabranch.errors import UsageError
from anabranch.workers import devices
from anabranch.workers.devices import choose_device, describe


def only(monkeypatch: pytest.MonkeyPatch, *kinds: str) -> None:
    monkeypatch.setattr(devices, "_available", lambda kind: kind in kinds)


@pytest.mark.parametrize(
    ("available", "chosen"),
    [((), "cpu"), (("cuda",), "cuda"), (("mps",), "mps"), (("xpu", "mps"), "mps"), (("xpu", "cuda"), "cuda")],
)
def test_auto_takes_the_first_that_is_there(
    monkeypatch: pytest.MonkeyPatch, available: tuple[str, ...], chosen: str
) -> None:
    only(monkeypatch, *available)
    assert choose_device().type == chosen


def test_the_processor_can_always_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "cuda")
    assert choose_device("cpu") == torch.device("cpu")


def test_a_numbered_device_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "cuda")
    assert choose_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize("wish", ["cuda", "mps", "xpu", "cuda:3"])
def test_a_device_that_is_not_there_names_those_that_are(monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    only(monkeypatch)
    with pytest.raises(UsageError, match=rf"--device '{wish}': torch .* does not see one here; available: cpu$"):
        choose_device(wish)


@pytest.mark.parametrize("wish", ["gpu", "", "cuda:x", "cpu cpu"])
def test_an_unknown_device_is_refused(wish: str) -> None:
    with pytest.raises(UsageError, match="unknown; allowed: auto, cpu, cuda"):
        choose_device(wish)


def test_what_the_page_shows() -> None:
    assert describe(torch.device("cpu")) == f"cpu, {torch.get_num_threads()} thread"
    assert describe(torch.device("mps")) == "mps"


def test_what_torch_lacks_is_not_available() -> None:
    assert not devices._available("no such backend")
