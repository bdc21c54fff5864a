"""A torch model as a `ParameterStore`: Δ is computed on the model's device, transfers are flat fragments."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import numpy as np
import torch

from anabranch.errors import UsageError
from anabranch.merge.fragments import Layout
from anabranch.workers.copies import Adopter
from anabranch.workers.member.adoption import Float32

log = logging.getLogger("anabranch.worker")


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters a run synchronizes: those that require gradients and have elements, each shared tensor once.

    Their names are the plain model's: `DistributedDataParallel`, `DataParallel` and `torch.compile` add nothing.
    Frozen parameters and buffers stay what each member has. Raises `UsageError` if there are none, or if one cannot
    be synchronized: sharded (FSDP, DeepSpeed ZeRO-3, tensor parallel), complex, or without values yet.
    """
    named = [
        (name.replace("_orig_mod.", ""), p) for name, p in unwrapped(model).named_parameters() if p.requires_grad
    ]
    for name, parameter in named:
        if (reason := _unfit(name, parameter)) is not None:
            raise UsageError(f"parameter {name!r} {reason}")
    named = [(name, parameter) for name, parameter in named if parameter.numel() > 0]
    if not named:
        raise UsageError("the model has no parameter with requires_grad=True, so there is nothing to train together")
    return named


def _unfit(name: str, parameter: torch.nn.Parameter) -> str | None:
    """Why it cannot be synchronized, and what to do."""
    if _is_sharded(name, parameter):
        return (
            "is sharded over processes (FSDP, DeepSpeed ZeRO-3 or tensor parallel), which a run cannot synchronize "
            "yet: use DistributedDataParallel, or one process"
        )
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
        return "has no shape yet: run one batch through the model before it joins"
    if parameter.is_meta:
        return "is on the meta device, without values: load or initialise the model before it joins"
    if parameter.is_complex():
        return (
            f"is {str(parameter.dtype).removeprefix('torch.')}, and a run carries real numbers: make it a real one "
            "with a last dimension of 2 (torch.view_as_real; in forward torch.view_as_complex), or freeze it"
        )
    return None


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside of `DistributedDataParallel`, `DataParallel` and `torch.compile`, in whatever order."""
    while True:
        if isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), torch.nn.Module):
            model = inner
        else:
            return model


def _is_sharded(name: str, parameter: torch.nn.Parameter) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")  # slow to import, and imported by whoever made a DTensor
    distributed = tensors is not None and isinstance(parameter, tensors.DTensor)
    return distributed or hasattr(parameter, "ds_id") or "_flat_param" in name or "_fsdp_wrapped_module" in name


def shapes(model: torch.nn.Module) -> list[tuple[str, Sequence[int]]]:
    """(name, shape) in the model's own order, as `anabranch.model.layout_for` takes them."""
    return [(name, tuple(p.shape)) for name, p in trainable(model)]


class TorchStore:
    """Keeps one flat float32 base per fragment: 4 extra bytes per parameter on the model's device, or on the host.

    Whatever the model's dtype, base and Δ are float32. A parameter in half precision rounds what it adopts, so its
    base is rounded, too: Δ is what was trained, and exactly zero before that. The run's own Θ stays float32.
    """

    def __init__(
        self, model: torch.nn.Module, layout: Layout, *, offload_base: bool = False, adopter: Adopter | None = None
    ) -> None:
        """`offload_base`: keep the base on the host; a snapshot then moves one fragment at a time to the device.
        `adopter`: what writes to parameters, and to an optimizer's copies of them."""
        named = dict(trainable(model))
        self._parts = [
            [(tensor.name, named[tensor.name], start, stop) for tensor, start, stop in fragment.segments]
            for fragment in layout.fragments
        ]
        if rounded := [name for name, p in named.items() if p.dtype.itemsize < torch.float32.itemsize]:
            log.warning(
                "%d parameters are in half precision (%s …): they round what they adopt, and updates smaller than "
                "their spacing are lost; float32 parameters with autocast lose nothing", len(rounded), rounded[0],
            )  # fmt: skip
        self._adopter = adopter or Adopter()
        self._first = next(iter(named.values()))
        where = torch.device("cpu") if offload_base else self._device
        self._bases = [torch.empty(fragment.size, device=where) for fragment in layout.fragments]

    @property
    def _device(self) -> torch.device:
        """Where the model is now: it may move after it joined."""
        return self._first.device

    @torch.no_grad()
    def delta(self, fragment: int) -> Float32:
        kept = self._bases[fragment].to(self._device)
        result = torch.empty_like(kept)
        for _, parameter, start, stop in self._parts[fragment]:
            live = parameter.detach().reshape(-1).to(self._device)
            if live.dtype == torch.float64:  # rounded once, and after the difference was taken
                result[start:stop] = kept[start:stop].double() - live
            else:
                torch.sub(kept[start:stop], live.float(), out=result[start:stop])
        return _to_numpy(result)

    @torch.no_grad()
    def load(self, fragment: int, theta: Float32) -> None:
        new = self._on_device(theta)
        self._put(fragment, new, new)

    @torch.no_grad()
    def blend(self, fragment: int, theta: Float32, alpha: float) -> bool:
        new = self._on_device(theta)
        return self._replace(fragment, new, torch.lerp(new, self._live(fragment), alpha))

    @torch.no_grad()
    def rebase(self, fragment: int, theta: Float32, applied: Float32 | None) -> bool:
        new = self._on_device(theta)
        live = self._live(fragment).sub_(self._bases[fragment].to(new.device)).add_(new)
        if applied is not None:
            live.add_(self._on_device(applied))
        return self._replace(fragment, new, live)

    def _replace(self, fragment: int, base: torch.Tensor, live: torch.Tensor) -> bool:
        if not bool(torch.isfinite(live).all()):
            return False
        self._put(fragment, base, live)
        return True

    def _put(self, fragment: int, base: torch.Tensor, live: torch.Tensor) -> None:
        kept = self._bases[fragment].copy_(base)
        for _, parameter, start, stop in self._parts[fragment]:
            if parameter.dtype.itemsize < kept.dtype.itemsize:
                kept[start:stop] = kept[start:stop].to(parameter.dtype)
        self._adopter.put(
            (name, parameter, live[start:stop]) for name, parameter, start, stop in self._parts[fragment]
        )

    def _live(self, fragment: int) -> torch.Tensor:
        """The live parameters as a new flat float32 vector on their device."""
        parts = (parameter.detach().reshape(-1) for _, parameter, _, _ in self._parts[fragment])
        return torch.cat([part.to(self._device, torch.float32) for part in parts])

    def _on_device(self, flat: Float32) -> torch.Tensor:
        array = flat if flat.flags.writeable else np.require(flat, requirements=["W"])
        return torch.from_numpy(array).to(self._device)

    @torch.no_grad()
    def initial(self, fragment: int) -> Float32:
        return _to_numpy(self._live(fragment))


def _to_numpy(flat: torch.Tensor) -> Float32:
    array: Float32 = flat.cpu().numpy()
    return array
