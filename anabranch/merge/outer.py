"""The outer optimizer: SGD with Nesterov momentum on one fragment."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from anabranch.errors import SpecError
from anabranch.merge._blocks import Float32, MapBlocks, run_blocks, scratch, spans


@dataclass(frozen=True)
class OuterOptimizer:
    """buf' = μ·buf + g;  Θ' = Θ − lr·(g + μ·buf').  `lr` > 0, 0 <= `momentum` < 1, else SpecError.

    Source: Decoupled DiLoCo (arXiv 2604.21428); the gradient is Θ_base − θ, so it is subtracted like any
    other.
    """

    lr: float
    momentum: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise SpecError(f"outer.lr = {self.lr}: must be a finite number above 0; 1 is a good start")
        if not 0 <= self.momentum < 1:
            raise SpecError(f"outer.momentum = {self.momentum}: must be 0 or more and below 1; 0.9 is usual")

    def step(
        self,
        theta: Float32,
        buf: Float32 | None,
        gradient: Float32,
        *,
        plain: Iterable[tuple[int, int]] = (),
        map_blocks: MapBlocks = map,
    ) -> tuple[Float32, Float32]:
        """New parameters and new momentum; the inputs stay as they are.

        `theta`, `buf`, `gradient`: flat float32 [size]. `buf` None means zeros (the first step), bit for bit.
        Each operation is rounded to float32, in this order, so that a replay has the same bits:

            buf' = (μ · buf) + g
            Θ'   = Θ − (lr · (g + (μ · buf')))

        with μ and lr rounded to float32 first. In the spans `plain` (start, stop) Θ' = Θ − g and buf' = 0: what
        members have there is averaged, and nothing is gained by going further.

        Overflow gives inf without a warning: check with `guards.is_finite` before publishing. Raises ValueError for
        another dtype or unequal shapes.
        """
        _check(theta, buf, gradient)
        lr, momentum = np.float32(self.lr), np.float32(self.momentum)
        new_theta, new_buf = np.empty_like(theta), np.empty_like(theta)

        def update(span: tuple[int, int]) -> None:
            part = slice(*span)
            grad, moved, speed = gradient[part], new_theta[part], new_buf[part]
            change = scratch(np.float32, grad.size)
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                if buf is None:
                    np.add(grad, np.float32(0.0), out=speed)  # not a copy: -0.0 + 0.0 is 0.0
                else:
                    np.multiply(buf[part], momentum, out=speed)
                    np.add(speed, grad, out=speed)
                np.multiply(speed, momentum, out=change)
                np.add(grad, change, out=change)
                np.multiply(change, lr, out=change)
                np.subtract(theta[part], change, out=moved)

        run_blocks(map_blocks, update, list(spans(0, theta.size)))
        for start, stop in plain:
            with np.errstate(over="ignore", under="ignore", invalid="ignore"):
                np.subtract(theta[start:stop], gradient[start:stop], out=new_theta[start:stop])
            new_buf[start:stop] = 0.0
        return new_theta, new_buf


def _check(theta: Float32, buf: Float32 | None, gradient: Float32) -> None:
    given = [("theta", theta), ("gradient", gradient)] + ([] if buf is None else [("buf", buf)])
    for name, array in given:
        if array.dtype != np.float32 or array.ndim != 1 or array.shape != theta.shape:
            raise ValueError(
                f"{name} has dtype {array.dtype} and shape {array.shape}: needed are flat float32 vectors "
                f"of one length (theta: {theta.shape})"
            )
