"""A torch model, fragment by fragment."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from anabranch.errors import UsageError
from anabranch.merge.fragments import Layout
from anabranch.model import Float32, layout_for
from anabranch.spec import parse_spec
from anabranch.workers.tensors import shapes, trainable
from anabranch.workers.torch_store import TorchStore

SPEC = parse_spec({"rounds": {"fragments": 2, "inner_steps": 4}})


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2)).to(dtype)


def store_of(model: torch.nn.Module) -> tuple[TorchStore, Layout]:
    layout = layout_for(SPEC, shapes(model))
    return TorchStore(model, layout), layout


def random(size: int, seed: int = 1) -> Float32:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_delta_is_base_minus_theta() -> None:
    model = model_of()
    store, layout = store_of(model)
    theta = [random(fragment.size, fragment.index) for fragment in layout.fragments]
    for fragment in layout.fragments:
        store.load(fragment.index, theta[fragment.index])
        np.testing.assert_array_equal(store.delta(fragment.index), np.zeros(fragment.size))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.25)
    for fragment in layout.fragments:
        live = store.initial(fragment.index)
        np.testing.assert_array_equal(store.delta(fragment.index), theta[fragment.index] - live)
        np.testing.assert_allclose(store.delta(fragment.index), 0.25, rtol=1e-5)


def test_every_parameter_gets_its_own_part() -> None:
    model = model_of()
    store, layout = store_of(model)
    named = dict(model.named_parameters())
    for fragment in layout.fragments:
        theta = random(fragment.size)
        store.load(fragment.index, theta)
        for tensor, start, stop in fragment.segments:
            loaded = named[tensor.name].detach().numpy()
            np.testing.assert_array_equal(loaded, theta[start:stop].reshape(tensor.shape))


def test_loading_one_fragment_leaves_the_others_alone() -> None:
    model = model_of()
    store, layout = store_of(model)
    before = store.initial(1)
    store.load(0, random(layout.fragments[0].size))
    np.testing.assert_array_equal(store.initial(1), before)


def test_the_base_is_a_copy_of_what_was_loaded() -> None:
    store, layout = store_of(model_of())
    theta = random(layout.fragments[0].size)
    theta.flags.writeable = False  # as it comes from the codec
    store.load(0, theta)
    store.delta(0)[:] = 9.0
    np.testing.assert_array_equal(store.delta(0), np.zeros_like(theta))


def test_a_delta_does_not_change_with_the_parameters() -> None:
    model = model_of()
    store, layout = store_of(model)
    store.load(0, random(layout.fragments[0].size))
    delta = store.delta(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    np.testing.assert_array_equal(delta, np.zeros_like(delta))


def test_half_precision_parameters_travel_as_float32() -> None:
    model = model_of(torch.bfloat16)
    store, layout = store_of(model)
    theta = random(layout.fragments[0].size)
    store.load(0, theta)
    assert next(model.parameters()).dtype == torch.bfloat16
    rounded = torch.from_numpy(theta).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(store.initial(0), rounded)
    assert store.delta(0).dtype == np.float32


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("what", ["load", "blend", "rebase"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_what_was_only_adopted_is_no_delta(dtype: torch.dtype, what: str, offload: bool) -> None:
    model = model_of(dtype)
    layout = layout_for(SPEC, shapes(model))
    store = TorchStore(model, layout, offload_base=offload)
    theta = random(layout.fragments[0].size)
    store.load(0, random(layout.fragments[0].size, 2) if what == "rebase" else theta)
    assert what != "blend" or store.blend(0, theta, 0.0)
    assert what != "rebase" or store.rebase(0, theta, None)
    np.testing.assert_array_equal(store.initial(0), torch.from_numpy(theta).to(dtype).float().numpy())
    np.testing.assert_array_equal(store.delta(0), np.zeros_like(theta))


def test_what_was_trained_in_half_precision_is_the_delta_and_nothing_else() -> None:
    model = model_of(torch.bfloat16)
    store, layout = store_of(model)
    theta = random(layout.fragments[0].size) + 4.6
    store.load(0, theta)
    before = store.initial(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.5)
    np.testing.assert_array_equal(store.delta(0), before - store.initial(0))


def test_small_steps_of_a_double_are_in_the_delta() -> None:
    model = model_of(torch.float64)
    store, layout = store_of(model)
    store.load(0, np.ones(layout.fragments[0].size, np.float32))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1e-12)
    np.testing.assert_allclose(store.delta(0), 1e-12, rtol=1e-3)


@pytest.mark.parametrize(
    ("parameter", "words"),
    [
        (torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64)), r"'odd' is complex64, .*torch\.view_as_real"),
        (torch.nn.Parameter(torch.zeros(2, device="meta")), "'odd' is on the meta device"),
        (torch.nn.UninitializedParameter(), "'odd' has no shape yet: run one batch"),
    ],
)
def test_a_parameter_that_cannot_be_carried_is_refused_by_name(parameter: torch.nn.Parameter, words: str) -> None:
    model = model_of()
    model.register_parameter("odd", parameter)
    with pytest.raises(UsageError, match=words):
        shapes(model)


def test_a_parameter_of_no_elements_is_left_out() -> None:
    model = model_of()
    expected = shapes(model)
    model.register_parameter("empty", torch.nn.Parameter(torch.zeros(0, 3)))
    assert shapes(model) == expected
    store, layout = store_of(model)
    store.load(0, random(layout.fragments[0].size))


def test_half_precision_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    store_of(model_of())
    assert not caplog.records
    store_of(model_of(torch.bfloat16))
    assert "6 parameters are in half precision (0.weight …)" in caplog.text


def test_a_transposed_parameter_is_taken_in_logical_order() -> None:
    model = model_of()
    weight = model.get_parameter("0.weight")
    weight.data = torch.arange(15.0).reshape(3, 5).t()  # not contiguous
    store, layout = store_of(model)
    fragment = next(f for f in layout.fragments if any(t.name == "0.weight" for t in f.tensors))
    start, stop = next((a, b) for t, a, b in fragment.segments if t.name == "0.weight")
    np.testing.assert_array_equal(store.initial(fragment.index)[start:stop].reshape(5, 3), weight.detach().numpy())
    theta = random(fragment.size)
    store.load(fragment.index, theta)
    np.testing.assert_array_equal(weight.detach().numpy(), theta[start:stop].reshape(5, 3))


def test_a_shared_tensor_is_listed_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(7, 3)
            self.head = torch.nn.Linear(3, 7, bias=False)
            self.head.weight = self.embed.weight

    assert shapes(Tied()) == [("embed.weight", (7, 3))]


def test_frozen_parameters_stay_out() -> None:
    model = model_of()
    model.get_parameter("0.weight").requires_grad_(False)
    assert "0.weight" not in dict(trainable(model))


def test_a_model_without_anything_to_train_is_refused() -> None:
    model = model_of()
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="requires_grad=True"):
        shapes(model)


def test_gradients_and_optimizer_state_are_kept() -> None:
    model = model_of()
    store, layout = store_of(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    gradient = model.get_parameter("0.weight").grad
    assert gradient is not None
    before = gradient.clone()
    for fragment in layout.fragments:
        store.load(fragment.index, random(fragment.size))
    assert torch.equal(gradient, before)
    assert model.get_parameter("0.weight").requires_grad
    assert len(optimizer.state) == len(list(model.parameters()))


# --- adoption policies, against the plain formulas --------------------------------------------------------


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("what", ["blend", "rebase", "rebase after a refusal"])
def test_policies_are_the_formulas(what: str, offload: bool) -> None:
    model = model_of()
    layout = layout_for(SPEC, shapes(model))
    store = TorchStore(model, layout, offload_base=offload)
    base, new = random(layout.fragments[0].size, 3), random(layout.fragments[0].size, 4)
    store.load(0, base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    live, delta = store.initial(0), store.delta(0)
    sent = (delta * np.float32(0.5)).astype(np.float32)
    if what == "blend":
        assert store.blend(0, new, 0.25)
        expected = 0.25 * live + 0.75 * new
    else:
        assert store.rebase(0, new, sent if what == "rebase" else None)
        expected = new + (live - base) + (sent if what == "rebase" else 0)
    np.testing.assert_allclose(store.initial(0), expected, atol=1e-6)
    np.testing.assert_allclose(store.delta(0), new - expected, atol=1e-6)


def test_parameters_that_are_not_finite_are_left_as_they_are() -> None:
    model = model_of()
    store, layout = store_of(model)
    base = random(layout.fragments[0].size)
    store.load(0, base)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("inf"))
    assert not store.rebase(0, base, None)
    assert not store.blend(0, base, 0.5)
    assert np.isinf(store.initial(0)).all()
