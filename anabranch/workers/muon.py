"""Muon: a momentum whose every matrix is made orthogonal before it is a step; AdamW for all that is no hidden matrix.

For a matrix θ [rows, columns] with gradient g, momentum μ, learning rate η and weight decay λ:

    B' = μ·B + (1 − μ)·g;  O = NS₅((1 − μ)·g + μ·B');  θ' = (1 − ηλ)·θ − η · 0.2·√max(rows, columns) · O

NS₅ is five quintic Newton-Schulz iterations, which bring all singular values near one (Jordan et al. 2024,
kellerjordan.github.io/posts/muon). The factor 0.2·√max(rows, columns) gives the step the root mean square that
AdamW's usually has, so that one learning rate, schedule and weight decay serve both (Liu et al. 2025, arXiv
2502.16982). `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")` does the same for matrices, and for nothing else. Here
everything is in one optimizer, as a training loop, a checkpoint and a joining worker expect it, and matrices of one
shape are iterated together.

Of a matrix one buffer is kept (`momentum_buffer`), of everything else AdamW's two averages (`exp_avg`, `exp_avg_sq`)
and its `step`. Of parameters in half precision these are float32, and the step is computed so and rounded once.

On the CPU iterations are in float32. On accelerators they are in bfloat16: untested there, compared on a CPU only.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Self, cast

import torch
from torch.optim.adamw import adamw

from anabranch.errors import UsageError
from anabranch.workers.checked import real
from anabranch.workers.hidden import divide

_A, _B, _C = 3.4445, -4.7750, 2.0315  # steepest at zero; singular values end between 0.7 and 1.2
_ITERATIONS = 5
_RMS = 0.2  # of an AdamW step, relative to the learning rate
_SMALLEST = 1e-7  # norm: below that a gradient is as good as none
_WIDE = 1.5  # columns per row from which on Gram space takes fewer multiplications: 2·w + 17 against 10·w + 5
_SETTINGS = {"lr", "momentum", "betas", "eps", "weight_decay", "matrices"}
_AT_ONCE = 1 << 22  # elements that are iterated together, at most, unless one matrix alone has more


def orthogonal(matrices: torch.Tensor) -> torch.Tensor:
    """[count, rows, columns] with the singular values of each matrix brought near one; zeros stay zeros.

    In the dtype of `matrices`; computed in float32 (or float64) on the CPU, in bfloat16 elsewhere. A singular value
    that is below a thousandth of its matrix's norm ends below 0.7.
    """
    if matrices.device.type != "cpu":
        work = matrices.bfloat16()
    else:
        work = matrices if matrices.dtype == torch.float64 else matrices.float()
    tall = work.shape[1] > work.shape[2]
    if tall:
        work = work.mT
    work = work / work.norm(dim=(1, 2), keepdim=True).clamp(min=_SMALLEST)  # no singular value is above one
    wide = work.device.type == "cpu" and work.shape[2] >= _WIDE * work.shape[1]
    work = _in_gram_space(work) if wide else _iterated(work)
    return (work.mT if tall else work).to(matrices.dtype)


def _iterated(x: torch.Tensor) -> torch.Tensor:
    """X ← a·X + (b·G + c·G²)·X with G = X·Xᵀ, five times; x [count, rows, columns], rows ≤ columns."""
    for _ in range(_ITERATIONS):
        g = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(g, g, g, beta=_B, alpha=_C), x, beta=_A)
    return x


def _in_gram_space(x: torch.Tensor) -> torch.Tensor:
    """The same, by way of [rows, rows] only: G' = P·G·P with P = a·I + b·G + c·G², and X' = P₅·P₄·P₃·P₂·P₁·X.

    Rounding errors of G grow with each iteration, so it takes float32. There elements differ from `_iterated` by some
    1e-6, by 1e-4 at most where singular values are a thousandth of the largest.
    """
    g = x @ x.mT
    q: torch.Tensor | None = None
    for i in range(_ITERATIONS):
        p = torch.baddbmm(g, g, g, beta=_B, alpha=_C)
        p.diagonal(dim1=1, dim2=2).add_(_A)
        q = p if q is None else p @ q
        if i < _ITERATIONS - 1:
            g = (p @ g) @ p
    assert q is not None
    return q @ x


class Muon(torch.optim.Optimizer):
    """Muon for parameter groups with `matrices = True`, AdamW for those with `matrices = False`.

    `Muon.of(model)` makes the groups; whoever makes them by hand puts hidden matrices into the first kind. A weight
    of more than two dimensions, as convolutions have it, is a matrix of [first, all others].
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        matrices: bool = True,
    ) -> None:
        """`params`: parameters or groups of them; the other arguments are what groups have that do not say otherwise.

        `momentum` is Muon's; `betas` and `eps` are AdamW's; `lr` and `weight_decay` (decoupled, times `lr`) serve
        both. Raises `UsageError` for values out of range, for a parameter of fewer than two dimensions in a group of
        matrices, and for complex or sharded (DTensor) parameters.
        """
        defaults = {
            "lr": lr, "momentum": momentum, "betas": betas, "eps": eps, "weight_decay": weight_decay,
            "matrices": matrices,
        }  # fmt: skip
        super().__init__(params, defaults)

    @classmethod
    def of(cls, model: torch.nn.Module, lr: float = 1e-3, *, weight_decay: float = 0.1, **settings: Any) -> Self:
        """For all that is trained of a model: hidden matrices by Muon, the rest by AdamW, and of that what has fewer
        than two dimensions (biases, gains of norms) without weight decay.

        `workers/hidden.py` says what a hidden matrix is. `settings` are those of `Muon`. Raises what `Muon` raises,
        and `UsageError` if nothing is trained.
        """
        hidden, rest = divide(model)
        groups: list[dict[str, Any]] = [
            {"params": hidden, "matrices": True},
            {"params": [p for p in rest if p.ndim >= 2], "matrices": False},
            {"params": [p for p in rest if p.ndim < 2], "matrices": False, "weight_decay": 0.0},
        ]
        return cls([group for group in groups if group["params"]], lr, weight_decay=weight_decay, **settings)

    @property
    def state_bytes(self) -> int:
        """What it keeps once every parameter has had a gradient, without counts of steps."""
        return sum(
            parameter.numel() * _kept(parameter).itemsize * (1 if group["matrices"] else 2)
            for group in self.param_groups
            for parameter in group["params"]
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch does it; raises what `Muon` raises, and then nothing is added."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except UsageError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step with the gradients that are there; parameters without one stay as they are.

        `closure` computes them anew and returns the loss, which is passed on. A sparse or complex gradient is a
        `UsageError`, and then nothing has changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [(group, [p for p in group["params"] if _is_due(p)]) for group in self.param_groups]
        for group, parameters in work:
            step = self._step_matrices if group["matrices"] else self._step_others
            for same in _alike(parameters, shapes=group["matrices"]):
                step(group, same)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch does it, but float32 averages of half-precision parameters stay float32. `UsageError` for the
        state of another kind of optimizer."""
        for group in state_dict["param_groups"]:
            if missing := _SETTINGS - group.keys():  # torch adds others to `defaults`
                raise UsageError(
                    f"this optimizer state has no {', '.join(sorted(missing))} in its parameter groups: it must be "
                    "of a Muon of Anabranch; begin with a fresh optimizer instead"
                )
        super().load_state_dict(state_dict)
        for ours, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(ours["params"], saved["params"], strict=True):
                if (dtype := _kept(parameter)) != parameter.dtype:
                    for key, value in state_dict["state"].get(number, {}).items():
                        if key != "step":
                            self.state[parameter][key] = value.to(parameter.device, dtype, copy=True)

    def _step_matrices(self, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        """All of one shape, device and dtype."""
        momentum, rate, decay = (float(group[key]) for key in ("momentum", "lr", "weight_decay"))
        dtype = _kept(parameters[0])
        values, gradients = [p.to(dtype) for p in parameters], _gradients(parameters, dtype)
        buffers = self._averages(parameters, "momentum_buffer")
        torch._foreach_lerp_(buffers, gradients, 1 - momentum)
        ahead = torch._foreach_lerp(gradients, buffers, momentum)
        # Not what a conv's weight is like in memory, but [first, all others].
        matrices = torch.stack([tensor.flatten(1) for tensor in ahead])  # [count, rows, columns]
        length = _RMS * math.sqrt(max(matrices.shape[1:]))
        steps = orthogonal(matrices).reshape(len(parameters), *parameters[0].shape)
        if decay:
            torch._foreach_mul_(values, 1 - rate * decay)
        torch._foreach_add_(values, list(steps.unbind()), alpha=-rate * length)
        _write(values, parameters)

    def _step_others(self, group: dict[str, Any], parameters: list[torch.nn.Parameter]) -> None:
        """All of one device and dtype."""
        dtype, device = _kept(parameters[0]), parameters[0].device
        values = [p.to(dtype) for p in parameters]
        for parameter in parameters:
            self.state[parameter].setdefault("step", torch.tensor(0.0))
        beta1, beta2 = group["betas"]
        adamw(
            values,
            _gradients(parameters, dtype),
            self._averages(parameters, "exp_avg"),
            self._averages(parameters, "exp_avg_sq"),
            [],
            [self.state[p]["step"] for p in parameters],
            fused=True if device.type == "cpu" else None,  # elsewhere it wants steps on the device; torch chooses
            amsgrad=False, beta1=beta1, beta2=beta2, lr=float(group["lr"]), weight_decay=group["weight_decay"],
            eps=group["eps"], maximize=False,
        )  # fmt: skip
        _write(values, parameters)

    def _averages(self, parameters: list[torch.nn.Parameter], key: str) -> list[torch.Tensor]:
        """Zeros at first."""
        for parameter in parameters:
            if key not in (state := self.state[parameter]):
                state[key] = torch.zeros_like(parameter, dtype=_kept(parameter))
        return [self.state[parameter][key] for parameter in parameters]


def _kept(parameter: torch.Tensor) -> torch.dtype:
    """The dtype of what is kept of it."""
    return parameter.dtype if parameter.dtype == torch.float64 else torch.float32


def _gradients(parameters: list[torch.nn.Parameter], dtype: torch.dtype) -> list[torch.Tensor]:
    return [cast(torch.Tensor, p.grad).to(dtype) for p in parameters]


def _write(values: list[torch.Tensor], parameters: list[torch.nn.Parameter]) -> None:
    """Nothing to do where a value is its parameter."""
    for value, parameter in zip(values, parameters, strict=True):
        if value is not parameter:
            parameter.copy_(value)


def _alike(parameters: list[torch.nn.Parameter], *, shapes: bool) -> Iterator[list[torch.nn.Parameter]]:
    """Those of one device and dtype together; with `shapes` of one shape, and not too many of them."""
    found: dict[tuple[Any, ...], list[torch.nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        found[parameter.shape if shapes else (), parameter.device, parameter.dtype].append(parameter)
    for same in found.values():
        count = max(1, _AT_ONCE // same[0].numel()) if shapes else len(same)
        yield from (same[at : at + count] for at in range(0, len(same), count))


def _is_due(parameter: torch.nn.Parameter) -> bool:
    """Whether it has a gradient. `UsageError` for one that cannot be used."""
    if (gradient := parameter.grad) is None or parameter.numel() == 0:
        return False
    for odd, what, remedy in (
        (gradient.layout != torch.strided, "sparse", "make the embedding with sparse=False"),
        (gradient.is_complex(), "complex", "use torch.view_as_real"),
    ):
        if odd:
            raise UsageError(
                f"the gradient of a parameter of shape {list(parameter.shape)} is {what}: it must be dense and real; "
                f"{remedy}, or leave this parameter to another optimizer"
            )
    return True


def _check_group(group: dict[str, Any]) -> None:
    """`UsageError` names key, value and what is allowed."""
    for key in ("lr", "eps", "weight_decay"):
        real(key, group[key], least=0)
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise UsageError(f"betas = {betas!r}: allowed are two numbers, at least 0 and below 1")
    for key, value in (("momentum", group["momentum"]), ("betas[0]", betas[0]), ("betas[1]", betas[1])):
        if real(key, value, least=0) >= 1:
            raise UsageError(f"{key} = {value!r}: allowed is a number, at least 0 and below 1")
    if not isinstance(group["matrices"], bool):
        raise UsageError(f"matrices = {group['matrices']!r}: allowed is True (Muon) or False (AdamW)")
    for parameter in group["params"]:
        _check_parameter(parameter, matrix=group["matrices"])


def _check_parameter(parameter: torch.Tensor, *, matrix: bool) -> None:
    shape = f"a parameter of shape {list(parameter.shape)}"
    if matrix and parameter.ndim < 2:
        raise UsageError(
            f"{shape} in a group with matrices = True: it must have two dimensions or more; put it into a group with "
            "matrices = False, or let Muon.of(model) make the groups"
        )
    if parameter.is_complex():
        raise UsageError(f"{shape} is complex: Muon takes real ones; use torch.view_as_real, or another optimizer")
    tensors = sys.modules.get("torch.distributed.tensor")  # slow to import, and imported by whoever made a DTensor
    if tensors is not None and isinstance(parameter, tensors.DTensor):
        raise UsageError(
            f"{shape} is a DTensor (FSDP, tensor parallel): each rank has a part of the matrix only, and what is "
            "orthogonal is the whole; use DistributedDataParallel or one process, or torch.optim.AdamW"
        )
