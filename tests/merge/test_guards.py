"""Guards: what may enter a merge."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import UnusablePayload
from anabranch.merge import _blocks
from anabranch.merge.fragments import Fragment, TensorSpec
from anabranch.merge.guards import inspect, is_finite, norm

FRAGMENT = Fragment(0, (TensorSpec("first", (2, 2)), TensorSpec("x", (3,)), TensorSpec("last", ())))


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=200))
def test_norm_of_any_finite_values(values: list[float]) -> None:
    wanted = math.sqrt(math.fsum(value * value for value in values))
    assert norm(np.array(values, np.float32)) == pytest.approx(wanted, rel=1e-6, abs=0)


@pytest.mark.parametrize("magnitude", [3e38, 1.0, 1e-40])
def test_norm_over_many_blocks_and_magnitudes(magnitude: float) -> None:
    flat = np.full(2 * _blocks.BLOCK + 9, magnitude, np.float32)
    assert norm(flat) == pytest.approx(float(flat[0]) * math.sqrt(flat.size), rel=1e-6)


def test_norm_of_nothing() -> None:
    assert norm(np.zeros(0, np.float32)) == 0.0
    assert norm(np.zeros(5, np.float32)) == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 63, 64, _blocks.BLOCK - 1, _blocks.BLOCK, 2 * _blocks.BLOCK + 8])
def test_one_bad_value_anywhere_is_found(bad: float, place: int) -> None:
    flat = np.ones(2 * _blocks.BLOCK + 9, np.float32)
    assert is_finite(flat)
    flat[place] = bad
    assert not is_finite(flat)
    assert not math.isfinite(norm(flat))


def test_inspect_returns_the_norm() -> None:
    flat = np.array([3, 0, 0, 0, 4, 0, 0, 0], np.float32)
    assert inspect(FRAGMENT, flat, max_norm=None) == pytest.approx(5)
    assert inspect(FRAGMENT, flat, max_norm=5.001) == pytest.approx(5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_buffers_must_be_finite_and_may_be_large(bad: float) -> None:
    fragment = Fragment(
        0, (TensorSpec("w", (2,)), TensorSpec("var", (2,), "statistic"), TensorSpec("n", (), "counter"))
    )
    flat = np.array([3, 4, 0, 1e6, -1e6], np.float32)
    assert inspect(fragment, flat, max_norm=6) == pytest.approx(5)
    for place, name in ((2, "var"), (4, "n")):
        odd = flat.copy()
        odd[place] = bad
        with pytest.raises(UnusablePayload, match=f"^tensor '{name}' has non-finite values$"):
            inspect(fragment, odd, max_norm=6)


@pytest.mark.parametrize(("place", "name"), [(0, "first"), (4, "x"), (6, "x"), (7, "last")])
def test_inspect_names_the_tensor(place: int, name: str) -> None:
    flat = np.ones(8, np.float32)
    flat[place] = np.nan
    with pytest.raises(UnusablePayload, match=f"^tensor '{name}' has non-finite values$"):
        inspect(FRAGMENT, flat, max_norm=10)


def test_inspect_limits_the_norm() -> None:
    flat = np.array([12.3, 0, 0, 0, 0, 0, 0, 0], np.float32)
    with pytest.raises(UnusablePayload, match=r"^norm 12\.3 exceeds the limit 10 \(limits\.max_delta_norm\)$"):
        inspect(FRAGMENT, flat, max_norm=10)


def test_inspect_wants_the_right_length() -> None:
    with pytest.raises(UnusablePayload, match=r"shape \(7,\), expected float32 and \(8,\)"):
        inspect(FRAGMENT, np.ones(7, np.float32), max_norm=None)
