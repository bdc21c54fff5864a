"""What taking part costs the training thread: step boundaries and codecs, without a server."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, get_args

import numpy as np
import torch

from anabranch.merge.codecs import Codec, decode, encode
from anabranch.model import Float32
from anabranch.queue.messages import Call, Verdict
from anabranch.spec import RunSpec
from anabranch.workers.member.adoption import adoption_of
from anabranch.workers.member.books import Books
from anabranch.workers.member.learner import Learner, NewVersion, Outgoing, Refusal
from anabranch.workers.tasks.base import TokenBatch
from anabranch.workers.tasks.gpt import GPTTask
from anabranch.workers.tensors import layout_of
from anabranch.workers.torch_store import TorchStore
from gpu_check.common import Bench, CheckFailed, Figures, ratio

_WARM_STEPS = 3
_HALF_STEP = 2.0**-8  # of a codec of 16 bits, relative
_LEAST = 2.0**-24  # and what it may lose at least: the smallest number of fp16


# --- check 2 ----------------------------------------------------------------------------------------------


def check_stall(bench: Bench) -> Figures:
    """How long a step boundary holds up training, per size of the model, with the base on the device and off it.

    Per interval (H/P steps) one fragment is snapshotted and one adopted, with work that is carried over where it was
    not merged: `share_of_step` is what snapshot and adoption take relative to one step, `share_of_training` relative
    to the interval.
    """
    spec = RunSpec()
    figures: Figures = {"fragments": spec.rounds.fragments, "interval_steps": spec.rounds.interval_steps, "sizes": {}}
    for name, options in bench.scale.sizes.items():
        if not bench.left_s:
            raise CheckFailed(f"no time was left for size {name}", figures)
        try:
            figures["sizes"][name] = _size(bench, spec, options)
        except torch.OutOfMemoryError:
            figures["sizes"][name] = {"fits": False}
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()  # the next size needs it, and so do the processes of other checks
    if not any(size["fits"] for size in figures["sizes"].values()):
        raise CheckFailed("no size fits into the device's memory", figures)
    return figures


def _size(bench: Bench, spec: RunSpec, options: Mapping[str, Any]) -> Figures:
    training = _Training(bench, options)
    for _ in range(_WARM_STEPS):
        training.step()
    step_s = bench.median_s(training.step)
    figures: Figures = {
        "fits": True,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "step_ms": _ms(step_s),
    }
    for key, offload in (("base_on_device", False), ("base_offloaded", True)):
        stalls = _Boundaries(bench, spec, training, offload_base=offload).measure()
        both_s = stalls["snapshot"] + stalls["adopt"]
        figures[key] = {
            **{f"{name}_ms": _ms(seconds) for name, seconds in stalls.items()},
            "share_of_step": ratio(both_s, step_s),
            "share_of_training": ratio(both_s, both_s + spec.rounds.interval_steps * step_s),
        }
    return figures


class _Training:
    """A model of the task `gpt` on the device, and its inner steps."""

    def __init__(self, bench: Bench, options: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        self._task = GPTTask(options)
        self.model = self._task.build_model(bench.device)
        self._optimizer = self._task.build_optimizer(self.model)
        self._batches: Iterator[TokenBatch] = self._task.batches(0, "gpu-check")
        self._device = bench.device

    def step(self) -> None:
        loss = self._task.loss(self.model, next(self._batches).to(self._device))
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


class _Boundaries:
    """Step boundaries of a real learner; calls and versions come from here instead of the I/O thread."""

    def __init__(self, bench: Bench, spec: RunSpec, training: _Training, *, offload_base: bool) -> None:
        self._bench, self._training = bench, training
        self._layout = layout_of(spec, training.model, {})
        self._store = TorchStore(training.model, self._layout, offload_base=offload_base)
        self._books = Books(len(self._layout.fragments))
        self._codec: Codec = spec.workers.codec
        self._learner = Learner(self._store, adoption_of(spec.workers), self._books, self._codec)
        self._bases: dict[int, Float32] = {}
        self._sent: list[Outgoing | Refusal] = []
        self._adopted: list[int] = []

    def measure(self) -> dict[str, float]:
        """Seconds per fragment, medians over `repeats` rounds."""
        fragments = [fragment.index for fragment in self._layout.fragments]
        for fragment in fragments:
            self._adopt(fragment)
        taken: dict[str, list[float]] = {"snapshot": [], "adopt": [], "carry": [], "idle": []}
        for number in range(self._bench.scale.repeats + 1):
            fragment = fragments[number % len(fragments)]
            self._training.step()
            self._books.step(1)
            taken["snapshot"].append(self._snapshot(fragment))
            self._merged(fragment)
            taken["adopt"].append(self._adopt(fragment))
            self._training.step()
            self._books.step(1)
            taken["carry"].append(self._adopt(fragment, carried=True))
            taken["idle"].append(self._boundary())
        return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}

    def _merged(self, fragment: int) -> None:
        """All that was sent is in the next version: nothing has to be carried over to it."""
        base, tokens = self._books.version(fragment), self._books.holds(fragment)
        self._books.outcome(Verdict(incarnation=1, fragment=fragment, base=base, applied=True, tokens=tokens))

    def _adopt(self, fragment: int, carried: bool = False) -> float:
        """A new version arrives: the parameters as they are, read-only, as they come from a download. With work that
        was not merged, that has to be there on top of it."""
        size = self._layout.fragments[fragment].size
        live = self._store.initial(fragment)
        theta = decode("fp32", encode("fp32", live), size)
        expected = theta + (live - self._bases[fragment]) if carried else theta
        version = self._books.version(fragment) + 1
        self._learner.offer(NewVersion(fragment, version, version.to_bytes(32), theta))
        took_s = self._boundary()
        if self._adopted != [fragment]:
            raise CheckFailed(f"fragment {fragment} was not adopted")
        got = self._store.initial(fragment)
        if not np.array_equal(got, expected) and not (carried and np.allclose(got, expected, rtol=1e-5, atol=1e-6)):
            raise CheckFailed(f"fragment {fragment} is not what was adopted")
        self._bases[fragment] = theta
        return took_s

    def _snapshot(self, fragment: int) -> float:
        """The fragment is called for; its Δ has to be what is computed here, from parameters read back."""
        version, self._sent = self._books.version(fragment), []
        self._learner.call(Call(round=1, fragment=fragment, timeline="", base=version, called=[1]))
        took_s = self._boundary()
        match self._sent:
            case [Outgoing() as answer]:
                pass
            case other:
                raise CheckFailed(f"fragment {fragment} was called for, the answer is {other!r}")
        expected = self._bases[fragment] - self._store.initial(fragment)
        got = decode(self._codec, answer.data, expected.size)
        if not expected.any() or not np.allclose(got, expected, rtol=_HALF_STEP, atol=1e-12):
            raise CheckFailed(f"Δ of fragment {fragment} is not what training changed")
        return took_s

    def _boundary(self) -> float:
        def boundary() -> None:
            self._adopted = self._learner.boundary(None, self._sent.append)

        return self._bench.seconds(boundary)


# --- check 3 ----------------------------------------------------------------------------------------------


def check_codecs(bench: Bench) -> Figures:
    """How fast a fragment gets from the device into a codec's bytes and back, in GB/s of float32.

    `…_of_copy`: relative to the bare copy between device and host, in the same run.
    """
    elements = bench.scale.elements
    flat = torch.randn(elements, device=bench.device)
    host = flat.cpu()
    speed = partial(_gb_per_s, bench, 4 * elements)
    down = speed(lambda: flat.to("cpu", copy=True))
    up = speed(lambda: host.to(bench.device, copy=True))
    figures: Figures = {
        "elements": elements,
        "copy_to_host_gb_per_s": round(down, 2),
        "copy_to_device_gb_per_s": round(up, 2),
        "pinned_of_copy": None,  # what pinned memory would make of the copy to the host
        "cast_on_device_of_copy": ratio(speed(lambda: flat.bfloat16().to("cpu", copy=True)), down),
        "codecs": {},
    }
    if bench.device.type == "cuda":
        pinned = torch.empty(elements, pin_memory=True)
        figures["pinned_of_copy"] = ratio(speed(lambda: pinned.copy_(flat)), down)
    for codec in get_args(Codec):
        figures["codecs"][codec] = _codec(bench, codec, flat, down, up)
    return figures


def _codec(bench: Bench, codec: Codec, flat: torch.Tensor, down: float, up: float) -> Figures:
    """`down`, `up`: speeds of the bare copies."""
    data = encode(codec, flat.cpu().numpy())

    def back() -> torch.Tensor:
        theta = decode(codec, data, flat.numel())
        return torch.from_numpy(np.require(theta, requirements=["W"])).to(bench.device)

    exact = codec == "fp32"
    if not torch.allclose(back(), flat, rtol=0.0 if exact else _HALF_STEP, atol=0.0 if exact else _LEAST):
        raise CheckFailed(f"{codec}: what is decoded is not what was encoded")
    encoding = _gb_per_s(bench, 4 * flat.numel(), lambda: encode(codec, flat.cpu().numpy()))
    decoding = _gb_per_s(bench, 4 * flat.numel(), back)
    return {
        "encode_gb_per_s": round(encoding, 2),
        "decode_gb_per_s": round(decoding, 2),
        "encode_of_copy": ratio(encoding, down),
        "decode_of_copy": ratio(decoding, up),
    }


def _gb_per_s(bench: Bench, size: int, work: Callable[[], object]) -> float:
    return size / bench.median_s(work) / 1e9


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
