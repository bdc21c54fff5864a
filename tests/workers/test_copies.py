"""Second copies of the parameters, in optimizers as small as they can be."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from anabranch.errors import UsageError
from anabranch.workers.copies import Adopter, adopter_for
from anabranch.workers.muon import Muon
from anabranch.workers.optimizer_state import copy_state, load_state, pack

Parameters = Iterable[torch.nn.Parameter]


class Plain(torch.optim.Optimizer):
    """SGD with momentum, as anybody may write it."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def each(self) -> Iterable[tuple[torch.nn.Parameter, torch.Tensor, dict[str, Any]]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    yield parameter, parameter.grad.float() + group["weight_decay"] * parameter.float(), group

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter, gradient, group in self.each():
            buffer = self.state[parameter].setdefault("momentum", torch.zeros_like(gradient))
            parameter.sub_(group["lr"] * buffer.mul_(0.9).add_(gradient))


class ScheduleFree(Plain):
    """`z` takes the steps, the parameter follows between z and an average. It steps in its own mode only."""

    mode = "eval"

    def train(self) -> None:
        self.mode = "train"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.mode == "train"
        for parameter, gradient, group in self.each():
            state = self.state[parameter]
            z = state.setdefault("z", parameter.clone())
            state["step"] = state.get("step", 0) + 1
            parameter.lerp_(z, 1 / state["step"]).sub_(0.1 * group["lr"] * gradient)
            z.sub_(group["lr"] * gradient)


class Masters(Plain):
    """Parameters in half precision are written from float32 ones, which are kept as an attribute."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        self.masters = [p.detach().float().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for master, (parameter, gradient, group) in zip(self.masters, self.each(), strict=True):
            master.sub_(group["lr"] * gradient)
            parameter.copy_(master)


class GroupMasters(Masters):
    """… or in the groups."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        del self.masters
        for group in self.param_groups:
            group["masters"] = {n: p.detach().float().clone() for n, p in enumerate(group["params"])}

    @property
    def masters(self) -> list[torch.Tensor]:
        return [master for group in self.param_groups for master in group["masters"].values()]

    @masters.deleter
    def masters(self) -> None:
        del self.__dict__["masters"]

    @masters.setter
    def masters(self, value: list[torch.Tensor]) -> None:
        self.__dict__["masters"] = value


