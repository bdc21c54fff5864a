"""One outer gradient out of several workers' deltas: weighted or radial-directional average, per tensor.

Deltas are d_k = Θ_base − θ_k, weights w_k (see `weights`), φ(x) = x/‖x‖ with φ(0) = 0:

    average   Σ w d / Σ w
    radial    (Σ w ‖d‖ / Σ w) · φ(Σ w φ(d))

Source: Decoupled DiLoCo (arXiv 2604.21428). Outer gradients of different workers are nearly orthogonal, so an
average shrinks their norm like 1/√M; radial keeps it. That is so in many dimensions: a tensor of a few elements
(`RADIAL_FROM`) is averaged under either rule. Three passes over cache-sized blocks: norms of the
deltas, combination (and its norm), scaling. Values that leave float32's comfortable range take a float64
path.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

import numpy as np

from anabranch.errors import SpecError
from anabranch.merge._blocks import (
    F32_MAX,
    Float32,
    Float64,
    MapBlocks,
    run_blocks,
    scratch,
    spans,
    sum_squares,
    sum_squares_exact,
)
from anabranch.merge.fragments import Fragment, TensorSpec
from anabranch.merge.names import Rule as Rule

CANCELLED = 1e-6
"""Below this ‖Σ w φ(d)‖ / Σ w the direction is noise, and the weighted average is used."""

RADIAL_FROM = 16
"""Elements below which the radial rule averages, too. Of a scalar the direction is a sign: +0.1, +0.1, −1.0 would
give +0.4, away from where the workers went on average. Measured (benchmarks/small_tensors.py): with one or two
elements a radial merge points worse than the average, and up to one in seven points against it; its gain in direction
grows until 16, where the average's norm has shrunk evenly, too (to within 15 %): that is what radial makes good."""

_DELICATE = 1 / 32  # below this ratio the direction is computed in float64, lest float32's rounding shows
_SAFE_LOW, _SAFE_HIGH = 2.0**-60, 2.0**60  # coefficients and norms the float32 path may meet


@dataclass(frozen=True)
class MergeRules:
    """Which average for embedding tensors and which for all others. Raises SpecError for an unknown one."""

    matrix: Rule = "radial"
    embedding: Rule = "average"

    def __post_init__(self) -> None:
        for key, rule in (("matrix", self.matrix), ("embedding", self.embedding)):
            if rule not in get_args(Rule):
                allowed = " and ".join(map(repr, get_args(Rule)))
                raise SpecError(f"merge.{key} = {rule!r}: allowed are {allowed}; choose one of them")

    def rule(self, tensor: TensorSpec) -> Rule:
        """The rule for this tensor."""
        if tensor.size < RADIAL_FROM or tensor.is_buffer:
            return "average"
        return self.embedding if tensor.kind == "embedding" else self.matrix


def merge_fragment(
    fragment: Fragment,
    deltas: Sequence[Float32],
    weights: Sequence[float],
    rules: MergeRules,
    *,
    map_blocks: MapBlocks = map,
    out: Float32 | None = None,
) -> Float32 | None:
    """Merge contributions to one fragment into its outer gradient.

    `deltas`: one flat float32 vector [fragment.size] per contributor, finite (`guards.inspect` sees to
    that; what comes of a non-finite one is unspecified). `weights`: as many finite numbers >= 0; only their
    ratios matter. Returns a new float32 array [fragment.size] in the deltas' unit, or None if no weight is
    above zero: the round is skipped.

    Sums run in the order given: pass contributors in a fixed order, by worker id, and the bits do not
    depend on who arrived first. `map_blocks` may be an executor's `.map` (not of the one this call runs on: it would
    wait for its own thread); the bits do not depend on its number of threads either (one numpy build and
    instruction set). `out`, if given, receives and is the result: a warm array [fragment.size] that overlaps no
    delta saves the page faults of a new one, 15-30 % of the time for large fragments.

    Defined cases:
    - contributors of weight 0 are ignored entirely; if one remains, the result is an exact copy of its delta;
    - a zero delta counts in the mean norm and in Σ w, and has no direction; if all are zero, so is the
      result;
    - ‖Σ w φ(d)‖ <= 1e-6 Σ w (directions cancel): weighted average for that tensor;
    - a tensor of fewer than `RADIAL_FROM` elements, and a statistic: weighted average;
    - a counter: the largest, which is the smallest delta;
    - any finite float32 in, denormals included, gives finite numbers out: norms are float64, and a radial
      result too large for float32 (norms beyond 3e38, which a vector can have) saturates at its largest
      value.

    Raises ValueError for a negative or non-finite weight, unequal counts, or a delta or `out` of another dtype
    or shape.
    """
    _check(fragment, deltas, weights)
    if out is None:
        out = np.empty(fragment.size, np.float32)
    else:
        _check_out(fragment, deltas, out)
    taking = [(delta, weight) for delta, weight in zip(deltas, weights, strict=True) if weight > 0]
    if not taking:
        return None
    if len(taking) == 1:
        np.copyto(out, taking[0][0])
        return out
    largest = max(weight for _, weight in taking)  # first divided by it: sums of huge weights must not overflow
    total = sum(weight / largest for _, weight in taking)
    shares = tuple(weight / largest / total for _, weight in taking)
    merged = _Merge(fragment, tuple(delta for delta, _ in taking), shares, rules, map_blocks, out).run()
    for tensor, start, stop in fragment.buffers:
        if tensor.kind == "counter":
            np.minimum.reduce([delta[start:stop] for delta, _ in taking], out=merged[start:stop])
    return merged


