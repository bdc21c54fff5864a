"""How much one contribution counts."""

from __future__ import annotations


def token_weight(tokens: int, steps: int) -> float:
    """Weight of a contribution: quantity times quality, `tokens * (tokens / steps)`.

    `tokens` and `steps` count what is in the delta: tokens trained on and inner steps made since the
    fragment was last synchronized. Units: tokens squared per step; only ratios matter to a merge. A worker
    that trained on nothing weighs 0.0. Source: Decoupled DiLoCo (arXiv 2604.21428), token weights.

    Raises ValueError for a negative count.
    """
    if tokens < 0 or steps < 0:
        raise ValueError(f"tokens and steps are counts, seen {tokens} and {steps}: both must be 0 or more")
    if tokens == 0 or steps == 0:
        return 0.0
    return tokens * (tokens / steps)
