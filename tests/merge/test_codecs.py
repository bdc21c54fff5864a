"""Codecs: exact where they promise it, nearest-even where not, and loud about wrong lengths."""

from __future__ import annotations

import struct
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import SpecError, UnusablePayload
from anabranch.merge import _blocks
from anabranch.merge.codecs import Codec, decode, encode, encoded_bytes

CODECS: list[Codec] = list(get_args(Codec))
words = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def floats(bits: list[int]) -> _blocks.Float32:
    return np.array(bits, np.uint32).view(np.float32)


def nearest_bf16(bits: int) -> int:
    """Round-to-nearest-even of a float32's bits to its upper half, by integer arithmetic."""
    low, high = bits & 0xFFFF, bits >> 16
    return high + (low > 0x8000 or (low == 0x8000 and high & 1 == 1))


@given(words)
def test_fp32_keeps_every_bit(bits: list[int]) -> None:
    flat = floats(bits)
    wire = encode("fp32", flat)
    assert bytes(wire) == b"".join(struct.pack("<I", word) for word in bits)
    assert decode("fp32", bytes(wire), flat.size).tobytes() == flat.tobytes()


def test_fp32_copies_nothing() -> None:
    flat = np.arange(10, dtype=np.float32)
    wire = encode("fp32", flat)
    assert np.shares_memory(np.frombuffer(wire, np.uint8), flat)
    assert np.shares_memory(decode("fp32", wire, 10), flat)


@given(words)
def test_bf16_rounds_to_nearest_even(bits: list[int]) -> None:
    flat = floats(bits)
    wire = bytes(encode("bf16", flat))
    assert len(wire) == 2 * len(bits)
    for word, (half,) in zip(bits, struct.iter_unpack("<H", wire), strict=True):
        if word & 0x7FFFFFFF > 0x7F800000:
            assert half & 0x7FFF > 0x7F80, "NaN must stay NaN"
        else:
            assert half == nearest_bf16(word)


@given(words)
def test_fp16_rounds_as_ieee_754_says(bits: list[int]) -> None:
    flat = floats(bits)
    wire = bytes(encode("fp16", flat))
    with np.errstate(all="ignore"):
        expected = flat.astype(np.float16)
    assert np.array_equal(np.frombuffer(wire, "<f2"), expected, equal_nan=True)
    assert np.array_equal(decode("fp16", wire, flat.size), expected.astype(np.float32), equal_nan=True)


def test_fp16_is_nearer_than_bf16_where_outer_gradients_lie() -> None:
    flat = np.random.default_rng(0).normal(0, 1e-3, 4096).astype(np.float32)
    errors = {codec: float(np.abs(decode(codec, encode(codec, flat), flat.size) - flat).max()) for codec in CODECS}
    assert errors["fp32"] == 0.0
    assert errors["fp16"] < errors["bf16"] / 4


@given(st.lists(st.integers(0, 2**16 - 1), max_size=40))
def test_bf16_decodes_exactly(halves: list[int]) -> None:
    wire = struct.pack(f"<{len(halves)}H", *halves)
    assert decode("bf16", wire, len(halves)).tobytes() == floats([half << 16 for half in halves]).tobytes()


def test_bf16_extremes() -> None:
    flat = np.array([np.inf, -np.inf, 3.4e38, 3.3895e38, 1e-40, -0.0, 1 / 3], np.float32)
    back = decode("bf16", encode("bf16", flat), flat.size)
    assert back[0] == np.inf
    assert back[1] == -np.inf
    assert back[2] == np.inf  # nearest: above the last finite value by more than half a step
    assert np.isfinite(back[3])
    assert back[4] == pytest.approx(1e-40, rel=0.5)
    assert np.signbit(back[5])
    assert back[6] == pytest.approx(1 / 3, rel=2**-8)
    assert np.isnan(decode("bf16", encode("bf16", np.array([np.nan], np.float32)), 1)).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [0, 1, _blocks.BLOCK, _blocks.BLOCK + 3])
def test_sizes(codec: Codec, size: int) -> None:
    flat = np.random.default_rng(1).integers(-128, 128, size).astype(np.float32)  # exact in bf16
    wire = encode(codec, flat)
    assert wire.nbytes == encoded_bytes(codec, size)
    for buffer in (wire, bytes(wire), bytearray(wire), memoryview(b"x" + bytes(wire))[1:]):
        back = decode(codec, buffer, size)
        np.testing.assert_array_equal(back, flat)
        assert back.dtype == np.float32
        assert not back.flags.writeable


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("exact", [1, 7, 20])
def test_the_last_elements_may_travel_as_they_are(codec: Codec, exact: int) -> None:
    flat = np.random.default_rng(2).standard_normal(20).astype(np.float32)
    wire = encode(codec, flat, exact)
    assert wire.nbytes == encoded_bytes(codec, 20, exact)
    back = decode(codec, bytes(wire), 20, exact)
    np.testing.assert_array_equal(back[20 - exact :], flat[20 - exact :])
    np.testing.assert_array_equal(back[: 20 - exact], decode(codec, encode(codec, flat), 20)[: 20 - exact])
    assert not back.flags.writeable


@pytest.mark.parametrize("codec", CODECS)
def test_strided_and_read_only_input(codec: Codec) -> None:
    flat = np.arange(20, dtype=np.float32)
    flat.flags.writeable = False
    np.testing.assert_array_equal(decode(codec, encode(codec, flat), 20), flat)
    np.testing.assert_array_equal(decode(codec, encode(codec, flat[::2]), 10), flat[::2])


@pytest.mark.parametrize(("codec", "seen", "expected"), [("fp32", 11, 12), ("bf16", 12, 6), ("fp32", 0, 12)])
def test_wrong_lengths_name_both(codec: Codec, seen: int, expected: int) -> None:
    with pytest.raises(UnusablePayload, match=f"has {seen} bytes, expected {expected} "):
        decode(codec, bytes(seen), 3)


def test_unknown_codecs_name_the_known() -> None:
    for attempt in (
        lambda: encode("int3", np.zeros(1, np.float32)),  # type: ignore[arg-type]
        lambda: decode("int3", b"", 0),  # type: ignore[arg-type]
        lambda: encoded_bytes("int3", 0),  # type: ignore[arg-type]
    ):
        with pytest.raises(SpecError, match=r"'int3'.*'fp32', 'bf16'"):
            attempt()


def test_only_flat_float32() -> None:
    with pytest.raises(ValueError, match="needed is a flat float32 vector"):
        encode("fp32", np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        encode("bf16", np.zeros((2, 2), np.float32))