def _check(fragment: Fragment, deltas: Sequence[Float32], weights: Sequence[float]) -> None:
    if len(deltas) != len(weights):
        raise ValueError(f"{len(deltas)} deltas but {len(weights)} weights: one weight per delta")
    for weight in weights:
        if not (math.isfinite(weight) and weight >= 0):
            raise ValueError(f"weight {weight}: must be finite and 0 or more")
    for delta in deltas:
        if delta.dtype != np.float32 or delta.shape != (fragment.size,):
            raise ValueError(
                f"delta of dtype {delta.dtype} and shape {delta.shape}: fragment {fragment.index} needs "
                f"float32 and shape ({fragment.size},)"
            )


def _check_out(fragment: Fragment, deltas: Sequence[Float32], out: Float32) -> None:
    if out.dtype != np.float32 or out.shape != (fragment.size,) or not out.flags.writeable:
        raise ValueError(f"out: fragment {fragment.index} needs writable float32 of shape ({fragment.size},)")
    if any(np.may_share_memory(out, delta) for delta in deltas):
        raise ValueError("out overlaps a delta: pass an array of its own")


class _Block(NamedTuple):
    tensor: int  # position in the fragment
    start: int
    stop: int


_BlockWork = Callable[[_Block], tuple[float, ...]]


@dataclass(frozen=True)
class _Plan:
    """How one tensor is combined: Σ coefficient_k · d_k, then (radial) scaled to `radius`."""

    coefficients: tuple[float, ...]
    radius: float | None = None  # None: a weighted average, nothing to scale

    @property
    def safe(self) -> bool:
        """Whether float32 arithmetic serves."""
        numbers = [*self.coefficients, *([] if self.radius is None else [self.radius])]
        return all(number == 0 or _SAFE_LOW <= number <= _SAFE_HIGH for number in numbers)


