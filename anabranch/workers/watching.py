"""What becomes of a model after it joined: whatever is not synchronized any more, or never was, is said once.

Looked at when a step ends, at most once a second: a walk over the parameters takes some microseconds each.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterator

import torch

from anabranch.spec import is_running
from anabranch.workers.tensors import persistent_buffers, trainable, unwrapped

log = logging.getLogger("anabranch.worker")

EVERY_S = 1.0
_NAMED = 3  # of the parameters in a warning

_STAY = "do not travel (merge.buffers says which do)"
_ADVICE = "close the session and join again to train them together (the run takes the same parameters from everybody)"


def warn_of_staying(model: torch.nn.Module, travel: Container[str], *, trains: bool) -> set[str]:
    """Once, when a session joins: the running statistics that do not travel, which are returned."""
    names = [name for name, _, _ in persistent_buffers(model) if is_running(name) and name not in travel]
    if names:
        effect = (
            "each worker keeps its own, and the evaluator and exported models do not have them"
            if trains
            else "this model has its own, from before training: what is measured in eval mode is not the run's model"
        )
        log.warning("%d buffers are changed by training and %s: %s; %s", len(names), _STAY, _shown(names), effect)
    return set(names)


def _shown(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (" …" if len(names) > _NAMED else "")


class Watch:
    """Of one session. Call it in the training thread."""

    def __init__(
        self,
        model: torch.nn.Module,
        travel: Container[str] = frozenset(),
        *,
        trains: bool = True,
        every_s: float = EVERY_S,
    ) -> None:
        """`travel`: names of the buffers that do."""
        self._model = model
        self._named = warn_of_staying(model, travel, trains=trains)
        self._travel = travel
        self._every_s = every_s
        self._known = {name: (parameter, parameter.dtype) for name, parameter in trainable(model)}
        self._buffers = {name: _mark(buffer) for name, buffer in self._staying()}
        self._said: set[tuple[str, str]] = set()
        self._next_at = time.monotonic() + every_s

    def look(self) -> None:
        """Warn of what has changed since joining and was not named yet."""
        if (now := time.monotonic()) < self._next_at:
            return
        self._next_at = now + self._every_s
        there = {n.replace("_orig_mod.", ""): p for n, p in unwrapped(self._model).named_parameters()}
        self._say(
            "trained here since the session joined, but not synchronized",
            [n for n, p in there.items() if p.requires_grad and n not in self._known and p.numel() > 0],
            _ADVICE,
        )
        self._say(
            "replaced by other objects since the session joined: the new ones are not synchronized",
            [n for n, (p, _) in self._known.items() if n in there and there[n] is not p],
            f"change values in place (parameter.copy_), or {_ADVICE}",
        )
        self._say(
            "no longer in the model, but still synchronized",
            [n for n in self._known if n not in there],
            _ADVICE,
        )
        self._say(
            "of another dtype than when the session joined: they are still synchronized, and half precision rounds",
            [n for n, (p, dtype) in self._known.items() if there.get(n) is p and p.dtype != dtype],
            "cast the model before it joins",
        )
        self._say(
            f"changed by training and {_STAY}",
            [n for n, b in self._staying() if n not in self._named and _mark(b) != self._buffers.get(n)],
            "each worker keeps its own",
            kind="buffers",
        )

    def _staying(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Counters are nobody's business."""
        for name, _, there in persistent_buffers(self._model):
            if name not in self._travel and (there.is_floating_point() or there.is_complex()):
                yield name, there

    def _say(self, what: str, names: list[str], advice: str, kind: str = "parameters") -> None:
        new = [name for name in names if (what, name) not in self._said]
        if new:
            self._said.update((what, name) for name in new)
            log.warning("%d %s are %s: %s; %s", len(new), kind, what, _shown(new), advice)


def _mark(buffer: torch.Tensor) -> tuple[int, int]:
    """Another one after it was written to, or replaced."""
    return buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version
