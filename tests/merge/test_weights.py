"""Token weights."""

from __future__ import annotations

import pytest

from anabranch.merge.weights import token_weight


def test_quantity_times_quality() -> None:
    assert token_weight(1000, 10) == 100_000.0
    assert token_weight(2000, 10) == 4 * token_weight(1000, 10)
    assert token_weight(1000, 20) == token_weight(1000, 10) / 2


@pytest.mark.parametrize(("tokens", "steps"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_trained_weighs_nothing(tokens: int, steps: int) -> None:
    assert token_weight(tokens, steps) == 0.0


@pytest.mark.parametrize(("tokens", "steps"), [(-1, 5), (5, -1)])
def test_negative_counts(tokens: int, steps: int) -> None:
    with pytest.raises(ValueError, match="both must be 0 or more"):
        token_weight(tokens, steps)
