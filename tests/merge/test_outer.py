"""The outer optimizer against the reference, and bit for bit against its documented order of operations."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from anabranch.errors import SpecError
from anabranch.merge import _blocks
from anabranch.merge._blocks import Float32
from anabranch.merge.outer import OuterOptimizer
from tests.merge.reference import Nesterov


def vectors(seed: int, count: int, size: int) -> list[Float32]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(size).astype(np.float32) for _ in range(count)]


def test_golden_trajectory_by_hand() -> None:
    outer = OuterOptimizer(lr=0.5, momentum=0.5)
    theta, buf = outer.step(np.array([1.0], np.float32), None, np.array([0.5], np.float32))
    assert (theta[0], buf[0]) == (0.625, 0.5)  # 1 - 0.5 * (0.5 + 0.5 * 0.5)
    theta, buf = outer.step(theta, buf, np.array([-0.25], np.float32))
    assert (theta[0], buf[0]) == (0.75, 0.0)  # buf 0.25 - 0.25; 0.625 + 0.5 * 0.25
    theta, buf = outer.step(theta, buf, np.array([1.0], np.float32))
    assert (theta[0], buf[0]) == (0.0, 1.0)


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.7, 0.5), (1.0, 0.0)])
def test_golden_trajectory_of_many_steps(lr: float, momentum: float) -> None:
    start, *gradients = vectors(4, 51, 40)
    outer, wanted = OuterOptimizer(lr, momentum), Nesterov(start.tolist(), lr, momentum)
    theta, buf = start, None
    for gradient in gradients:
        theta, buf = outer.step(theta, buf, gradient)
        wanted.step(gradient.tolist())
    assert buf is not None
    np.testing.assert_allclose(theta, wanted.theta, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(buf, wanted.buf, rtol=1e-4, atol=1e-4)


def test_the_order_of_operations_is_the_documented_one() -> None:
    theta, buf, g = vectors(9, 3, _blocks.BLOCK + 33)
    lr, mu = np.float32(0.7), np.float32(0.9)
    new_theta, new_buf = OuterOptimizer(0.7, 0.9).step(theta, buf, g)
    assert new_buf.tobytes() == (mu * buf + g).tobytes()
    assert new_theta.tobytes() == (theta - lr * (g + mu * new_buf)).tobytes()
    assert new_theta.dtype == new_buf.dtype == np.float32


def test_no_momentum_yet_means_zeros() -> None:
    theta, g = np.array([1, -2, 0], np.float32), np.array([-0.0, 3, 0.0], np.float32)
    outer = OuterOptimizer(0.7, 0.9)
    for one, other in zip(outer.step(theta, None, g), outer.step(theta, np.zeros_like(theta), g), strict=True):
        assert one.tobytes() == other.tobytes()


def test_threads_do_not_change_a_bit_and_inputs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_blocks, "TASK", 1)
    inputs = vectors(6, 3, 4 * _blocks.BLOCK + 1)
    before = [array.tobytes() for array in inputs]
    theta, buf, g = inputs
    wanted = [array.tobytes() for array in OuterOptimizer(0.7, 0.9).step(theta, buf, g)]
    for threads in (1, 2, 4):
        with ThreadPoolExecutor(threads) as pool:
            result = OuterOptimizer(0.7, 0.9).step(theta, buf, g, map_blocks=pool.map)
        assert [array.tobytes() for array in result] == wanted
    assert [array.tobytes() for array in inputs] == before


def test_no_step_is_made_in_plain_spans() -> None:
    theta, buf, g = vectors(3, 3, 40)
    stepped = OuterOptimizer(0.7, 0.9).step(theta, buf, g)
    moved, speed = OuterOptimizer(0.7, 0.9).step(theta, buf, g, plain=[(3, 5), (30, 40)])
    spans = [*range(3, 5), *range(30, 40)]
    np.testing.assert_array_equal(moved[spans], (theta - g)[spans])
    assert not speed[spans].any()
    others = np.setdiff1d(np.arange(40), spans)
    np.testing.assert_array_equal(moved[others], stepped[0][others])
    np.testing.assert_array_equal(speed[others], stepped[1][others])


def test_overflow_is_silent_and_visible() -> None:
    huge = np.array([3e38], np.float32)
    theta, buf = OuterOptimizer(0.7, 0.9).step(-huge, huge, huge)
    assert np.isinf(theta).all()
    assert np.isinf(buf).all()


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_lr(lr: float) -> None:
    with pytest.raises(SpecError, match=r"outer\.lr"):
        OuterOptimizer(lr, 0.9)


@pytest.mark.parametrize("momentum", [-0.1, 1.0, float("nan")])
def test_impossible_momentum(momentum: float) -> None:
    with pytest.raises(SpecError, match=r"outer\.momentum"):
        OuterOptimizer(0.7, momentum)


def test_mismatched_inputs() -> None:
    a, b = np.zeros(3, np.float32), np.zeros(4, np.float32)
    with pytest.raises(ValueError, match="gradient has"):
        OuterOptimizer(0.7, 0.9).step(a, None, b)
    with pytest.raises(ValueError, match="buf has"):
        OuterOptimizer(0.7, 0.9).step(a, b, a)
    with pytest.raises(ValueError, match="theta has dtype float64"):
        OuterOptimizer(0.7, 0.9).step(np.zeros(3), None, a)  # type: ignore[arg-type]
