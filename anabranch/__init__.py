"""Anabranch: train one model on machines that come and go.

`anabranch.join(url, model, optimizer)` joins a PyTorch training loop to a run, and `anabranch.Muon.of(model)` is an
optimizer for it. They are loaded on first use, so that `import anabranch` needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anabranch._version import VERSION as __version__

if TYPE_CHECKING:
    from anabranch.workers.joining import Session, join
    from anabranch.workers.muon import Muon

__all__ = ["Muon", "Session", "__version__", "join"]


def __getattr__(name: str) -> Any:
    if name in {"Session", "join"}:
        from anabranch.workers import joining

        return getattr(joining, name)
    if name == "Muon":
        from anabranch.workers.muon import Muon

        return Muon
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
