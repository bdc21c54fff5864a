"""What tests share in one process, and may not change for good. Pytest itself puts warnings' filters back."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from anabranch import faults

_OWN = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # of pytest and torch, who set them when they like
_LOGGERS = ("", "anabranch", "asyncio")

Look = dict[str, Any]


def _torch() -> Look:
    """Nothing where no test has imported it yet."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "get_default_dtype"):
        return {}
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's number of threads": torch.get_num_threads(),
        "torch's gradient mode": torch.is_grad_enabled(),
        "torch's deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _transformers() -> Look:
    model: Any = sys.modules.get("transformers.modeling_utils")
    if not hasattr(model, "PreTrainedModel"):
        return {}
    return {"transformers' tie_weights": model.PreTrainedModel.tie_weights}


def _loggers() -> Look:
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    return {
        f"logger {logger.name!r}": (logger.level, logger.propagate, logger.disabled, _handlers(logger))
        for logger in loggers
    }


def _handlers(logger: logging.Logger) -> list[logging.Handler]:
    """Without pytest's own, which come and go with a test's phases."""
    return [handler for handler in logger.handlers if not type(handler).__module__.startswith("_pytest")]


def _signals() -> Look:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return {f"handler of {number.name}": signal.getsignal(number) for number in numbers}


def look() -> Look:
    """What is to be the same after a test."""
    environment = {f"${name}": value for name, value in os.environ.items() if name not in _OWN}
    own: Look = {
        "the working directory": os.getcwd(),
        "sys.path": list(sys.path),
        "sys.argv": list(sys.argv),
        "fault points": dict(faults._armed),
    }
    parts: tuple[Callable[[], Look], ...] = (_torch, _transformers, _loggers, _signals)
    return {**environment, **own, **{name: value for part in parts for name, value in part().items()}}


def changes(before: Look, after: Look) -> list[str]:
    """In words. What came with a library that was imported in between had no value before."""
    known = {name for name in before if not name.startswith("$")} | {name for name in after if name.startswith("$")}
    return [
        f"{name}: {before.get(name)!r} -> {after.get(name)!r}"
        for name in sorted(known | before.keys())
        if before.get(name) != after.get(name)
    ]
