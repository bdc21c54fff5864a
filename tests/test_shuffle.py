"""Orders that every member computes alike, on every numpy."""

from __future__ import annotations

import numpy as np
import pytest

from anabranch.shuffle import item_order, range_order, shuffled

GOLDEN_RANGES = [1, 3, 7, 4, 2, 0, 5, 6]
GOLDEN_ITEMS = [0, 4, 1, 2, 7, 5, 6, 3]


@pytest.mark.parametrize("size", [0, 1, 2, 7, 1000])
def test_every_number_comes_once(size: int) -> None:
    assert sorted(shuffled(size, "x", 1)) == list(range(size))


def test_the_order_is_what_it_always_was() -> None:
    """A run that is resumed under a newer numpy, or on another machine, must go on in the same order."""
    assert range_order(8, 0, 0).tolist() == GOLDEN_RANGES
    assert item_order(8, 7, 2, 5).tolist() == GOLDEN_ITEMS


def test_seed_epoch_and_range_each_make_another_order() -> None:
    orders = [item_order(64, *key).tolist() for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len({tuple(order) for order in orders}) == 4


def test_it_is_a_fair_shuffle() -> None:
    """Each item is as likely to come first as any other, over many keys (a coarse check)."""
    first = np.bincount([int(shuffled(8, "fair", key)[0]) for key in range(4000)], minlength=8)
    assert np.all(np.abs(first - 500) < 5 * np.sqrt(500))