class _Merge:
    """One merge of two or more contributors; `shares` are their weights, summing to one."""

    def __init__(
        self,
        fragment: Fragment,
        deltas: tuple[Float32, ...],
        shares: tuple[float, ...],
        rules: MergeRules,
        map_blocks: MapBlocks,
        out: Float32,
    ) -> None:
        self.deltas = deltas
        self.shares = shares
        self.map_blocks = map_blocks
        self.out = out
        self.radial = [rules.rule(tensor) == "radial" for tensor in fragment.tensors]
        self.blocks = [
            [_Block(position, low, high) for low, high in spans(start, stop)]
            for position, (_, start, stop) in enumerate(fragment.segments)
        ]

    def run(self) -> Float32:
        """Norms, combination, scaling; tensors that float32 does not serve go through `_exact`."""
        plans = self._plans()
        fast = [position for position, plan in enumerate(plans) if plan.safe]
        norms = self._totals(self._combiner(plans), fast)
        exact = [position for position, plan in enumerate(plans) if not plan.safe]
        factors: dict[int, np.float32] = {}
        for position in fast:
            radius, norm = plans[position].radius, norms[position][0]
            if radius is None or radius == 0:
                continue
            if not _DELICATE * radius < norm < math.inf:
                exact.append(position)
            else:
                factors[position] = np.float32(radius / norm)
        self._scale(factors)
        for position in exact:
            self._exact(position)
        return self.out

    def _plans(self) -> list[_Plan]:
        deltas = self.deltas

        def squares(block: _Block) -> tuple[float, ...]:
            return tuple(sum_squares(delta[block.start : block.stop]) for delta in deltas)

        norms = self._totals(squares, [position for position, radial in enumerate(self.radial) if radial])
        return [
            self._radial_plan(norms[position]) if radial else _Plan(self.shares)
            for position, radial in enumerate(self.radial)
        ]

    def _radial_plan(self, norms: tuple[float, ...]) -> _Plan:
        """Coefficients share_k · radius / ‖d_k‖, so that the combination has the deltas' own scale."""
        radius = sum(share * norm for share, norm in zip(self.shares, norms, strict=True))
        return _Plan(
            tuple(share * (radius / norm) if norm else 0.0 for share, norm in zip(self.shares, norms, strict=True)),
            radius,
        )

    def _totals(self, work: _BlockWork, tensors: list[int]) -> dict[int, tuple[float, ...]]:
        """Per tensor the roots of what `work` returns, summed over its blocks in their order."""
        blocks = [block for position in tensors for block in self.blocks[position]]
        results = iter(run_blocks(self.map_blocks, work, blocks))
        totals: dict[int, tuple[float, ...]] = {}
        for position in tensors:
            rows = [next(results) for _ in self.blocks[position]]
            totals[position] = tuple(math.sqrt(sum(column)) for column in zip(*rows, strict=True))
        return totals

    def _combiner(self, plans: list[_Plan]) -> _BlockWork:
        """Work that puts a block's Σ c d into `out` in float32; returns the sum of squares or 0."""
        coefficients = [tuple(np.float32(c) for c in plan.coefficients) if plan.safe else () for plan in plans]

        def combine(block: _Block) -> tuple[float, ...]:
            position, low, high = block
            out, term = self.out[low:high], scratch(np.float32, high - low)
            try:
                with np.errstate(over="raise", invalid="raise", under="ignore"):
                    first, *rest = zip(self.deltas, coefficients[position], strict=True)
                    np.multiply(first[0][low:high], first[1], out=out)
                    for delta, coefficient in rest:
                        np.multiply(delta[low:high], coefficient, out=term)
                        np.add(out, term, out=out)
            except FloatingPointError:  # a rounded sum of shares above one, times float32's largest value
                if plans[position].radius is not None:
                    return (math.inf,)
                self._store_wide(block, plans[position].coefficients)
            return (sum_squares(out) if plans[position].radius else 0.0,)

        return combine

    def _scale(self, factors: dict[int, np.float32]) -> None:
        def scale(block: _Block) -> None:
            out = self.out[block.start : block.stop]
            with np.errstate(under="ignore"):
                np.multiply(out, factors[block.tensor], out=out)

        run_blocks(self.map_blocks, scale, [block for position in factors for block in self.blocks[position]])

    def _exact(self, position: int) -> None:
        """One tensor in float64, rounded once at the end."""
        coefficients = self.shares
        if self.radial[position]:
            norms = self._totals(
                lambda b: tuple(sum_squares_exact(delta[b.start : b.stop]) for delta in self.deltas),
                [position],
            )
            plan = self._radial_plan(norms[position])
            direction = self._totals(
                lambda b: (sum_squares_exact(self._combine_wide(b, plan.coefficients)),), [position]
            )
            radius, norm = plan.radius or 0.0, direction[position][0]
            if norm > CANCELLED * radius:
                coefficients = tuple(c * (radius / norm) for c in plan.coefficients)
        run_blocks(self.map_blocks, lambda b: self._store_wide(b, coefficients), self.blocks[position])

    def _combine_wide(self, block: _Block, coefficients: tuple[float, ...]) -> Float64:
        size = block.stop - block.start
        total, term = scratch(np.float64, size, "total"), scratch(np.float64, size, "term")
        total[:] = 0.0
        with np.errstate(all="ignore"):
            for delta, coefficient in zip(self.deltas, coefficients, strict=True):
                np.copyto(term, delta[block.start : block.stop])
                np.multiply(term, coefficient, out=term)
                np.add(total, term, out=total)
        return total

    def _store_wide(self, block: _Block, coefficients: tuple[float, ...]) -> None:
        total = self._combine_wide(block, coefficients)
        with np.errstate(all="ignore"):
            np.clip(total, -F32_MAX, F32_MAX, out=total)
            np.copyto(self.out[block.start : block.stop], total, casting="same_kind")
