"""An optimizer's state on its way to another worker: everything that matters arrives, and nothing bad is loaded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load, save

from anabranch.errors import StateUnusable
from anabranch.workers.muon import Muon
from anabranch.workers.optimizer_state import ABOUT, copy_state, load_state, pack

Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]

KINDS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "SGD with momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "Muon": lambda p: Muon(muon_groups(p), lr=0.1),
}


def muon_groups(parameters: list[torch.nn.Parameter]) -> list[dict[str, object]]:
    """The first weight is a hidden matrix, the last one a head."""
    return [{"params": parameters[:1], "matrices": True}, {"params": parameters[1:], "matrices": False}]


def tiny() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    model[0].bias.requires_grad_(False)
    return model


def made(kind: str = "AdamW") -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    model = tiny()
    return model, KINDS[kind]([p for p in model.parameters() if p.requires_grad])


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def warmed(kind: str = "AdamW") -> tuple[torch.nn.Sequential, torch.optim.Optimizer]:
    model, optimizer = made(kind)
    train(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("kind", KINDS)
def test_with_a_peers_state_the_next_steps_are_the_peers(kind: str) -> None:
    giver, its = warmed(kind)
    taker, ours = made(kind)
    taker.load_state_dict(giver.state_dict())
    assert load_state(taker, ours, pack(copy_state(giver, its))) == 3
    for model, optimizer in ((giver, its), (taker, ours)):
        train(model, optimizer, seed=1)
    for one, other in zip(giver.parameters(), taker.parameters(), strict=True):
        assert torch.equal(one, other)


def test_the_copy_does_not_change_with_the_original() -> None:
    model, optimizer = warmed()
    before = bytes(pack(state := copy_state(model, optimizer)))
    train(model, optimizer)
    assert bytes(pack(state)) == before


def test_settings_of_parameter_groups_stay_ours() -> None:
    giver, its = warmed()
    taker, ours = made()
    ours.param_groups[0]["lr"] = 0.5
    load_state(taker, ours, pack(copy_state(giver, its)))
    assert ours.param_groups[0]["lr"] == 0.5


def test_parameters_may_be_grouped_and_ordered_otherwise() -> None:
    giver, its = warmed()
    taker = tiny()
    free = [p for p in taker.parameters() if p.requires_grad]
    ours = torch.optim.AdamW([{"params": free[:0:-1]}, {"params": free[:1]}], lr=0.1)
    load_state(taker, ours, pack(copy_state(giver, its)))
    for (name, one), (_, other) in zip(giver.named_parameters(), taker.named_parameters(), strict=True):
        if one.requires_grad:
            assert torch.equal(its.state[one]["exp_avg"], ours.state[other]["exp_avg"]), name


class Wrapped(torch.optim.SGD):
    """As `accelerate` wraps optimizers."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
        self.optimizer = inner


def test_a_wrapped_optimizer_is_looked_into() -> None:
    giver, its = warmed()
    taker, ours = made()
    assert load_state(taker, Wrapped(ours), pack(copy_state(giver, Wrapped(its)))) == 3
    assert len(ours.state) == 3


def test_without_state_there_is_nothing_to_give() -> None:
    model, optimizer = made()
    with pytest.raises(StateUnusable, match="AdamW keeps no state"):
        copy_state(model, optimizer)
    with pytest.raises(StateUnusable, match="was not given its optimizer"):
        copy_state(model, None)


def test_state_made_before_the_first_gradient_is_no_state() -> None:
    """Adagrad does that; a parameter that never had a gradient is no reason to refuse the others."""
    giver, taker = tiny(), tiny()
    its, ours = (torch.optim.Adagrad(model.parameters(), lr=0.1) for model in (giver, taker))
    giver[2].bias.requires_grad_(False)
    train(giver, its)
    giver[2].bias.requires_grad_(True)
    assert load_state(taker, ours, pack(copy_state(giver, its))) == 2
    for one, other in zip(giver.parameters(), taker.parameters(), strict=True):
        assert torch.equal(ours.state[other]["sum"], its.state[one]["sum"])


