"""Numbers that people's programs hand over, checked at once: `UsageError` names key, value and what is allowed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from anabranch.errors import UsageError

if TYPE_CHECKING:
    import torch

STEP_TOKENS = 2**40  # a contribution, of one step or more, may not claim more
_SHOWN = 80  # characters of a value that is no number


def whole(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """A whole number: an int, numpy's, a tensor of no dimensions, or a float without a fraction; no bool.

    Reading a tensor waits for its device.
    """
    allowed = f"a whole number, {least:,} to {most:,}" if most is not None else f"a whole number, at least {least:,}"
    number = _plain(value)
    if isinstance(number, float):
        number = int(number) if number.is_integer() else None
    if number is None or number < least or (most is not None and number > most):
        raise UsageError(f"{name} = {_shown(value)}: allowed is {allowed}")
    return number


def real(
    name: str, value: Any, *, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> float:
    """A number in a range, not infinite: an int, a float, numpy's, or a tensor of no dimensions; no bool."""
    number = _plain(value)
    if number is None or not -math.inf < number < math.inf or not (above < number <= most and number >= least):
        bounds = (("above", above), ("at least", least), ("at most", most))
        allowed = " and ".join(f"{word} {bound:g}" for word, bound in bounds if math.isfinite(bound))
        raise UsageError(f"{name} = {_shown(value)}: allowed is a number, {allowed or 'not infinite'}")
    return float(number)


def one_value(name: str, value: Any) -> torch.Tensor | float | None:
    """A loss as it is handed over: a tensor of one element (left unread), any number (NaN, too), or None."""
    if value is None or (_is_tensor(value) and value.numel() == 1 and not value.is_complex()):
        return value  # type: ignore[no-any-return]
    if not _is_tensor(value) and (number := _plain(value)) is not None:
        return float(number)
    raise UsageError(f"{name} = {_shown(value)}: allowed is a number, a tensor of one element, or None")


def _is_tensor(value: Any) -> bool:
    """Of torch, which is slow to import and not needed for numbers."""
    return hasattr(value, "numel") and hasattr(value, "detach")


def _plain(value: Any) -> int | float | None:
    """As Python's own number; None if it is none."""
    if hasattr(value, "ndim") and hasattr(value, "item"):
        if value.ndim != 0:
            return None
        try:
            value = value.item()
        except RuntimeError:  # a tensor without data
            return None
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _shown(value: Any) -> str:
    if getattr(value, "ndim", 0):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
