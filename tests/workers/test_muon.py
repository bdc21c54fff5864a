"""The optimizer Muon: against singular values, torch's own, AdamW, and with whatever a loop may hand it."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import anabranch
from anabranch.errors import UsageError
from anabranch.workers import muon
from anabranch.workers.muon import Muon, orthogonal

SHAPES = [(3, 16, 64), (2, 64, 16), (2, 24, 24), (4, 1, 5), (4, 5, 1), (1, 1, 1)]  # count, rows, columns
HALF = [torch.bfloat16, torch.float16]


def gradients_for(parameters: list[torch.nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def parameter(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Parameter:
    generator = torch.Generator().manual_seed(seed)
    return torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))


def net() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(9, 6), torch.nn.Linear(6, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 6),
        torch.nn.Linear(6, 9),
    )  # fmt: skip


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        items = torch.randint(9, (16,), generator=generator)
        loss: Any = torch.nn.functional.cross_entropy(model(items).float(), (items + 1) % 9)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def equal(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters(), strict=True))


# --- the iteration ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_the_singular_values_come_near_one_and_the_vectors_stay(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, v = torch.linalg.svd(matrices, full_matrices=False)
    found = u.mT @ orthogonal(matrices) @ v.mT  # diagonal
    values = found.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found, torch.diag_embed(values), rtol=0, atol=1e-4)
    clear = s > 0.01 * s.square().sum(1, keepdim=True).sqrt()
    assert bool((values[clear] > 0.65).all())
    assert bool((values < 1.25).all())
    for factor in (1e-3, 1e5):
        torch.testing.assert_close(orthogonal(factor * matrices), orthogonal(matrices), rtol=0, atol=1e-4)


@pytest.mark.parametrize("spread", [1e0, 1e-3, 1e-8, 0.0])
def test_both_ways_of_iterating_give_the_same(spread: float) -> None:
    """However small half of the singular values are."""
    u, _, v = torch.linalg.svd(
        torch.randn(2, 24, 96, generator=torch.Generator().manual_seed(2)), full_matrices=False
    )
    s = torch.cat([torch.ones(12), torch.full((12,), spread)])
    x = (u * s) @ v
    x = x / x.norm(dim=(1, 2), keepdim=True)
    exact = muon._iterated(x.double()).float()
    torch.testing.assert_close(muon._in_gram_space(x), exact, rtol=0, atol=1e-4)
    torch.testing.assert_close(muon._iterated(x), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF])
def test_zeros_stay_zeros_in_any_type(dtype: torch.dtype) -> None:
    made = orthogonal(torch.zeros(2, 3, 7, dtype=dtype))
    assert made.dtype == dtype
    assert not made.any()
    assert bool(orthogonal(torch.eye(3, dtype=dtype).repeat(2, 1, 3)).norm() > 1.5)


def test_what_accelerators_compute_is_the_same_in_bfloat16() -> None:
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(3))
    half = muon._iterated((x / x.norm(dim=(1, 2), keepdim=True)).bfloat16()).float()
    torch.testing.assert_close(half, orthogonal(x), rtol=0, atol=0.03)


# --- steps ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has none before 2.9")
@pytest.mark.parametrize("shape", [(8, 32), (32, 8), (12, 12)])
def test_matrices_step_as_torchs_muon_does(shape: tuple[int, int]) -> None:
    """To the rounding of the bfloat16 that it iterates in."""
    ours, theirs = [parameter(*shape, seed=n) for n in range(3)], [parameter(*shape, seed=n) for n in range(3)]
    rate, steps = 0.01, 5
    one = Muon(ours, lr=rate)
    other: torch.optim.Optimizer = torch.optim.Muon(
        theirs, lr=rate, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(steps):
        gradients_for(ours, step)
        gradients_for(theirs, step)
        one.step()
        other.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0.03 * rate * 0.2 * math.sqrt(max(shape)) * steps)
        torch.testing.assert_close(one.state[p]["momentum_buffer"], other.state[q]["momentum_buffer"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_all_else_steps_as_adamw_does(dtype: torch.dtype) -> None:
    ours, theirs = [parameter(5, 4, dtype=dtype), parameter(3, dtype=dtype)], [parameter(5, 4), parameter(3)]
    theirs = [torch.nn.Parameter(p.detach().to(dtype)) for p in theirs]
    one = Muon([{"params": ours, "matrices": False}], lr=0.01, betas=(0.9, 0.98))
    other = torch.optim.AdamW(theirs, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1, fused=True)
    for step in range(4):
        gradients_for(ours, step)
        gradients_for(theirs, step)
        one.step()
        other.step()
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("shape", [(64, 64), (16, 256), (256, 16)])
def test_a_step_is_as_long_as_adamws(shape: tuple[int, int]) -> None:
    p = parameter(*shape)
    before = p.detach().clone()
    optimizer = Muon([p], lr=1.0, weight_decay=0.0)
    gradients_for([p], 0)
    optimizer.step()
    assert float((p.detach() - before).square().mean().sqrt()) == pytest.approx(0.2, rel=0.25)


def test_matrices_of_one_shape_do_not_touch_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are iterated at once."""
    together, alone = ([parameter(4, 8, seed=n) for n in range(5)] for _ in range(2))
    gradients_for(together, 0)
    gradients_for(alone, 0)
    Muon(together).step()
    monkeypatch.setattr(muon, "_AT_ONCE", 40)
    Muon(alone).step()
    for p, q in zip(together, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)


