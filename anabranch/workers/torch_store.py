"""A torch model as a `ParameterStore`: Δ is computed on the model's device, transfers are flat fragments."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import torch

from anabranch.merge.fragments import Layout
from anabranch.workers.copies import Adopter
from anabranch.workers.member.adoption import Float32
from anabranch.workers.tensors import Buffer, trainable

log = logging.getLogger("anabranch.worker")


class TorchStore:
    """Keeps one flat float32 base per fragment: 4 extra bytes per parameter on the model's device, or on the host.

    Whatever the model's dtype, base and Δ are float32. A parameter in half precision rounds what it adopts, so its
    base is rounded, too: Δ is what was trained, and exactly zero before that. The run's own Θ stays float32.

    Buffers are overwritten by whatever policy: it may keep work, and in them is none.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        layout: Layout,
        buffers: Mapping[str, Buffer] | None = None,
        *,
        offload_base: bool = False,
        adopter: Adopter | None = None,
    ) -> None:
        """`buffers`: those that the layout has (`buffers_of`). `offload_base`: keep the base on the host; a snapshot
        then moves one fragment at a time to the device. `adopter`: what writes to parameters, and to an optimizer's
        copies of them."""
        named, buffers = dict(trainable(model)), buffers or {}
        self._parts = [
            [(tensor.name, named[tensor.name], start, stop) for tensor, start, stop in found if not tensor.is_buffer]
            for found in (fragment.segments for fragment in layout.fragments)
        ]
        self._buffers = [
            [(buffers[tensor.name], start, stop) for tensor, start, stop in fragment.buffers]
            for fragment in layout.fragments
        ]
        self._weights = [fragment.weights for fragment in layout.fragments]
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
        for buffer, start, stop in self._buffers[fragment]:
            there = buffer.value
            result[start:stop] = 0 if there is None else kept[start:stop] - self._flat(there)
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
        if not bool(torch.isfinite(live[: self._weights[fragment]]).all()):
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
        for buffer, start, stop in self._buffers[fragment]:
            if buffer.kind == "counter":
                kept[start:stop].round_()
            elif (there := buffer.value) is not None:
                kept[start:stop] = kept[start:stop].to(there.dtype)
            buffer.put(kept[start:stop])

    def _live(self, fragment: int) -> torch.Tensor:
        """What is live, as a new flat float32 vector on the model's device."""
        parts = [self._flat(parameter) for _, parameter, _, _ in self._parts[fragment]]
        for buffer, start, stop in self._buffers[fragment]:
            there = buffer.value
            parts.append(self._bases[fragment][start:stop] if there is None else self._flat(there))
        return torch.cat([part.to(self._device) for part in parts])

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().reshape(-1).to(self._device, torch.float32)

    def _on_device(self, flat: Float32) -> torch.Tensor:
        array = flat if flat.flags.writeable else np.require(flat, requirements=["W"])
        return torch.from_numpy(array).to(self._device)

    @torch.no_grad()
    def initial(self, fragment: int) -> Float32:
        return _to_numpy(self._live(fragment))


def _to_numpy(flat: torch.Tensor) -> Float32:
    array: Float32 = flat.cpu().numpy()
    return array
