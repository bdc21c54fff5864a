"""Levers that the product does not have (yet), for trials in virtual time: `Config.lever` is "name=value,name=value".

| name | what it does |
| --- | --- |
| `weights` | a contribution's weight to this power: 1 as it is, 0 everybody alike |
| `warmup` | the outer learning rate rises linearly over this share of the run |
| `settle` | from this share of the run on the merge is the plain average |
| `end` | the outer learning rate falls linearly to this factor at the end of the run |
| `slow` | a worker's inner learning rate times (1 / speed) to this power |
| `rho` | norm of a merged tensor between the average's (0) and the radial one (1), geometrically; all tensors |
| `lean` | its direction between the radial one (0) and the average's (1): Σ w ∣d∣^lean φ(d) |
| `part` | a merge moves the model by its workers' share, to this power, of everybody's tokens per second |
| `rates` | with 1, contributions weigh as their workers' tokens per second |
| `spectral` | singular values of a merged matrix go this far (0 to 1, geometrically) to its workers' mean ones |
| `flat` | its singular values to the power of one less this: 1 makes them all alike |
| `momenta` | on adoption this share of the inner momentum is the average over those who were merged |
| `agree` | each coordinate of the merged direction times its workers' agreement, ∣Σwφ∣ / √Σwφ², to this power |
| `matrices` | with 1, `momenta` is of what Muon steps only |
| `beta1`, `beta2`, `mu` | of the inner AdamW; Muon's momentum |
| `forget` | on adoption a fragment's inner momentum (of AdamW or Muon) is multiplied with this |
| `ema` | the judged model is an exponential average over versions with this factor |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from anabranch.merge.average import MergeRules, merge_fragment
from anabranch.merge.fragments import Fragment, Layout
from anabranch.merge.outer import OuterOptimizer
from anabranch.model import Float32
from anabranch.orchestrator.core import instructions as do
from anabranch.queue import messages
from anabranch.workers.tasks.gpt import GPT
from anabranch.workers.torch_store import TorchStore
from benchmarks.virtual import LATENCY, Trainer, World

MUON = ("momentum_buffer",)  # what Muon keeps of a matrix
FIRST = ("exp_avg", *MUON)  # and AdamW of everything else


def parse(text: str) -> dict[str, float]:
    """The levers of a run."""
    return {name: float(value) for name, value in (item.split("=") for item in text.split(",") if item)}


def agreed(fragment: Fragment, deltas: list[Float32], weights: list[float], power: float) -> Float32:
    """Radial, with a direction that leans to where the workers agree."""
    shares = np.array(weights) / sum(weights)
    merged = np.zeros(fragment.size, np.float32)
    for _, start, stop in fragment.segments:
        part = np.stack([delta[start:stop] for delta in deltas])
        norms = np.linalg.norm(part, axis=1)
        units = part / np.maximum(norms, 1e-30)[:, None]
        mean, square = shares @ units, shares @ units**2
        direction = mean * (np.abs(mean) / np.sqrt(np.maximum(square, 1e-60))) ** power
        merged[start:stop] = direction * (shares @ norms / max(float(np.linalg.norm(direction)), 1e-30))
    return merged


def between(fragment: Fragment, deltas: list[Float32], weights: list[float], lean: float, rho: float) -> Float32:
    """Between the average (lean 1, rho 0) and radial (lean 0, rho 1): in direction, and geometrically in norm."""
    shares = np.array(weights) / sum(weights)
    merged = np.zeros(fragment.size, np.float32)
    for _, start, stop in fragment.segments:
        part = np.stack([delta[start:stop] for delta in deltas])
        norms = np.maximum(np.linalg.norm(part, axis=1), 1e-30)
        direction = (shares * norms ** (lean - 1)) @ part
        norm = (shares @ norms) ** rho * np.linalg.norm(shares @ part) ** (1 - rho)
        merged[start:stop] = direction * (norm / max(float(np.linalg.norm(direction)), 1e-30))
    return merged


def respread(
    fragment: Fragment, deltas: list[Float32], weights: list[float], merged: Float32, power: float, flat: float
) -> None:
    """In place: matrices keep singular vectors and norm; an average of steps that disagree has a steeper spectrum."""
    shares = torch.tensor(weights) / sum(weights)
    for tensor, start, stop in fragment.segments:
        if len(tensor.shape) != 2 or tensor.kind != "weights":
            continue
        part = torch.from_numpy(merged[start:stop]).view(tensor.shape)
        left, values, right = torch.linalg.svd(part, full_matrices=False)
        own = [
            torch.linalg.svdvals(torch.from_numpy(delta[start:stop].copy()).view(tensor.shape)) for delta in deltas
        ]
        wanted = (shares @ torch.stack(own)).clamp(min=1e-30) ** power * values.clamp(min=1e-30) ** (1 - power - flat)
        part.copy_((left * (wanted * (values.norm() / wanted.norm()))) @ right)


class ForgetfulStore(TorchStore):
    """Forgets inner momentum on adoption."""

    def __init__(self, model: GPT, layout: Layout, optimizer: torch.optim.Optimizer, keep: float) -> None:
        super().__init__(model, layout)
        self._optimizer, self._keep = optimizer, keep

    def _put(self, fragment: int, base: torch.Tensor, live: torch.Tensor) -> None:
        super()._put(fragment, base, live)
        for momentum in first_moments(self, self._optimizer, fragment):
            if momentum is not None:
                momentum.mul_(self._keep)


class LeverWorld(World):
    """A world with some of them pulled."""

    levers: dict[str, float]
    _averages: list[Float32]
    _momenta: dict[int, list[torch.Tensor | None]]

    def __post_init__(self) -> None:
        self.levers, self._averages, self._momenta = {}, [], {}
        super().__post_init__()

    @property
    def _rates(self) -> dict[int, float]:
        """Tokens per unit of time, by incarnation."""
        return {w.incarnation: w.books.processed / max(1, w.books.steps) / w.step_s for w in self.workers}

    @property
    def _share(self) -> float:
        return min(1.0, self.now / self.end)

    def _gradient(self, order: do.Merge) -> Float32:
        power = self.levers.get("weights", 1.0)
        weights = [weight**power for _, weight in order.parts]
        if self.levers.get("rates"):
            weights = [self._rates[offer.message.incarnation] for offer, _ in order.parts]
        plain = self._share >= self.levers.get("settle", 2.0)
        rules = MergeRules(matrix="average") if plain else self._rules
        deltas = [self._payloads[offer.entry] for offer, _ in order.parts]
        fragment = self.layout.fragments[order.fragment]
        gradient = merge_fragment(fragment, deltas, weights, rules)
        if power := self.levers.get("agree", 0.0):
            gradient = agreed(fragment, deltas, weights, power)
        if "rho" in self.levers or "lean" in self.levers:
            gradient = between(fragment, deltas, weights, self.levers.get("lean", 0.0), self.levers.get("rho", 1.0))
        assert gradient is not None
        power, flat = self.levers.get("spectral", 0.0), self.levers.get("flat", 0.0)
        if power or flat:
            respread(fragment, deltas, weights, gradient, power, flat)
        if power := self.levers.get("part", 0.0):
            share = sum(self._rates[offer.message.incarnation] for offer, _ in order.parts) / sum(
                self._rates.values()
            )
            gradient *= np.float32(share**power)
        return gradient

    def _optimizer(self) -> OuterOptimizer:
        warmup, end = self.levers.get("warmup", 0.0), self.levers.get("end", 1.0)
        factor = min(1.0, 0.05 + self._share / warmup) if warmup else 1.0
        factor *= 1 + (end - 1) * self._share
        return OuterOptimizer(self._outer.lr * factor, self._outer.momentum)

    def _merge(self, order: do.Merge) -> None:
        super()._merge(order)
        if "momenta" in self.levers:
            weights = {offer.message.incarnation: weight for offer, weight in order.parts}
            merged = [(w.trainer, weights[w.incarnation]) for w in self.workers if w.incarnation in weights]
            keys = MUON if self.levers.get("matrices") else FIRST
            self._momenta[order.round] = average_momentum(order.fragment, merged, keys)

    def judged(self) -> list[Float32]:
        return self._averages or self.theta

    def _commit(self, merged: messages.Merged) -> None:
        super()._commit(merged)
        if (momenta := self._momenta.pop(merged.round, None)) is not None:
            share = self.levers["momenta"]
            self.engine.at(self.now + LATENCY, lambda: self._pass_on(merged.fragment, momenta, share))
        keep = self.levers.get("ema", 0.0)
        if keep:
            if not self._averages:
                self._averages = [theta.copy() for theta in self.theta]
            old, new = self._averages[merged.fragment], self.theta[merged.fragment]
            self._averages[merged.fragment] = (keep * old + (1 - keep) * new).astype(new.dtype)

    def _pass_on(self, fragment: int, momenta: list[torch.Tensor | None], share: float) -> None:
        for worker in self.workers:
            for own, merged in zip(momenta_of(fragment, worker.trainer), momenta, strict=True):
                if own is not None and merged is not None:
                    own.lerp_(merged, share)


def momenta_of(fragment: int, trainer: Trainer, keys: Sequence[str] = FIRST) -> list[torch.Tensor | None]:
    assert isinstance(trainer.store, TorchStore)
    return first_moments(trainer.store, trainer.optimizer, fragment, keys)  # type: ignore[attr-defined]


def first_moments(
    store: TorchStore, optimizer: torch.optim.Optimizer, fragment: int, keys: Sequence[str] = FIRST
) -> list[torch.Tensor | None]:
    """What an optimizer keeps of each tensor of a fragment under one of these keys; None where there is nothing."""
    states = [optimizer.state.get(parameter, {}) for _, parameter, _, _ in store._parts[fragment]]
    return [next((state[key] for key in keys if key in state), None) for state in states]


def average_momentum(
    fragment: int, merged: list[tuple[Trainer, float]], keys: Sequence[str]
) -> list[torch.Tensor | None]:
    total = sum(weight for _, weight in merged)
    columns = zip(*(momenta_of(fragment, trainer, keys) for trainer, _ in merged), strict=True)
    weights = [weight / total for _, weight in merged]
    found: list[torch.Tensor | None] = []
    for column in columns:
        parts = [weight * tensor for weight, tensor in zip(weights, column, strict=True) if tensor is not None]
        found.append(torch.stack(parts).sum(0) if len(parts) == len(weights) else None)
    return found
