"""What one step of next-token prediction trains on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A `Batch` for next-token prediction."""

    inputs: torch.Tensor  # int64 [B, T]
    targets: torch.Tensor  # int64 [B, T]

    @classmethod
    def of(cls, windows: NDArray[Any]) -> Self:
        """From rows of T + 1 tokens, integers [B, T + 1]: each is predicted from those before it."""
        tokens = torch.from_numpy(windows.astype(np.int64, copy=False))
        return cls(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    @property
    def tokens(self) -> int:
        return self.targets.numel()

    def to(self, device: torch.device) -> Self:
        return type(self)(self.inputs.to(device), self.targets.to(device))
