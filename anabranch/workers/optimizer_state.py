"""An optimizer's state as safetensors, by parameter name, so that it can travel to another worker.

What an optimizer averages about gradients (AdamW's two moments, say) is nearly the same for all workers of a run.
Only the state of each parameter travels, not the settings of parameter groups: learning rate and weight decay are
everybody's own.
"""

from __future__ import annotations

import inspect
import json
from typing import Any

import torch
from safetensors.torch import load, save

from anabranch.errors import StateUnusable
from anabranch.workers.copies import in_training, inner
from anabranch.workers.tensors import trainable

ABOUT = "/about"  # JSON: no parameter has an empty name
LEAST_COVERED = 0.9  # of what is trained: with less, the joiner warms up by itself
_NOT_NEGATIVE = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta", "row_var", "col_var"}

State = dict[str, torch.Tensor]
"""By "parameter/key", on the host; a plain number is a float64 of no dimension."""

Moments = dict[torch.nn.Parameter, dict[str, Any]]


def copy_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """A copy, to be made at a step boundary. Raises `StateUnusable` if there is nothing to copy."""
    optimizer = _given(optimizer)
    copied: State = {}
    for name, parameter in trainable(model):
        state = optimizer.state.get(parameter, {})
        if not _is_warm(state):
            continue
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                copied[f"{name}/{key}"] = value.detach().to("cpu", copy=True).contiguous()
            elif isinstance(value, (int, float)):
                copied[f"{name}/{key}"] = torch.tensor(value, dtype=torch.float64)
            elif value is not None:
                raise StateUnusable(f"{_kind(optimizer)} keeps a {type(value).__name__} as {key!r} of {name!r}")
    if not copied:
        raise StateUnusable(f"{_kind(optimizer)} keeps no state, or none yet")
    copied[ABOUT] = torch.frombuffer(
        bytearray(json.dumps({"optimizer": _kind(optimizer)}).encode()), dtype=torch.uint8
    )
    return copied


def pack(state: State) -> memoryview:
    """What `copy_state` gave, for the wire. CPU-bound."""
    return memoryview(save(state))


def load_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    data: memoryview,
    copies: frozenset[str] = frozenset(),
) -> int:
    """Take over a peer's state for the parameters of the same names; how many have one now. `copies`: keys that hold
    copies of the parameter (`workers/copies.py`): the peer is elsewhere, so these become copies of ours.

    Everything is checked first, against the state that our optimizer makes for a parameter by itself: another kind
    of optimizer, other keys or shapes, a value that is not finite, a second moment below zero, state for less than
    90 % of what is trained raise `StateUnusable`, and then nothing has changed. So does an optimizer that has a state
    already.
    """
    optimizer = _given(optimizer)
    if any(_is_warm(optimizer.state.get(parameter, {})) for _, parameter in trainable(model)):
        raise StateUnusable("our optimizer has a state of its own")
    try:
        state = _checked(model, optimizer, data)
        for parameter, kept in state.items():
            for key in copies & kept.keys():
                kept[key] = parameter.detach().to(kept[key].dtype, copy=True)
        _apply(optimizer, state)
    except StateUnusable:
        raise
    except Exception as error:  # it came from somewhere else, and optimizers differ
        raise StateUnusable(f"what the peer sent cannot be used: {type(error).__name__}: {error}") from error
    return len(state)


def _given(optimizer: torch.optim.Optimizer | None) -> torch.optim.Optimizer:
    if optimizer is None:
        raise StateUnusable("the session was not given its optimizer")
    return inner(optimizer)


def _is_warm(state: dict[str, Any]) -> bool:
    """Some optimizers make their state before the first gradient: that is as good as none."""
    return bool(state) and float(state.get("step", 1)) >= 1


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _checked(model: torch.nn.Module, optimizer: torch.optim.Optimizer, data: memoryview) -> Moments:
    tensors = load(bytes(data))
    about = json.loads(tensors.pop(ABOUT).numpy().tobytes())
    if about != (ours := {"optimizer": _kind(optimizer)}):
        raise StateUnusable(f"the peer's optimizer is {str(about)[:200]}, ours is {ours}")
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    state: Moments = {}
    size = covered = 0
    for name, parameter in trainable(model):
        size += parameter.numel()
        found = {path.removeprefix(f"{name}/"): t for path, t in tensors.items() if path.startswith(f"{name}/")}
        if found and parameter in groups:
            state[parameter] = _as_ours(name, found, _template(optimizer, groups[parameter], parameter))
            covered += parameter.numel()
    if covered < LEAST_COVERED * size:
        raise StateUnusable(f"what the peer sent is about {covered / size:.0%} of our parameters only")
    return state


def _template(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: torch.nn.Parameter
) -> dict[str, Any]:
    """What our optimizer keeps of such a parameter: of a stand-in, after a step with a gradient of zeros."""
    stand_in = torch.nn.Parameter(torch.zeros_like(parameter))
    stand_in.grad = torch.zeros_like(parameter)
    takes = inspect.signature(type(optimizer)).parameters
    settings = {key: value for key, value in optimizer.defaults.items() if key in takes}
    one = in_training(type(optimizer)([{**group, "params": [stand_in]}], **settings))
    one.step()
    return dict(one.state[stand_in])


def _as_ours(name: str, found: State, template: dict[str, Any]) -> dict[str, Any]:
    """The peer's values as our optimizer keeps them."""
    wanted = {key: value for key, value in template.items() if value is not None}
    if found.keys() != wanted.keys():
        raise StateUnusable(f"{name!r}: the peer keeps {', '.join(sorted(found))}, we {', '.join(sorted(wanted))}")
    ours: dict[str, Any] = dict(template)
    for key, value in found.items():
        like = wanted[key]
        shape = like.shape if isinstance(like, torch.Tensor) else torch.Size()
        if value.shape != shape:
            raise StateUnusable(f"{key} of {name!r} has the shape {list(value.shape)} instead of {list(shape)}")
        value = value.to(like.dtype if isinstance(like, torch.Tensor) else torch.float64)
        if not bool(torch.isfinite(value).all()):
            raise StateUnusable(f"{key} of {name!r} is not finite")
        if key in _NOT_NEGATIVE and bool((value < 0).any()):
            raise StateUnusable(f"{key} of {name!r} is below zero")
        if key == "step" and not 1 <= value.item() < 2**53:
            raise StateUnusable(f"step of {name!r} is no count of steps")
        ours[key] = value if isinstance(like, torch.Tensor) else type(like)(value.item())
    return ours


def _apply(optimizer: torch.optim.Optimizer, state: Moments) -> None:
    """By way of `load_state_dict`, which puts everything where and as the optimizer wants it."""
    own = optimizer.state_dict()
    for live, saved in zip(optimizer.param_groups, own["param_groups"], strict=True):
        for parameter, number in zip(live["params"], saved["params"], strict=True):
            if parameter in state:
                own["state"][number] = state[parameter]
    before = {parameter: dict(kept) for parameter, kept in optimizer.state.items()}
    try:
        optimizer.load_state_dict(own)
    except Exception:
        optimizer.state.clear()
        optimizer.state.update(before)
        raise