def test_a_convolutions_weight_is_a_matrix() -> None:
    conv, flat = parameter(6, 3, 2, 2), parameter(6, 3, 2, 2)
    flat = torch.nn.Parameter(flat.detach().flatten(1))
    tall, last = parameter(16, 1, 3, 3), parameter(6, 3, 2, 2)
    last.data = last.data.to(memory_format=torch.channels_last)
    gradients_for([conv], 0)
    gradients_for([last], 0)
    gradients_for([tall], 0)
    assert conv.grad is not None
    flat.grad = conv.grad.flatten(1)
    for p in (conv, flat, tall, last):
        Muon([p]).step()
    assert torch.equal(conv.flatten(1), flat)
    torch.testing.assert_close(last, conv, rtol=0, atol=1e-7)
    assert not torch.equal(tall, parameter(16, 1, 3, 3))


@pytest.mark.parametrize("matrices", [True, False])
def test_without_a_gradient_a_parameter_stays_and_with_zeros_it_decays(matrices: bool) -> None:
    without, zeros, empty = parameter(3, 4), parameter(3, 4), parameter(0, 4)
    zeros.grad, empty.grad = torch.zeros(3, 4), torch.zeros(0, 4)
    optimizer = Muon([without, zeros, empty], lr=0.5, weight_decay=0.1, matrices=matrices)
    optimizer.step()
    assert torch.equal(without, parameter(3, 4))
    torch.testing.assert_close(zeros.detach(), 0.95 * parameter(3, 4).detach())
    assert set(optimizer.state) == {zeros}


@pytest.mark.parametrize("matrices", [True, False])
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_averaged_in_float32_and_rounded_once(dtype: torch.dtype, matrices: bool) -> None:
    """Even where a square would be zero in fp16."""
    half, whole = parameter(4, 8, dtype=dtype), torch.nn.Parameter(parameter(4, 8, dtype=dtype).detach().float())
    mine, exact = (Muon([p], lr=0.1, weight_decay=0.0, matrices=matrices) for p in (half, whole))
    gradient = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)).mul(1e-4).to(dtype)
    half.grad, whole.grad = gradient, gradient.float()
    mine.step()
    exact.step()
    assert torch.equal(half, whole.to(dtype))
    again = Muon([half], matrices=matrices)
    again.load_state_dict(copy.deepcopy(mine.state_dict()))
    for key, value in mine.state[half].items():
        assert value.dtype == torch.float32
        assert torch.equal(value, exact.state[whole][key])
        assert torch.equal(value, again.state[half][key])
        assert again.state[half][key].dtype == torch.float32


def test_a_closure_is_called_with_gradients_on() -> None:
    p = parameter(3, 4)
    optimizer = Muon([p])

    def closure() -> Any:
        optimizer.zero_grad()
        loss: Any = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) == parameter(3, 4).square().sum()
    assert not torch.equal(p, parameter(3, 4))


