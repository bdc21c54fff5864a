"""Run the checks, show a table, write one JSON file after each of them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from anabranch._version import VERSION
from anabranch.errors import UsageError
from anabranch.loops import leaf
from anabranch.workers.devices import choose_device, describe
from benchmarks.machine import cores, processor
from gpu_check.common import FULL, QUICK, Bench, CheckFailed, Figures
from gpu_check.live import check_two_workers, check_worker
from gpu_check.local import check_codecs, check_stall

CHECKS: dict[str, Callable[[Bench], Figures]] = {
    "worker": check_worker,
    "stall": check_stall,
    "codecs": check_codecs,
    "two_workers": check_two_workers,
}
ROOT = Path(__file__).parents[2]
LIMIT_S = 270.0  # below the limit of gpu_check.sh
NO_GPU = 2  # exit status


def main(arguments: Sequence[str] | None = None) -> int:
    """0: all checks passed; 1: one failed; 2: there is nothing to check here."""
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    parser.add_argument("--device", help="cuda, cuda:1, mps, xpu or cpu; without it, a GPU is needed")
    parser.add_argument("--quick", action="store_true", help="toy sizes: whether the checks themselves run")
    parser.add_argument("--only", action="append", choices=CHECKS, help="this check; may be repeated")
    options = parser.parse_args(arguments)
    try:
        device = choose_device(options.device or "auto")
    except UsageError as error:
        return _nothing_to_check(str(error))
    if device.type == "cpu" and options.device is None:
        return _nothing_to_check(f"no GPU: torch {torch.__version__} sees neither cuda, mps nor xpu")
    bench = Bench(device, QUICK if options.quick else FULL, time.monotonic() + LIMIT_S)
    return _run(bench, options.only or list(CHECKS), quick=options.quick)


def _nothing_to_check(reason: str) -> int:
    _say(f"{reason}.\nNothing was checked or written. `--device cpu --quick` tries them at toy size on the CPU.\n")
    return NO_GPU


def _run(bench: Bench, names: Sequence[str], *, quick: bool) -> int:
    report = machine(bench.device) | {"quick": quick, "ok": False, "checks": {}}
    for name in CHECKS:
        report["checks"][name] = {"ok": None, "error": "not run", "seconds": 0.0, "figures": {}}
    path = _path(report)
    for name in (name for name in CHECKS if name in names):
        report["checks"][name] = result = run_check(CHECKS[name], bench)
        report["ok"] = all(report["checks"][each]["ok"] for each in names)
        _write(path, report)
        sys.stdout.write(table(name, result))
        sys.stdout.flush()
    sys.stdout.write(f"\n{report['device']}: {'all is well' if report['ok'] else 'FAILED'}; see {path.name}\n")
    return 0 if report["ok"] else 1


def run_check(check: Callable[[Bench], Figures], bench: Bench) -> dict[str, Any]:
    """What a check found, or why it failed; the whole story of a failure goes to stderr."""
    began = time.monotonic()
    error, figures = None, {}
    try:
        figures = check(bench)
    except Exception as raised:
        cause = leaf(raised)
        _say(f"{traceback.format_exc()}\n")
        figures = cause.figures if isinstance(cause, CheckFailed) else {}
        error = scrubbed(cause)
    return {
        "ok": error is None,
        "error": error,
        "seconds": round(time.monotonic() - began, 1),
        "figures": figures,
    }


def scrubbed(error: BaseException) -> str:
    """First and last line of an error (of a log, the last says why), without addresses, paths and this host."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    text = " … ".join(dict.fromkeys([lines[0], lines[-1]]))
    text = re.sub(r"\b[\w+]+://\S+", "URL", text)
    text = re.sub(r"(?<!\w)~?(?:/[\w.+@%-]+){2,}/?", "PATH", text)
    text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", text)
    return text if isinstance(error, CheckFailed) else f"{type(error).__name__}: {text}"


def machine(device: torch.device) -> dict[str, Any]:
    """What figures are labelled with: devices and versions, never the host."""
    cuda = device.type == "cuda"
    return {
        "check": "gpu_check",
        "anabranch": VERSION,
        "device": processor() if device.type == "cpu" else describe(device),
        "device_type": device.type,
        "device_memory_gb": round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1) if cuda else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "driver": _driver() if cuda else None,
        "python": platform.python_version(),
        "processor": processor(),
        "cores": cores(),
    }


def _driver() -> str | None:
    """Of the first GPU; torch does not tell."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return None
    return next(iter(done.stdout.split()), None)


def _path(report: dict[str, Any]) -> Path:
    if out := os.environ.get("OUT"):
        return Path(out, "gpu_check.json")
    kind = report["device"] if report["device_type"] != "cpu" else "cpu"
    return ROOT / "docs" / "gpu" / f"{re.sub(r'[^a-z0-9]+', '-', kind.lower()).strip('-')}.json"


def _write(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")


def table(name: str, result: dict[str, Any]) -> str:
    """One check's figures as people read them."""
    verdict = "ok" if result["ok"] else f"FAILED: {result['error']}"
    lines = [f"\n{name} ({result['seconds']:.1f} s): {verdict}"]
    for key, value in _flat(result["figures"]):
        lines.append(f"  {key:44} {value:>16,}" if _is_number(value) else f"  {key:44} {value!s:>16}")
    return "\n".join(lines) + "\n"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _flat(figures: Figures, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in figures.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _say(text: str) -> None:
    sys.stderr.write(text)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # an orderly end leaves nothing behind
    sys.exit(main())
