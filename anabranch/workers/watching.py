"""What becomes of a model after it joined: whatever is not synchronized any more, or never was, is said once.

Looked at when a step ends, at most once a second: a walk over the parameters takes some microseconds each.
"""

from __future__ import annotations

import logging
import time

import torch

from anabranch.workers.torch_store import trainable, unwrapped

log = logging.getLogger("anabranch.worker")

EVERY_S = 1.0
_NAMED = 3  # of the parameters in a warning

_ADVICE = "close the session and join again to train them together (the run takes the same parameters from everybody)"


class Watch:
    """Of one session. Call it in the training thread."""

    def __init__(self, model: torch.nn.Module, every_s: float = EVERY_S) -> None:
        self._model = model
        self._every_s = every_s
        self._known = {name: (parameter, parameter.dtype) for name, parameter in trainable(model)}
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

    def _say(self, what: str, names: list[str], advice: str) -> None:
        new = [name for name in names if (what, name) not in self._said]
        if new:
            self._said.update((what, name) for name in new)
            shown = ", ".join(new[:_NAMED]) + (" …" if len(new) > _NAMED else "")
            log.warning("%d parameters are %s: %s; %s", len(new), what, shown, advice)
