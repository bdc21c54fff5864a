"""A torch model as a `ParameterStore`: Δ is computed on the model's device, transfers are flat fragments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from anabranch.errors import UsageError
from anabranch.workers.adoption import Float32

if TYPE_CHECKING:
    from anabranch.merge.fragments import Layout


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters a run synchronizes: those that require gradients, each shared tensor once."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise UsageError("the model has no parameter with requires_grad=True, so there is nothing to train together")
    return named


def shapes(model: torch.nn.Module) -> list[tuple[str, Sequence[int]]]:
    """(name, shape) in the model's own order, as `anabranch.model.layout_for` takes them."""
    return [(name, tuple(p.shape)) for name, p in trainable(model)]


class TorchStore:
    """Keeps one flat float32 base per fragment on the model's device (4 extra bytes per parameter)."""

    def __init__(self, model: torch.nn.Module, layout: Layout) -> None:
        named = dict(trainable(model))
        self._parts = [
            [(named[tensor.name], start, stop) for tensor, start, stop in fragment.segments]
            for fragment in layout.fragments
        ]
        device = next(iter(named.values())).device
        self._bases = [torch.empty(fragment.size, device=device) for fragment in layout.fragments]

    @torch.no_grad()
    def delta(self, fragment: int) -> Float32:
        result = torch.empty_like(self._bases[fragment])
        for parameter, start, stop in self._parts[fragment]:
            base = self._bases[fragment][start:stop]
            torch.sub(base, parameter.detach().reshape(-1).float(), out=result[start:stop])
        return _to_numpy(result)

    @torch.no_grad()
    def load(self, fragment: int, theta: Float32) -> None:
        base = self._bases[fragment]
        base.copy_(torch.from_numpy(np.require(theta, requirements=["W"]) if not theta.flags.writeable else theta))
        for parameter, start, stop in self._parts[fragment]:
            parameter.copy_(base[start:stop].view(parameter.shape))

    @torch.no_grad()
    def initial(self, fragment: int) -> Float32:
        parts = [parameter.detach().reshape(-1).float() for parameter, _, _ in self._parts[fragment]]
        return _to_numpy(torch.cat(parts))


def _to_numpy(flat: torch.Tensor) -> Float32:
    array: Float32 = flat.cpu().numpy()
    return array
