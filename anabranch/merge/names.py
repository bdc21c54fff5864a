"""What a run's definition may choose from. What each name does is in `codecs` and `average`."""

from __future__ import annotations

from typing import Literal

Codec = Literal["fp32", "bf16", "fp16"]
Rule = Literal["radial", "average"]

Kind = Literal["weights", "embedding", "statistic", "counter"]
"""What a tensor is. Statistics and counters are buffers, which training changes without a gradient: the first are
averaged, of the second the largest counts; no outer step is made with either."""
