"""From which copy does a run go on: what is stored, what this process held, or a checkpoint? Pure.

Never silently from an older one, and never further back than needed.
"""

from __future__ import annotations

from typing import NamedTuple


class Place(NamedTuple):
    """Where in a run's history a copy was made. A later timeline was begun by whoever knew that the one before had
    lost something, so it comes first."""

    timeline: int
    tokens: int
    broadcast: int  # entries


def suspicion(*, born: bool, damage: str | None, lost: bool, life: tuple[str | None, str | None]) -> str | None:
    """Why the server may have less than it acknowledged, None if it cannot. `lost`: this process noticed it.
    `life`: run_id of the server that the stored run names, and of the one that answers."""
    if damage is not None:
        return damage
    if not born:
        return "the server holds nothing of this run any more"
    if lost:
        return "the server lost acknowledged writes, or was started again"
    if None not in life and life[0] != life[1]:
        return "the server was started again, or another one took its place: its last writes may be lost"
    return None


def is_overtaken(memory: Place, stored: Place | None) -> bool:
    """Whether another leader went on without what this process held."""
    return stored is not None and memory.timeline < stored.timeline


def is_put_back(copy: Place, stored: Place | None, damage: str | None) -> bool:
    """Whether a copy takes the place of what is stored (None: nothing is)."""
    return damage is not None or stored is None or copy > stored


def nothing_left(run: str, *, born: bool, damage: str | None, saw_model: bool) -> str | None:
    """Without any copy: why nothing may be written, None if the run can begin or go on. Whoever led may still hold
    it."""
    if damage is not None:
        return (
            f"run {run!r}: {damage}, and there is no checkpoint to go on from: nothing is written. "
            "Give --checkpoints, or `anabranch restore` one"
        )
    if saw_model and not born:
        return (
            f"run {run!r} was under way, and the server holds nothing of it any more. This synchronizer "
            "has no copy: it ends, no new model is begun. Give --checkpoints to all synchronizers of a run"
        )
    return None
