"""What may enter a merge: right length, finite, not absurdly large."""

from __future__ import annotations

import math

import numpy as np

from anabranch.errors import UnusablePayload
from anabranch.merge._blocks import Float32, scratch, spans, sum_squares
from anabranch.merge.fragments import Fragment


def norm(flat: Float32) -> float:
    """Euclidean norm of a flat float32 vector, in its own unit; the same bits every time.

    Relative error below 2e-6, typically 1e-8 (see `_blocks.sum_squares`), no overflow; inf or NaN exactly
    if a value is.
    """
    return math.sqrt(sum(sum_squares(flat[low:high]) for low, high in spans(0, flat.size)))


def is_finite(flat: Float32) -> bool:
    """Whether no value of a flat float32 vector is inf or NaN; stops at the first block that has one."""
    blocks = spans(0, flat.size)
    return all(np.isfinite(flat[low:high], out=scratch(np.bool_, high - low)).all() for low, high in blocks)


def inspect(fragment: Fragment, flat: Float32, *, max_norm: float | None) -> float:
    """Norm of a contribution to `fragment`: flat float32 [fragment.size].

    Raises UnusablePayload for another length or dtype, for non-finite values (names the first tensor that has
    them), and for a norm above `max_norm` (None: no limit). Buffers do not count in the norm: of a variance or a
    counter no size is odd. One pass over a payload that is fine.
    """
    if flat.dtype != np.float32 or flat.shape != (fragment.size,):
        raise UnusablePayload(
            f"payload has dtype {flat.dtype} and shape {flat.shape}, expected float32 and ({fragment.size},)"
        )
    length = norm(flat[: fragment.weights])
    if not (math.isfinite(length) and is_finite(flat[fragment.weights :])):
        for tensor, start, stop in fragment.segments:
            if not is_finite(flat[start:stop]):
                raise UnusablePayload(f"tensor {tensor.name!r} has non-finite values")
    if max_norm is not None and length > max_norm:
        raise UnusablePayload(f"norm {length:.6g} exceeds the limit {max_norm:g} (limits.max_delta_norm)")
    return length
