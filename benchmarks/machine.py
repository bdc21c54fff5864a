"""What measured figures are labelled with: the processor and its cores, never the host."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """The processor's model name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int | None:
    return os.cpu_count()
