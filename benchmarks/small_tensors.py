"""From how many elements on the radial rule makes sense: `python -m benchmarks.small_tensors` prints a table.

Workers move along a common direction plus noise of their own, their norms differ by a log-normal factor. Per size:
the cosine of average and radial merge with the common direction, how much the average's norm scatters, and how often
a radial merge points against the average.
"""

from __future__ import annotations

import sys

import numpy as np

from anabranch.merge.average import CANCELLED

SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 256, 1024)
TRIALS = 2000
SPREAD = 0.5  # of the logarithm of the workers' norms


def one(rng: np.random.Generator, size: int, workers: int, signal: float) -> tuple[float, float, float, float]:
    """Cosines of average and radial, the average's share of the mean norm, whether radial is against it."""
    common = rng.standard_normal(size)
    common *= signal / np.linalg.norm(common)
    noise = rng.standard_normal((workers, size)) / np.sqrt(size)
    deltas = (common + noise) * np.exp(SPREAD * rng.standard_normal((workers, 1)))
    norms = np.linalg.norm(deltas, axis=1)
    average, direction = deltas.mean(axis=0), (deltas / norms[:, None]).sum(axis=0)
    length = float(np.linalg.norm(direction))
    radial = direction / length * norms.mean() if length > CANCELLED * workers else average
    share = np.linalg.norm(average) / norms.mean()
    against = float(np.dot(average, radial) < 0)
    cosines = [float(m @ common / np.linalg.norm(m) / signal) for m in (average, radial)]
    return cosines[0], cosines[1], float(share), against


def main() -> None:
    say = sys.stdout.write
    for workers, signal in ((3, 0.3), (3, 1.0), (8, 0.3)):
        say(f"\n{workers} workers, signal {signal} of the noise\n")
        say("elements  average  radial  norm  scatter  against\n")
        rng = np.random.default_rng(0)
        for size in SIZES:
            found = np.array([one(rng, size, workers, signal) for _ in range(TRIALS)])
            average, radial, share, against = found.mean(axis=0)
            scatter = found[:, 2].std() / share
            say(f"{size:8}  {average:7.3f}  {radial:6.3f}  {share:.2f}  {scatter:7.0%}  {against:7.1%}\n")


if __name__ == "__main__":
    main()
