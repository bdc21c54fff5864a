"""The formulas again, in float64 and as plainly as they can be written, sharing no code with the package."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def average(deltas: Sequence[NDArray[np.float32]], weights: Sequence[float]) -> Vector:
    """Σ w d / Σ w."""
    total = np.zeros(deltas[0].shape, np.float64)
    for delta, weight in zip(deltas, weights, strict=True):
        total += weight * delta.astype(np.float64)
    return total / sum(weights)


def radial(deltas: Sequence[NDArray[np.float32]], weights: Sequence[float]) -> Vector:
    """(Σ w ‖d‖ / Σ w) · φ(Σ w φ(d)), or the average where the directions cancel."""
    norms = [float(np.sqrt((delta.astype(np.float64) ** 2).sum())) for delta in deltas]
    direction = np.zeros(deltas[0].shape, np.float64)
    for delta, weight, norm in zip(deltas, weights, norms, strict=True):
        if norm > 0:
            direction += weight * delta.astype(np.float64) / norm
    length = float(np.sqrt((direction**2).sum()))
    if length <= 1e-6 * sum(weights):
        return average(deltas, weights)
    mean = sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / sum(weights)
    return direction * (mean / length)


class Nesterov:
    """SGD with Nesterov momentum on a list of floats."""

    def __init__(self, theta: Sequence[float], lr: float, momentum: float) -> None:
        self.theta = [float(value) for value in theta]
        self.buf = [0.0] * len(self.theta)
        self.lr = lr
        self.momentum = momentum

    def step(self, gradient: Sequence[float]) -> None:
        """One step, in place."""
        for i, g in enumerate(gradient):
            self.buf[i] = self.momentum * self.buf[i] + g
            self.theta[i] -= self.lr * (g + self.momentum * self.buf[i])
