"""The suite again and again, each time under other circumstances: `make flaky`.

    python -m tests.flaky [--runs 10] [--kinds order,shuffled,one-core,busy] [--seed N] [--json FILE] -- WORDS

WORDS are pytest's. A test to trust passes in any order, on one core, and beside whatever else a machine does. Runs go
through the kinds in turn, and go on after a failure; every run has a seed of its own (the first is --seed).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.machine import cores, processor
from tests.promises.results import DEFAULT, VARIABLE

SCHEMA = 1
RESULT = Path(os.environ.get(VARIABLE) or DEFAULT) / "flaky.json"
_BUSY = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"  # it ends with us, even if we are killed
_PERCENT = re.compile(r"\[ *(\d+)%\]$")
_STEP = 10  # percent between two lines of progress where nothing can be written over


@contextmanager
def busy() -> Iterator[None]:
    """Something else wants a core, too."""
    loop = subprocess.Popen([sys.executable, "-c", _BUSY, str(os.getpid())])
    try:
        yield
    finally:
        loop.kill()
        loop.wait()


@contextmanager
def one_core() -> Iterator[None]:
    """Whatever is started in the block has one core for all its processes."""
    if not hasattr(os, "sched_setaffinity"):
        raise SystemExit("this system cannot keep a process on one core; leave one-core out of --kinds")
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(ours)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, ours)


KINDS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "order": nullcontext,
    "shuffled": nullcontext,
    "one-core": one_core,
    "busy": busy,
}


@dataclass
class Run:
    """One time through the suite."""

    kind: str
    seed: int
    command: str = ""
    seconds: float = 0.0
    exit: int = -1
    passed: int = 0
    skipped: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)
    log: str = ""


def _say(text: str, end: str = "\n") -> None:
    sys.stdout.write(text + end)
    sys.stdout.flush()


def play(run: Run, pytest: Sequence[str], title: str, folder: Path) -> None:
    """The suite once, with progress; what came of it is in `run` afterwards."""
    report, log = folder / "report.xml", folder / "output.log"
    order = ["-p", "randomly", f"--randomly-seed={run.seed}", "--randomly-dont-reset-seed"]
    words = ["-m", "pytest", *pytest, f"--hypothesis-seed={run.seed}", *(order if run.kind == "shuffled" else [])]
    run.command, run.log = f"ANABRANCH_SEED={run.seed} python {shlex.join(words)}", str(log)
    _say(f"{title}: {run.command}")
    began = time.monotonic()
    with KINDS[run.kind](), log.open("w") as kept:
        child = subprocess.Popen(
            [sys.executable, *words, f"--junit-xml={report}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "ANABRANCH_SEED": str(run.seed)},
        )  # fmt: skip
        try:
            _follow(child, kept.write, title, began)
        finally:
            if child.poll() is None:
                child.terminate()
            run.exit = child.wait()
    run.seconds = round(time.monotonic() - began, 1)
    _count(run, report)


def _follow(child: subprocess.Popen[str], keep: Callable[[str], object], title: str, began: float) -> None:
    """Keep what pytest says; of it, show how far it is."""
    assert child.stdout is not None
    shown = 0
    for line in child.stdout:
        keep(line)
        if found := _PERCENT.search(line.rstrip()):
            words = f"{title}: {found[1]:>3} %, {time.monotonic() - began:.0f} s"
            if sys.stdout.isatty():
                _say(f"\r{words}", end="")
            elif int(found[1]) >= shown + _STEP:
                shown = int(found[1])
                _say(words)
    if sys.stdout.isatty():
        _say("")


def _count(run: Run, report: Path) -> None:
    """From pytest's report; without one the run failed as a whole."""
    if not report.exists():
        run.failures.append(f"pytest ended with {run.exit} and without a report")
        return
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        if case.find("failure") is not None or case.find("error") is not None:
            run.failures.append(name)
        elif case.find("skipped") is not None:
            run.skipped += 1
        else:
            run.passed += 1
    run.failures = sorted(set(run.failures))
    run.failed = len(run.failures)


def table(runs: Sequence[Run]) -> str:
    lines = [f"{'run':>3}  {'kind':<9} {'seed':>10}  {'seconds':>7}  {'passed':>6}  {'failed':>6}"]
    for number, run in enumerate(runs, 1):
        lines.append(
            f"{number:>3}  {run.kind:<9} {run.seed:>10}  {run.seconds:>7.0f}  {run.passed:>6}  {run.failed:>6}"
        )
        lines += [f"{'':>5}{name}" for name in run.failures]
    return "\n".join(lines)


def write(path: Path, runs: Sequence[Run]) -> None:
    """After every run: what is interrupted leaves what it found."""
    found: dict[str, Any] = {
        "schema": SCHEMA,
        "processor": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "runs": [{key: value for key, value in asdict(run).items() if key != "log"} for run in runs],
        "failed_runs": sum(run.exit != 0 for run in runs),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=2) + "\n")


def _kinds(text: str) -> list[str]:
    kinds = text.split(",")
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(KINDS)}")
    return kinds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.flaky", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--kinds", type=_kinds, default=list(KINDS), metavar=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=None, help="of the first run; the others follow it")
    parser.add_argument("--json", type=Path, default=RESULT)
    parser.add_argument("pytest", nargs="*", help="arguments for pytest, after --")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # through every `finally`
    first = options.seed if options.seed is not None else secrets.randbelow(2**31)
    logs, runs = Path(tempfile.mkdtemp(prefix="anabranch-flaky-")), list[Run]()
    for number in range(options.runs):
        run = Run(options.kinds[number % len(options.kinds)], (first + number) % 2**31)
        folder = logs / str(number + 1)
        folder.mkdir()
        title = f"run {number + 1} of {options.runs}, {run.kind}, seed {run.seed}"
        play(run, options.pytest, title, folder)
        runs.append(run)
        _say(f"{title}: {run.passed} passed, {run.failed} failed in {run.seconds:.0f} s")
        if run.exit:
            _say("\n".join([f"  failed: {name}" for name in run.failures] + [f"  output: {run.log}"]))
        write(options.json, runs)
    _say(table(runs))
    _say(f"-> {options.json}")
    return 1 if any(run.exit for run in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