def test_rates_may_be_tensors_and_schedulers_work() -> None:
    p = parameter(3, 4)
    optimizer = Muon([p], lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    gradients_for([p], 0)
    optimizer.step()
    schedule.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    optimizer.param_groups[0]["lr"] = torch.tensor(0.0)
    before = p.detach().clone()
    optimizer.step()
    assert torch.equal(p, before)


# --- a model's optimizer ----------------------------------------------------------------------------------


def test_of_a_model_makes_groups_and_learns() -> None:
    model = net()
    optimizer = anabranch.Muon.of(model, lr=0.02, weight_decay=0.2, momentum=0.9)
    assert type(optimizer) is Muon
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [({names[id(p)] for p in g["params"]}, g["matrices"], g["weight_decay"]) for g in optimizer.param_groups]
    ones = {"1.bias", "2.weight", "2.bias", "3.bias", "4.bias"}
    assert groups == [
        ({"1.weight", "3.weight"}, True, 0.2), ({"0.weight", "4.weight"}, False, 0.2), (ones, False, 0.0)
    ]  # fmt: skip
    assert {(g["lr"], g["momentum"]) for g in optimizer.param_groups} == {(0.02, 0.9)}
    losses = train(model, optimizer, 60)
    assert losses[-1] < 0.1 * losses[0]
    kept = [t for state in optimizer.state.values() for key, t in state.items() if key != "step"]
    assert optimizer.state_bytes == sum(t.numel() * t.element_size() for t in kept) == 4 * (72 + 2 * (108 + 33))


def test_without_one_kind_of_parameter_there_is_no_group_of_it() -> None:
    assert len(Muon.of(torch.nn.Linear(3, 3, bias=False)).param_groups) == 1
    assert [g["matrices"] for g in Muon.of(torch.nn.Embedding(3, 3)).param_groups] == [False]


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    model = net()
    optimizer = Muon.of(model, lr=0.02)
    train(model, optimizer, 3)
    other = net()
    other.load_state_dict(model.state_dict())
    again = Muon.of(other)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for where in ((model, optimizer), (other, again)):
        train(*where, steps=3, seed=1)
    assert equal(model, other)
    assert again.param_groups[0]["lr"] == 0.02
    third = copy.deepcopy(again)
    assert str(third.state_dict()) == str(again.state_dict())


def test_the_state_of_another_optimizer_is_refused() -> None:
    p = parameter(3, 4)
    optimizer = Muon([p])
    with pytest.raises(UsageError, match=r"has no matrices, momentum in its parameter groups: .* fresh optimizer"):
        optimizer.load_state_dict(torch.optim.AdamW([p]).state_dict())
    gradients_for([p], 0)
    optimizer.step()


def test_a_group_may_be_added_later() -> None:
    optimizer = Muon([parameter(3, 4)], lr=0.1)
    bias = parameter(3)
    optimizer.add_param_group({"params": [bias], "matrices": False, "weight_decay": 0.0})
    assert optimizer.param_groups[1]["lr"] == 0.1
    gradients_for([bias], 0)
    optimizer.step()
    assert not torch.equal(bias, parameter(3))
    with pytest.raises(UsageError, match=r"shape \[3\] in a group with matrices = True: .*Muon\.of\(model\)"):
        optimizer.add_param_group({"params": [parameter(3)]})
    assert len(optimizer.param_groups) == 2


# --- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lr": -1.0}, r"lr = -1\.0: allowed is a number, at least 0"),
        ({"lr": float("nan")}, "lr = nan: allowed is"),
        ({"momentum": 1.0}, r"momentum = 1\.0: allowed is a number, at least 0 and below 1"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] = 1\.0: allowed is a number, at least 0 and below 1"),
        ({"betas": 0.9}, r"betas = 0\.9: allowed are two numbers"),
        ({"eps": "small"}, "eps = 'small': allowed is a number, at least 0"),
        ({"weight_decay": -0.1}, r"weight_decay = -0\.1: allowed is a number, at least 0"),
        ({"matrices": 1}, r"matrices = 1: allowed is True \(Muon\) or False \(AdamW\)"),
    ],
)
def test_a_bad_value_is_named(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Muon([parameter(3, 4)], **settings)


@pytest.fixture
def mesh(tmp_path: Any) -> Iterator[Any]:
    """Of one process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("matrices", [True, False])
def test_complex_and_sharded_parameters_are_refused(matrices: bool, mesh: Any) -> None:
    with pytest.raises(UsageError, match=r"shape \[3, 4\] is complex: .* torch\.view_as_real"):
        Muon([torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.complex64))], matrices=matrices)
    sharded = torch.nn.Parameter(DTensor.from_local(torch.zeros(3, 4), mesh))
    with pytest.raises(UsageError, match=r"is a DTensor .* use DistributedDataParallel"):
        Muon([sharded], matrices=matrices)


def test_a_sparse_gradient_is_refused_before_anything_moves() -> None:
    table = torch.nn.Embedding(5, 4, sparse=True)
    p = parameter(3, 4)
    optimizer = Muon([{"params": [p]}, {"params": [table.weight], "matrices": False}])
    gradients_for([p], 0)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match=r"gradient of a parameter of shape \[5, 4\] is sparse: .*sparse=False"):
        optimizer.step()
    assert torch.equal(p, parameter(3, 4))
    assert not optimizer.state


def test_the_same_steps_give_the_same_bits() -> None:
    made: list[torch.nn.Module] = []
    for _ in range(2):
        model = net()
        train(model, Muon.of(model, lr=0.02), 5)
        made.append(model)
    assert equal(*made)
