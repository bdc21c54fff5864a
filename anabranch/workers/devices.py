"""Choosing a device. CUDA, MPS and XPU are chosen when torch reports them; only CPU was ever run here."""

from __future__ import annotations

import torch

from anabranch.errors import UsageError

_ORDER = ("cuda", "mps", "xpu")


def choose_device(wish: str = "auto") -> torch.device:
    """`auto`: the first of cuda, mps, xpu that is available, else cpu. A wish that cannot be had is an error."""
    if wish == "auto":
        return torch.device(next((kind for kind in _ORDER if _available(kind)), "cpu"))
    try:
        device = torch.device(wish)
    except RuntimeError:
        raise UsageError(f"--device {wish!r}: unknown; allowed: auto, cpu, {', '.join(_ORDER)}, cuda:0 …") from None
    if device.type != "cpu" and not _available(device.type):
        have = ", ".join(["cpu", *(kind for kind in _ORDER if _available(kind))])
        raise UsageError(f"--device {wish!r}: torch {torch.__version__} does not see one here; available: {have}")
    return device


def describe(device: torch.device) -> str:
    """What the status page shows."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} thread" if device.type == "cpu" else device.type


def _available(kind: str) -> bool:
    if kind == "mps":
        return torch.backends.mps.is_available()
    backend = getattr(torch, kind, None)
    return backend is not None and bool(backend.is_available())