class Lookahead(Plain):
    """Every fifth step halfway back to slow weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter, gradient, group in self.each():
            state = self.state[parameter]
            slow = state.setdefault("slow", parameter.clone())
            state["step"] = state.get("step", 0) + 1
            parameter.sub_(group["lr"] * gradient)
            if state["step"] % 5 == 0:
                parameter.copy_(slow.lerp_(parameter, 0.5))


class Hidden(Plain):
    """A copy where nobody looks."""

    def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
        super().__init__(params, lr, weight_decay)
        kept = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.anchor: Callable[[], list[torch.Tensor]] = lambda: kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for kept, (parameter, gradient, group) in zip(self.anchor(), self.each(), strict=True):
            kept.sub_(group["lr"] * gradient)
            parameter.lerp_(kept, 0.3)


class NeedsMore(Masters):
    """Cannot be made from its settings alone."""

    def __init__(self, params: Any, scale: torch.Tensor) -> None:
        super().__init__(params)
        self.scale = scale


class NeedsClosure(Plain):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()


def model_of(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 1)).to(dtype)


def named(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    return dict(model.named_parameters())


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, *, gradients: bool = True) -> None:
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) if gradients else torch.zeros_like(p)
        optimizer.step()


def adopt(adopter: Adopter, model: torch.nn.Module, value: float) -> None:
    adopter.put((name, p, torch.full((p.numel(),), value)) for name, p in model.named_parameters())


Kind = Callable[[Parameters], torch.optim.Optimizer]
KINDS: list[tuple[Kind, torch.dtype]] = [
    (ScheduleFree, torch.float32), (Masters, torch.bfloat16), (GroupMasters, torch.bfloat16),
    (Masters, torch.float32), (Lookahead, torch.float32), (lambda p: NeedsMore(p, torch.ones(1)), torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize("before", [0, 7])
def test_what_is_adopted_lasts(kind: Kind, dtype: torch.dtype, before: int) -> None:
    model = model_of(dtype)
    optimizer = kind(model.parameters())
    adopter = adopter_for(named(model), optimizer, None)
    getattr(optimizer, "train", lambda: None)()
    train(model, optimizer, before)
    away = copy.deepcopy(model)
    adopt(adopter, model, 7.0)
    assert all(bool((p == 7.0).all()) for p in model.parameters())
    train(model, optimizer, 10, gradients=False)
    for p, there in zip(model.parameters(), away.parameters(), strict=True):
        # What it was about to do it does: no more than its distance from its own copies.
        torch.testing.assert_close(
            p.float(), torch.full_like(p.float(), 7.0), rtol=0, atol=0.1 if not before else 1.5
        )
        assert float((p.detach().float() - there.detach().float()).abs().mean()) > 4


def test_an_adoption_moves_a_copy_as_far_as_its_parameter() -> None:
    model = model_of()
    optimizer = ScheduleFree(model.parameters())
    adopter = adopter_for(named(model), optimizer, None)
    optimizer.train()
    train(model, optimizer, 3)
    distances = {p: optimizer.state[p]["z"] - p.detach() for p in model.parameters()}
    adopt(adopter, model, 7.0)
    for p, distance in distances.items():
        torch.testing.assert_close(optimizer.state[p]["z"] - p.detach(), distance, rtol=0, atol=1e-5)


def test_a_copy_that_is_not_finite_becomes_the_parameter() -> None:
    model = model_of()
    optimizer = ScheduleFree(model.parameters())
    adopter = adopter_for(named(model), optimizer, None)
    optimizer.train()
    train(model, optimizer, 1)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    adopt(adopter, model, 7.0)
    assert all(bool((optimizer.state[p]["z"] == 7.0).all()) for p in model.parameters())


@pytest.mark.parametrize("kind", [Plain, torch.optim.AdamW, torch.optim.SGD])
def test_averages_of_gradients_are_no_copies(kind: Kind) -> None:
    model = model_of()
    torch.nn.init.zeros_(model.get_parameter("2.weight"))  # equal to a fresh momentum
    assert not adopter_for(named(model), kind(model.parameters()), None).copies


class OwnMuon(Muon):
    """Not one of ours, so it is tried out."""


@pytest.mark.parametrize("kind", [Muon, OwnMuon])
@pytest.mark.parametrize("before", [0, 7])
def test_muons_momentum_is_no_copy(kind: type[Muon], before: int, caplog: pytest.LogCaptureFixture) -> None:
    """Not even where the parameters are as small; and what is adopted lasts."""
    model = model_of()
    torch.nn.init.zeros_(model.get_parameter("0.weight"))
    optimizer = kind.of(model, lr=1e-3)
    train(model, optimizer, before)
    state = copy.deepcopy(optimizer.state_dict())
    adopter = adopter_for(named(model), optimizer, None)
    assert not adopter.copies
    assert not caplog.text
    assert str(optimizer.state_dict()) == str(state)
    adopt(adopter, model, 7.0)
    train(model, kind.of(model, lr=1e-3, weight_decay=0.0), 1, gradients=False)
    assert all(bool((p == 7.0).all()) for p in model.parameters())


def test_weight_decay_is_no_copy() -> None:
    model = model_of()
    optimizer = Plain(model.parameters(), lr=0.05, weight_decay=0.1)
    assert not adopter_for(named(model), optimizer, None).copies


def test_the_known_average_of_torch_follows() -> None:
    model = model_of()
    assert adopter_for(named(model), torch.optim.ASGD(model.parameters()), None).copies.keys == {"ax"}


def test_a_copy_that_cannot_be_found_is_refused() -> None:
    model = model_of()
    with pytest.raises(UsageError, match=r"Hidden keeps a second copy of the parameters .* `on_adopt`"):
        adopter_for(named(model), Hidden(model.parameters()), None)


@pytest.mark.parametrize("mixed", [False, True])
def test_copies_from_before_the_weights_were_loaded_are_refused(mixed: bool) -> None:
    model = model_of()
    optimizer = Masters(model.parameters())
    if mixed:
        optimizer.masters.reverse()  # not in the order of the parameters
    with torch.no_grad():
        model.get_parameter("0.weight").add_(1.0)
    with pytest.raises(UsageError, match="'masters' that differ from them: make the optimizer after the model"):
        adopter_for(named(model), optimizer, None)


def test_the_user_may_write_it_through_himself() -> None:
    model = model_of()
    optimizer = Hidden(model.parameters())
    told: list[dict[str, torch.Tensor]] = []
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    adopter = adopter_for(named(model), optimizer, told.append)
    adopt(adopter, model, 7.0)
    [changes] = told
    assert changes.keys() == before.keys()
    for name, p in model.named_parameters():
        torch.testing.assert_close(before[name] + changes[name], p.detach())


def test_trying_out_changes_nothing() -> None:
    model = model_of()
    optimizer = ScheduleFree(model.parameters(), lr=0.0)
    optimizer.train()
    train(model, optimizer, 2)
    parameters, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    random = torch.get_rng_state()
    assert adopter_for(named(model), optimizer, None).copies.keys == {"z"}
    assert torch.equal(torch.get_rng_state(), random)
    assert str(optimizer.state_dict()) == str(state)
    assert all(torch.equal(value, parameters[name]) for name, value in model.state_dict().items())
    assert len(optimizer.state) == len(list(model.parameters()))


def test_what_cannot_be_tried_out_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of()
    assert not adopter_for(named(model), NeedsClosure(model.parameters()), None).copies
    assert "NeedsClosure could not be tried out (TypeError" in caplog.text


def test_an_optimizer_over_masters_only(caplog: pytest.LogCaptureFixture) -> None:
    """The loop copies them into the model by itself."""
    model = model_of(torch.bfloat16)
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
    adopter = adopter_for(named(model), torch.optim.AdamW(masters), None)
    adopt(adopter, model, 7.0)
    assert all(bool((master == 7.0).all()) for master in masters)


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = torch.nn.Linear(3, 3)
    with pytest.raises(UsageError, match="AdamW has none of the model's parameters"):
        adopter_for(named(model_of()), torch.optim.AdamW(other.parameters()), None)


def test_a_peers_copies_do_not_move_us() -> None:
    peer, joiner = model_of(), model_of()
    with torch.no_grad():
        for p in joiner.parameters():
            p.add_(3.0)
    theirs, ours = ScheduleFree(peer.parameters()), ScheduleFree(joiner.parameters())
    theirs.train()
    ours.train()
    train(peer, theirs, 3)
    adopter = adopter_for(named(joiner), ours, None)
    state = pack(copy_state(peer, theirs))
    try:
        load_state(joiner, ours, state, adopter.copies.keys)
    finally:
        for p in joiner.parameters():
            p.grad = None
    for p in joiner.parameters():
        assert torch.equal(ours.state[p]["z"], p.detach())
