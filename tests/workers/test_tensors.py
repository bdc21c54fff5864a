"""Which tensors of a model a run synchronizes, and how buffers are written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anabranch.errors import UsageError
from anabranch.spec import MergeSpec, parse_spec
from anabranch.workers.tensors import Buffer, buffers_of, layout_of
from anabranch.workers.torch_store import TorchStore

RUNNING = {"1.running_mean": "statistic", "1.running_var": "statistic", "1.num_batches_tracked": "counter"}
OWN = {"mean": "statistic", "seen": "counter"}


def model_of() -> torch.nn.Sequential:
    """Batch normalisation, and buffers of its own: two that travel, three that never do."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    model.register_buffer("mean", torch.zeros(2, dtype=torch.float64))
    model.register_buffer("seen", torch.zeros((), dtype=torch.int32))
    model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    model.register_buffer("empty", torch.zeros(0))
    return model


def norm_of(model: torch.nn.Sequential) -> torch.nn.BatchNorm1d:
    norm = model[1]
    assert isinstance(norm, torch.nn.BatchNorm1d)
    return norm


def there(model: torch.nn.Module, name: str) -> torch.Tensor:
    return model.get_buffer(name)


@pytest.mark.parametrize(
    ("settings", "frozen", "expected"),
    [
        (MergeSpec(), False, OWN | RUNNING),
        (MergeSpec(), True, RUNNING),
        (MergeSpec(buffers=()), False, {}),
        (MergeSpec(buffers=("*",)), True, OWN | RUNNING),
        (MergeSpec(buffers=("1.*", "se?n")), False, {"seen": "counter", **RUNNING}),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_which_buffers_travel(settings: MergeSpec, frozen: bool, expected: dict[str, str], *, wrapped: bool) -> None:
    model = model_of()
    model[0].requires_grad_(not frozen)
    found = buffers_of(torch.nn.DataParallel(model) if wrapped else model, settings)
    assert {name: buffer.kind for name, buffer in found.items()} == expected


def test_masks_and_marks_stay_unless_they_are_named() -> None:
    model = model_of()
    model.register_buffer("triangle", torch.full((3, 3), -torch.inf).triu(1))
    there(model, "1.running_var").fill_(torch.nan)  # an accident, and everybody's layout has it
    assert buffers_of(model, MergeSpec()).keys() == (OWN | RUNNING).keys()
    assert "triangle" in buffers_of(model, MergeSpec(buffers=("tri*",)))


def test_a_shared_buffer_travels_once_and_one_without_values_is_refused() -> None:
    model = model_of()
    norm_of(model).register_buffer("again", there(model, "mean"))
    assert "1.again" not in buffers_of(model, MergeSpec())
    model.register_buffer("mean", torch.zeros(2, device="meta"))
    with pytest.raises(UsageError, match="buffer 'mean' is on the meta device"):
        buffers_of(model, MergeSpec())
    lazy = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.LazyBatchNorm1d(affine=False))
    with pytest.raises(UsageError, match=r"buffer '1\.running_mean' has no shape yet"):
        buffers_of(lazy, MergeSpec())


def holding(value: torch.Tensor) -> tuple[torch.nn.Module, Buffer]:
    model = torch.nn.Linear(1, 1)
    model.register_buffer("it", value)
    return model, buffers_of(model, MergeSpec())["it"]


@pytest.mark.parametrize(
    ("held", "value", "expected"),
    [
        (torch.tensor([1.5], dtype=torch.float64), 2.25, 2.25),
        (torch.tensor([0.1], dtype=torch.float64), float(np.float32(0.1)), 0.1),  # float32 cannot tell them apart
        (torch.tensor([3]), 7.4, 7),
        (torch.tensor([3]), 7.6, 8),
        (torch.tensor([3], dtype=torch.uint8), 300.0, 255),
        (torch.tensor([2**40 + 1]), float(np.float32(2**40 + 1)), 2**40 + 1),
    ],
)
def test_a_value_is_put_in_the_buffers_dtype(held: torch.Tensor, value: float, expected: float) -> None:
    model, buffer = holding(held.clone())
    buffer.put(torch.tensor([value], dtype=torch.float32))
    assert there(model, "it").dtype == held.dtype
    assert there(model, "it").item() == expected


def test_a_buffer_is_followed_where_it_is() -> None:
    """A module may put another tensor there; one of another shape is nothing that the run knows."""
    model, buffer = holding(torch.zeros(2))
    model.register_buffer("it", torch.ones(2))
    assert buffer.value is there(model, "it")
    buffer.put(torch.full((2,), 3.0))
    assert there(model, "it").tolist() == [3, 3]
    model.register_buffer("it", torch.ones(3))
    gone = buffer.value is None
    assert gone
    buffer.put(torch.full((2,), 4.0))
    assert there(model, "it").tolist() == [1, 1, 1]


SPEC = parse_spec({"rounds": {"fragments": 1, "inner_steps": 4}})


def store_of(model: torch.nn.Module) -> tuple[TorchStore, dict[str, slice]]:
    buffers = buffers_of(model, SPEC.merge)
    layout = layout_of(SPEC, model, buffers)
    [fragment] = layout.fragments
    return TorchStore(model, layout, buffers), {t.name: slice(start, stop) for t, start, stop in fragment.segments}


def test_what_training_changes_in_buffers_is_in_the_delta() -> None:
    model = model_of()
    store, at = store_of(model)
    first = store.initial(0)
    store.load(0, first)
    assert not store.delta(0).any()
    model(torch.randn(8, 3, generator=torch.Generator().manual_seed(1)))
    delta = store.delta(0)
    np.testing.assert_allclose(
        delta[at["1.running_mean"]], first[at["1.running_mean"]] - there(model, "1.running_mean").numpy(), rtol=1e-6
    )
    assert delta[at["1.running_var"]].all()
    assert delta[at["1.num_batches_tracked"]] == -1
    assert not delta[at["0.weight"]].any()
    norm_of(model).running_mean = torch.zeros(7)  # nothing that the run knows
    assert not store.delta(0)[at["1.running_mean"]].any()
    assert not store.initial(0)[at["1.running_mean"]].any()


@pytest.mark.parametrize("policy", ["load", "blend", "rebase"])
def test_buffers_are_overwritten_under_any_policy(policy: str) -> None:
    """A rebased variance could end below zero."""
    model = model_of()
    store, at = store_of(model)
    theta = store.initial(0)
    store.load(0, theta)
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1)
    model(torch.randn(8, 3))
    there(model, "1.running_var").fill_(float("nan"))  # no reason to give up the weights that were kept
    theta = theta.copy()
    theta[at["1.running_var"]], theta[at["1.num_batches_tracked"]] = 0.25, 41.6
    if policy == "load":
        store.load(0, theta)
    elif policy == "blend":
        assert store.blend(0, theta, 0.5)
    else:
        assert store.rebase(0, theta, None)
    assert there(model, "1.running_var").tolist() == [0.25] * 4
    assert norm_of(model).num_batches_tracked == 42
    delta = store.delta(0)
    assert bool(delta[at["0.weight"]].any()) == (policy != "load")
    assert not any(delta[at[name]].any() for name in RUNNING)


def test_of_a_buffer_that_is_not_there_nothing_is_sent() -> None:
    model = model_of()
    store, at = store_of(model)
    theta = store.initial(0).copy()
    theta[at["mean"]] = 2.0
    store.load(0, theta)
    model.register_buffer("mean", torch.ones(3, dtype=torch.float64))
    assert not store.delta(0)[at["mean"]].any()
