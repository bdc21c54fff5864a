"""What a run's definition may choose from. What each name does is in `codecs` and `average`."""

from __future__ import annotations

from typing import Literal

Codec = Literal["fp32", "bf16", "fp16"]
Rule = Literal["radial", "average"]
