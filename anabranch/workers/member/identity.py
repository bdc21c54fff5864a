"""Who joins a run."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import Literal

from anabranch.errors import UsageError
from anabranch.queue.keys import SYNCHRONIZER
from anabranch.spec import ID_PATTERN

LABEL_LIMIT = 200  # characters: what a message takes


def default_name() -> str:
    """A name for a worker nobody named."""
    return f"worker-{secrets.token_hex(3)}"


@dataclass(frozen=True)
class Identity:
    """Who joins."""

    name: str
    label: str = ""
    role: Literal["worker", "evaluator"] = "worker"
    device: str = ""
    can_init: bool = True  # whether its model may become version 0

    def __post_init__(self) -> None:
        if not re.fullmatch(ID_PATTERN, self.name) or self.name.startswith(SYNCHRONIZER):
            raise UsageError(f"--name {self.name!r}: 1 to 64 of A-Z a-z 0-9 . _ - are allowed, the first not a _")
        if len(self.label) > LABEL_LIMIT:
            raise UsageError(f"--label: {len(self.label)} characters, at most {LABEL_LIMIT} are allowed")
