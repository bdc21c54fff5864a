"""An optimizer's state as safetensors, by parameter name, so that it can travel to another worker.

What an optimizer averages about gradients (AdamW's two moments, say) is nearly the same for all workers of a run.
Only the state of each parameter travels, not the settings of parameter groups: learning rate and weight decay are
everybody's own.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from anabranch.errors import StateUnusable
from anabranch.workers.torch_store import trainable

ABOUT = "/about"  # JSON: no parameter has an empty name
_STATEFUL = ("amsgrad", "centered", "momentum")  # settings on which it depends what state there is
_NOT_NEGATIVE = {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta", "row_var", "col_var"}

State = dict[str, torch.Tensor]
"""By "parameter/key", on the host; a plain number is a float64 of no dimension, an integer an int64."""


def copy_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> State:
    """A copy, to be made at a step boundary. Raises `StateUnusable` if there is nothing to copy."""
    if optimizer is None:
        raise StateUnusable("the session was not given its optimizer")
    optimizer = _inner(optimizer)
    copied: State = {}
    for name, parameter in trainable(model):
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                copied[f"{name}/{key}"] = value.detach().to("cpu", copy=True).contiguous()
            elif isinstance(value, (int, float)):
                copied[f"{name}/{key}"] = torch.tensor(
                    value, dtype=torch.float64 if type(value) is float else torch.int64
                )
            elif value is not None:
                raise StateUnusable(f"{_kind(optimizer)} keeps a {type(value).__name__} as {key!r} of {name!r}")
    if not copied:
        raise StateUnusable(f"{_kind(optimizer)} keeps no state, or none yet")
    copied[ABOUT] = torch.frombuffer(bytearray(json.dumps(_about(optimizer)).encode()), dtype=torch.uint8)
    return copied


def pack(state: State) -> memoryview:
    """What `copy_state` gave, for the wire. CPU-bound."""
    return memoryview(save(state))


def load_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, data: memoryview) -> int:
    """Take over a peer's state for the parameters of the same names; how many have one now.

    Everything is checked first: another kind of optimizer, another shape, a value that is not finite, a second moment
    below zero raise `StateUnusable`, and then nothing has changed.
    """
    if optimizer is None:
        raise StateUnusable("the session was not given its optimizer")
    optimizer = _inner(optimizer)
    try:
        tensors = load(bytes(data))
        about = json.loads(tensors.pop(ABOUT).numpy().tobytes())
    except (SafetensorError, ValueError, KeyError, RecursionError) as error:
        raise StateUnusable(f"what the peer sent cannot be read: {error}") from None
    if about != (ours := _about(optimizer)):
        raise StateUnusable(f"the peer's optimizer is {str(about)[:200]}, ours is {ours}")
    state: dict[torch.nn.Parameter, dict[str, Any]] = {}
    for name, parameter in trainable(model):
        parts = {key: value for key, value in _of(name, tensors).items() if _checked(name, key, value, parameter)}
        if parts:
            state[parameter] = parts
    if not state:
        raise StateUnusable("what the peer sent is about other parameters than ours")
    _apply(optimizer, state)
    return len(state)


def _inner(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`accelerate` wraps optimizers in one of its own."""
    wrapped = getattr(optimizer, "optimizer", None)
    return wrapped if isinstance(wrapped, torch.optim.Optimizer) else optimizer


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _about(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {"optimizer": _kind(optimizer), **{key: bool(optimizer.defaults.get(key)) for key in _STATEFUL}}


def _of(name: str, tensors: State) -> State:
    prefix = f"{name}/"
    return {path[len(prefix) :]: value for path, value in tensors.items() if path.startswith(prefix)}


def _checked(name: str, key: str, value: torch.Tensor, parameter: torch.nn.Parameter) -> bool:
    """True, or `StateUnusable`."""
    fits = value.dim() == 0 or (
        value.dim() == parameter.dim() and all(a in (1, b) for a, b in zip(value.shape, parameter.shape, strict=True))
    )
    if not fits:
        raise StateUnusable(
            f"{key} of {name!r} has the shape {list(value.shape)}, the parameter {list(parameter.shape)}"
        )
    if value.is_floating_point() and not bool(torch.isfinite(value).all()):
        raise StateUnusable(f"{key} of {name!r} is not finite")
    if key in _NOT_NEGATIVE and bool((value < 0).any()):
        raise StateUnusable(f"{key} of {name!r} is below zero")
    if key == "step" and not (value.numel() == 1 and 1 <= value.item() < 2**53):
        raise StateUnusable(f"step of {name!r} is no count of steps")
    return True


def _apply(optimizer: torch.optim.Optimizer, state: dict[torch.nn.Parameter, dict[str, Any]]) -> None:
    """By way of `load_state_dict`, which puts everything where and as the optimizer wants it."""
    own = optimizer.state_dict()
    for live, saved in zip(optimizer.param_groups, own["param_groups"], strict=True):
        for parameter, number in zip(live["params"], saved["params"], strict=True):
            if parameter in state:
                own["state"][number] = state[parameter]
    optimizer.load_state_dict(own)
