"""How a flat float32 vector travels: a registry of codecs, little endian on the wire.

A new codec is its name in `names.py` and an entry in `_CODECS`; everything else looks it up there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, get_args

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from anabranch.errors import SpecError, UnusablePayload
from anabranch.merge._blocks import Float32, spans
from anabranch.merge.names import Codec as Codec


class _Implementation(NamedTuple):
    element_bytes: int
    encode: Callable[[Float32], memoryview]
    decode: Callable[[memoryview], Float32]


def encoded_bytes(codec: Codec, size: int, exact: int = 0) -> int:
    """Bytes of `size` elements on the wire, the last `exact` as fp32. Raises SpecError for an unknown codec."""
    return _find(codec).element_bytes * (size - exact) + _CODECS["fp32"].element_bytes * exact


def encode(codec: Codec, flat: Float32, exact: int = 0) -> memoryview:
    """Bytes of `flat`, float32 [size]; fp32 is a view of `flat` itself where it is contiguous and native.

    The last `exact` elements are fp32 in any codec: a variance that was rounded may end below zero.

    bf16 and fp16 round to nearest, ties to even; inf stays inf, NaN stays NaN, and what lies above the largest
    value by half a step or more becomes inf. bf16: relative error at most 2⁻⁸, up to 3.3895e38. fp16: at most
    2⁻¹¹ from 6.1e-5 to 65,504, below that steps of 6.0e-8: three bits more where gradients lie. Raises SpecError
    for an unknown codec, ValueError for another dtype or more than one dimension.
    """
    implementation = _find(codec)
    if flat.dtype != np.float32 or flat.ndim != 1:
        raise ValueError(f"dtype {flat.dtype}, shape {flat.shape}: needed is a flat float32 vector")
    if not exact or implementation is _CODECS["fp32"]:
        return implementation.encode(flat)
    return memoryview(b"".join((implementation.encode(flat[:-exact]), _encode_fp32(flat[-exact:]))))


def decode(codec: Codec, buffer: bytes | bytearray | memoryview, size: int, exact: int = 0) -> Float32:
    """The `size` float32 values in `buffer`; read-only, and a view of `buffer` where that is possible (fp32).

    `exact` as in `encode`. Raises UnusablePayload if the length is not that of `size` elements, SpecError for an
    unknown codec.
    """
    implementation = _find(codec)
    raw = memoryview(buffer).cast("B")
    expected = encoded_bytes(codec, size, exact)
    if raw.nbytes != expected:
        raise UnusablePayload(f"payload has {raw.nbytes} bytes, expected {expected} ({size} elements of {codec})")
    if not exact or implementation is _CODECS["fp32"]:
        flat = implementation.decode(raw)
    else:
        cut = implementation.element_bytes * (size - exact)
        flat = np.concatenate([implementation.decode(raw[:cut]), _decode_fp32(raw[cut:])])
    flat.flags.writeable = False
    return flat


def _encode_fp32(flat: Float32) -> memoryview:
    return np.ascontiguousarray(flat, dtype="<f4").view(np.uint8).data


def _decode_fp32(raw: memoryview) -> Float32:
    return np.frombuffer(raw, dtype="<f4").astype(np.float32, copy=False)


def _encode_half(kind: type[Any], flat: Float32) -> memoryview:
    rounded: NDArray[Any] = np.empty(flat.size, kind)
    with np.errstate(all="ignore"):
        for low, high in spans(0, flat.size):
            rounded[low:high] = flat[low:high]
    return rounded.view(np.uint16).astype("<u2", copy=False).view(np.uint8).data


def _decode_bf16(raw: memoryview) -> Float32:
    """A bfloat16 is the upper half of a float32: exact, whatever the bits."""
    halves = np.frombuffer(raw, dtype="<u2")
    words = np.empty(halves.size, np.uint32)
    for low, high in spans(0, halves.size):
        np.left_shift(halves[low:high], np.uint32(16), out=words[low:high], dtype=np.uint32)
    return words.view(np.float32)


def _decode_fp16(raw: memoryview) -> Float32:
    return np.frombuffer(raw, dtype="<f2").astype(np.float32)


_CODECS: dict[Codec, _Implementation] = {
    "fp32": _Implementation(4, _encode_fp32, _decode_fp32),
    "bf16": _Implementation(2, partial(_encode_half, ml_dtypes.bfloat16), _decode_bf16),
    "fp16": _Implementation(2, partial(_encode_half, np.float16), _decode_fp16),
}


def _find(codec: Codec) -> _Implementation:
    try:
        return _CODECS[codec]
    except KeyError:
        allowed = ", ".join(repr(name) for name in get_args(Codec))
        raise SpecError(f"codec = {codec!r}: unknown; allowed are {allowed}; choose one of them") from None