class Counting(torch.optim.Optimizer):
    """Keeps a plain number, as some optimizers do."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["step"] = state.get("step", 0) + 1
                    state["mean"] = state.get("mean", 0.0) * 0.9 + float(parameter.grad.mean()) * 0.1


def test_plain_numbers_stay_plain_numbers() -> None:
    giver, taker = tiny(), tiny()
    its, ours = (Counting([p for p in model.parameters() if p.requires_grad]) for model in (giver, taker))
    train(giver, its)
    load_state(taker, ours, pack(copy_state(giver, its)))
    for one, other in zip(giver.parameters(), taker.parameters(), strict=True):
        assert its.state[one] == ours.state[other]
    assert {type(state["step"]) for state in ours.state.values() if state} == {int}


# --- what is refused, and then nothing has changed --------------------------------------------------------


def spoilt(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> memoryview:
    tensors = load(bytes(pack(copy_state(*warmed()))))
    tensors[name] = change(tensors[name]).contiguous()
    return memoryview(save(tensors))


def without(*names: str) -> memoryview:
    tensors = load(bytes(pack(copy_state(*warmed()))))
    return memoryview(save({path: tensor for path, tensor in tensors.items() if path not in names}))


def about(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


MOMENT, SQUARE, STEP = "0.weight/exp_avg", "0.weight/exp_avg_sq", "0.weight/step"
ALL = [f"0.weight/{key}" for key in ("exp_avg", "exp_avg_sq", "step")]
SPOILT = {
    "a value that is not finite": (spoilt(MOMENT, lambda t: t * float("nan")), "not finite"),
    "a value that is too large for our type": (spoilt(MOMENT, lambda t: t.double() + 1e300), "not finite"),
    "a complex value": (spoilt(MOMENT, lambda t: t.to(torch.complex64) * float("nan")), "cannot be used|not finite"),
    "an odd type": (spoilt(SQUARE, lambda t: t.to(torch.float8_e4m3fn).fill_(float("nan"))), "cannot be used|finite"),
    "a negative second moment": (spoilt(SQUARE, lambda t: -t - 1), "below zero"),
    "another shape": (spoilt(MOMENT, lambda t: t.repeat(2, 1)), "shape"),
    "no shape": (spoilt(MOMENT, lambda t: t.sum()), "shape"),
    "no steps": (spoilt(STEP, lambda t: t * 0), "no count of steps"),
    "a missing average": (without(SQUARE), "the peer keeps exp_avg, step, we exp_avg, exp_avg_sq, step"),
    "too few parameters": (without(*ALL), "about 25% of our parameters only"),
    "no description": (without(ABOUT), "cannot be used"),
    "a description that is none": (memoryview(save({ABOUT: about("[]")})), "the peer's optimizer is"),
    "a description of another type": (spoilt(ABOUT, lambda t: t.to(torch.bfloat16)), "cannot be used"),
    "no safetensors": (memoryview(b"nonsense" * 4), "cannot be used"),
    "nothing": (memoryview(b""), "cannot be used"),
    "another kind": (
        pack(copy_state(*warmed("SGD with momentum"))),
        "the peer's optimizer is .*SGD.*ours is .*AdamW",
    ),
    "other averages": (pack(copy_state(*warmed("AdamW amsgrad"))), "the peer keeps .*max_exp_avg_sq"),
}


@pytest.mark.parametrize("what", SPOILT)
def test_this_is_refused(what: str) -> None:
    data, words = SPOILT[what]
    model, optimizer = made()
    with pytest.raises(StateUnusable, match=words):
        load_state(model, optimizer, data)
    assert not optimizer.state
    train(model, optimizer)  # it still works
    assert all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters())


def test_a_state_of_our_own_is_not_replaced() -> None:
    with pytest.raises(StateUnusable, match="has a state of its own"):
        load_state(*warmed(), pack(copy_state(*warmed())))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("0.weight/momentum_buffer", lambda t: t * float("nan"), "momentum_buffer of '0.weight' is not finite"),
        ("0.weight/momentum_buffer", lambda t: t[:2], r"has the shape \[2, 4\] instead of \[3, 4\]"),
        ("2.weight/exp_avg_sq", lambda t: -t - 1, "exp_avg_sq of '2.weight' is below zero"),
        ("2.bias/step", lambda t: t * 0, "step of '2.bias' is no count of steps"),
    ],
)
def test_both_kinds_of_muons_state_are_checked(
    name: str, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    tensors = load(bytes(pack(copy_state(*warmed("Muon")))))
    tensors[name] = change(tensors[name]).contiguous()
    model, optimizer = made("Muon")
    with pytest.raises(StateUnusable, match=words):
        load_state(model, optimizer, memoryview(save(tensors)))
    assert not optimizer.state


def test_a_momentum_may_be_below_zero_and_has_no_count_of_steps() -> None:
    giver, its = warmed("Muon")
    state = load(bytes(pack(copy_state(giver, its))))
    assert {name for name in state if name.startswith("0.weight")} == {"0.weight/momentum_buffer"}
    assert bool((state["0.weight/momentum_buffer"] < 0).any())


def test_a_muon_that_divides_the_model_otherwise_is_no_use() -> None:
    model = tiny()
    optimizer = Muon([p for p in model.parameters() if p.requires_grad], matrices=False)
    with pytest.raises(StateUnusable, match="the peer keeps momentum_buffer, we exp_avg, exp_avg_sq, step"):
        load_state(model, optimizer, pack(copy_state(*warmed("Muon"))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_averages_of_half_precision_arrive_as_they_are(dtype: torch.dtype) -> None:
    models = [tiny().to(dtype) for _ in range(2)]
    its, ours = (Muon(muon_groups([p for p in m.parameters() if p.requires_grad])) for m in models)
    for parameter in models[0].parameters():
        parameter.grad = torch.full_like(parameter, 1e-3) if parameter.requires_grad else None
    its.step()
    load_state(models[1], ours, pack(copy_state(models[0], its)))
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        for key, value in its.state[one].items():
            assert torch.equal(ours.state[other][key], value), key
            assert ours.state[other][key].dtype == torch.float32


def test_groups_decide_what_is_kept() -> None:
    """amsgrad in a group and not in the defaults: nothing is loaded that the next step would miss."""
    model = tiny()
    free = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": free, "amsgrad": True}], lr=0.1)
    with pytest.raises(StateUnusable, match="max_exp_avg_sq"):
        load_state(model, optimizer, pack(copy_state(*warmed())))
    load_state(model, optimizer, pack(copy_state(*warmed("AdamW amsgrad"))))
    train(model, optimizer)
