"""What `make soak` leaves behind: one JSON file per promise with stable keys, and progress while it runs."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path

from benchmarks.machine import cores, processor

VARIABLE = "ANABRANCH_RESULTS"  # a folder; docs/results by default
DEFAULT = Path(__file__).parents[2] / "docs" / "results"


def progress(line: str) -> None:
    """Shown at once: `make soak` runs pytest with -s."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def write_results(promise: str, seed: int, figures: Mapping[str, object]) -> Path:
    """Write `<promise>.json`; says on which processor, never on which host."""
    folder = Path(os.environ.get(VARIABLE) or DEFAULT)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{promise}.json"
    machine = {"processor": processor(), "cores": cores(), "python": platform.python_version()}
    path.write_text(json.dumps({"promise": promise, **machine, "seed": seed, **figures}, indent=2) + "\n")
    progress(f"{path}")
    return path
