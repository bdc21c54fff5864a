"""Numbers that people's programs hand over."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from anabranch.errors import UsageError
from anabranch.workers.checked import STEP_TOKENS, one_value, real, whole

WHOLE = [
    7,
    np.int32(7),
    np.array(7),
    np.float32(7),
    torch.tensor(7),
    torch.ones(7, dtype=torch.bool).sum(),
    torch.tensor(7.0),
    7.0,
]
NOT_WHOLE = [
    0, -5, 6.5, True, np.True_, torch.tensor(True), float("nan"), float("inf"), "7", None, [7], torch.tensor([7]),
    torch.tensor(7, device="meta"), torch.tensor(7.5), Fraction(7), STEP_TOKENS + 1, 10**400,
]  # fmt: skip


@pytest.mark.parametrize("value", WHOLE, ids=lambda v: f"{type(v).__name__} {v}")
def test_a_whole_number_may_come_in_any_kind(value: Any) -> None:
    assert type(whole("tokens", value)) is int
    assert whole("tokens", value) == 7


@pytest.mark.parametrize("value", NOT_WHOLE, ids=lambda v: f"{type(v).__name__} {v}"[:30])
def test_anything_else_is_refused_by_name(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^tokens = .*: allowed is a whole number, 1 to 1,099,511,627,776$"):
        whole("tokens", value, most=STEP_TOKENS)


def test_a_tensor_is_described_and_a_long_value_cut() -> None:
    with pytest.raises(UsageError, match=r"^tokens = Tensor of shape \(2, 3\): allowed"):
        whole("tokens", torch.ones(2, 3))
    with pytest.raises(UsageError) as refused:
        whole("tokens", "7" * 1000)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("value", [0, -1, 1.5, float("nan"), float("inf"), True, "1", None])
def test_a_share_is_above_0_and_at_most_1(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^duty = .*: allowed is a number, above 0 and at most 1$"):
        real("duty", value, above=0, most=1)


@pytest.mark.parametrize("value", [1, 0.5, np.float32(0.5), torch.tensor(0.5)])
def test_any_kind_of_number_is_a_share(value: Any) -> None:
    assert real("duty", value, above=0, most=1) == float(value)


def test_a_loss_is_one_value_and_is_not_read() -> None:
    unread = torch.ones(1, 1, requires_grad=True)
    assert one_value("loss", unread) is unread
    assert one_value("loss", None) is None
    assert one_value("loss", np.float32(2.5)) == 2.5
    assert one_value("loss", float("inf")) == float("inf"), "training that diverges is no wrong use"


@pytest.mark.parametrize("value", [torch.ones(2), "2.5", [1.0], True, 1j, torch.tensor(1j)])
def test_what_is_no_loss_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"^loss = .*: allowed is a number"):
        one_value("loss", value)
