"""Which tensors of a torch model a run synchronizes: what is trained, and the buffers that training changes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from anabranch.errors import UsageError
from anabranch.merge.fragments import Layout
from anabranch.merge.names import Kind
from anabranch.model import layout_for
from anabranch.spec import MergeSpec, RunSpec, is_running


def trainable(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters a run synchronizes: those that require gradients and have elements, each shared tensor once.

    Their names are the plain model's: `DistributedDataParallel`, `DataParallel` and `torch.compile` add nothing.
    Frozen parameters stay what each member has; for buffers see `buffers_of`. Raises `UsageError` if there are none,
    or if one cannot be synchronized: sharded (FSDP, DeepSpeed ZeRO-3, tensor parallel), complex, or without values
    yet.
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


def _unfit(name: str, parameter: torch.Tensor) -> str | None:
    """Why it cannot be synchronized, and what to do."""
    if _is_sharded(name, parameter):
        return (
            "is sharded over processes (FSDP, DeepSpeed ZeRO-3 or tensor parallel), which a run cannot synchronize "
            "yet: use DistributedDataParallel, or one process"
        )
    if isinstance(parameter, torch.nn.parameter.UninitializedParameter | torch.nn.parameter.UninitializedBuffer):
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


def _is_sharded(name: str, parameter: torch.Tensor) -> bool:
    tensors = sys.modules.get("torch.distributed.tensor")  # slow to import, and imported by whoever made a DTensor
    distributed = tensors is not None and isinstance(parameter, tensors.DTensor)
    return distributed or hasattr(parameter, "ds_id") or "_flat_param" in name or "_fsdp_wrapped_module" in name


def shapes(model: torch.nn.Module) -> list[tuple[str, Sequence[int]]]:
    """(name, shape) of what is trained, as `anabranch.model.layout_for` takes them."""
    return [(name, tuple(p.shape)) for name, p in trainable(model)]


@dataclass(frozen=True)
class Buffer:
    """One buffer, by where it is: modules may put another tensor in its place."""

    module: torch.nn.Module
    name: str
    shape: torch.Size
    kind: Kind

    @property
    def value(self) -> torch.Tensor | None:
        """What is there now; None if that is nothing of the shape that the run knows."""
        there = self.module._buffers.get(self.name)
        return there if there is not None and there.shape == self.shape else None

    @torch.no_grad()
    def put(self, value: torch.Tensor) -> None:
        """Give it the `value`, float32 of as many elements. What float32 cannot tell apart from it stays: a large
        number that nothing changes is not rounded by travelling."""
        if (there := self.value) is None:
            return
        new = value.to(there.device).view(self.shape)
        same = there.float() == new
        if self.kind == "counter":
            limits = torch.iinfo(there.dtype)
            new = new.double().round().clamp(limits.min, limits.max)
        there.copy_(torch.where(same, there, new.to(there.dtype)))


def buffers_of(model: torch.nn.Module, settings: MergeSpec) -> dict[str, Buffer]:
    """Those that travel, by name and in the model's own order: persistent ones with real numbers, as the settings say
    (`MergeSpec.carries`). `UsageError` if one cannot be synchronized. Unless the settings name it, one that holds
    infinities or NaN is a mask or a mark, and nothing that has an average."""
    inner = unwrapped(model)
    whole = all(parameter.requires_grad for parameter in inner.parameters())
    found: dict[str, Buffer] = {}
    for name, module, there in persistent_buffers(inner):
        if (kind := _kind(there)) is None or not settings.carries(name, whole=whole):
            continue
        if (reason := _unfit(name, there)) is not None:
            raise UsageError(f"buffer {name!r} {reason}")
        if there.numel() == 0 or (settings.buffers is None and not is_running(name) and not _finite(there)):
            continue
        found[name] = Buffer(module, name.rpartition(".")[2], there.shape, kind)
    return found


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.Tensor]]:
    """(name, the module it is in, value) of those that a checkpoint of the model has, each shared one once."""
    seen = set[int]()
    for path, module in unwrapped(model).named_modules():
        for name, there in module._buffers.items():
            if there is None or name in module._non_persistent_buffers_set or id(there) in seen:
                continue
            seen.add(id(there))
            yield f"{path}.{name}".removeprefix(".").replace("_orig_mod.", ""), module, there


def _finite(buffer: torch.Tensor) -> bool:
    return not buffer.is_floating_point() or bool(torch.isfinite(buffer).all())


def _kind(buffer: torch.Tensor) -> Kind | None:
    """None for what has no average and no largest one."""
    if buffer.is_floating_point():
        return "statistic"
    return None if buffer.dtype == torch.bool or buffer.is_complex() or buffer.is_quantized else "counter"


def layout_of(spec: RunSpec, model: torch.nn.Module, buffers: Mapping[str, Buffer]) -> Layout:
    """The run's layout of this model and those of its buffers that travel."""
    named = [*shapes(model), *((name, tuple(buffer.shape)) for name, buffer in buffers.items())]
    return layout_for(spec, named, {name: buffer.kind for name, buffer in buffers.items()})
