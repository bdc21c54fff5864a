"""What the journal costs: its share of a live synchronizer's CPU time, and how much it writes.

    python -m benchmarks.journal_cost [--members 32] [--seconds 20] [--out docs/results/journal_cost.json]

A synchronizer leads synthetic workers (a process of their own) that report ten times a second. Every call into the
journal is timed within it, on the thread's own CPU clock; what an empty call is timed at is taken off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anabranch.loops import run_async
from anabranch.orchestrator import journal
from anabranch.orchestrator.core import frames
from anabranch.orchestrator.synchronizer import Synchronizer
from anabranch.queue.embedded import EmbeddedServer, ServerOptions
from anabranch.queue.url import RunUrl
from anabranch.spec import RunSpec, parse_spec
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from benchmarks.machine import cores, processor

WARM_S = 10.0
STEP_S = 0.1


def spec_for(members: int) -> RunSpec:
    return parse_spec(
        {
            "name": "run",
            "rounds": {"fragments": 8, "inner_steps": 24, "quorum": max(1, members // 2)},
            "task": {"name": "synthetic", "options": {"tensors": 16, "size": 16_384}},
        }
    )


class Spent:
    """CPU seconds of this thread inside the functions that were wrapped; nested calls count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls = 0
        self._depth = 0

    def calibrated(self, calls: int = 20_000) -> float:
        """What an empty call is timed at."""

        class Nothing:
            @staticmethod
            def happens() -> None: ...

        self.wrap(Nothing, "happens")
        for _ in range(calls):
            Nothing.happens()
        seconds, self.seconds, self.calls = self.seconds, 0.0, 0
        return seconds / calls

    def wrap(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            self._depth += 1
            begun = time.thread_time()
            try:
                return inner(*arguments, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.seconds += time.thread_time() - begun
                    self.calls += 1

        setattr(owner, name, timed)


async def lead(url: RunUrl, members: int, directory: Path, seconds: float) -> dict[str, float]:
    """Lead, and say what was spent between the end of the warm-up and the end."""
    spent = Spent()
    empty_s = spent.calibrated()
    for name in ("event_frame", "taken_frame", "stored_frame"):
        spent.wrap(frames, name)
    for name in ("add", "flush", "begin"):
        spent.wrap(journal.Journal, name)
    synchronizer = Synchronizer(url, spec_for(members), directory=directory)
    task = asyncio.create_task(synchronizer.run(), name="synchronizer")
    await asyncio.sleep(WARM_S)
    if synchronizer.core is None or len(synchronizer.core.state.members) < members:
        raise RuntimeError(f"after {WARM_S:g} s not all of {members} members are there: measure fewer")
    before = time.process_time(), spent.seconds, spent.calls
    await asyncio.sleep(seconds)
    cpu_s, journal_s, calls = time.process_time() - before[0], spent.seconds - before[1], spent.calls - before[2]
    rounds = dict(synchronizer.core.state.counts)
    synchronizer.end()
    await task
    written = sum(path.stat().st_size for path in journal.segments(directory))
    net_s = journal_s - calls * empty_s
    return {"cpu_s": cpu_s, "journal_s": net_s, "calls": calls, "bytes": written, "rounds": sum(rounds.values())}


async def fleet(url: RunUrl, members: int) -> None:
    workers = [SyntheticWorker(url, f"w{i}", Pace(step_s=STEP_S)) for i in range(members)]
    await asyncio.gather(*(worker.run() for worker in workers))


def measure(members: int, seconds: float) -> dict[str, Any]:
    """Server, fleet and synchronizer, each a process."""
    with tempfile.TemporaryDirectory() as folder:
        server = EmbeddedServer(ServerOptions(Path(folder) / "valkey"))
        server.start()
        module, common = [sys.executable, "-m", "benchmarks.journal_cost"], ["--members", str(members)]
        url = f"{server.url}?run=run"
        training = subprocess.Popen([*module, *common, "--part", "fleet", "--url", url])
        try:
            (Path(folder) / "run").mkdir()
            place = ["--part", "lead", "--url", url, "--dir", f"{folder}/run", "--seconds", str(seconds)]
            output = subprocess.run([*module, *common, *place], check=True, stdout=subprocess.PIPE).stdout
        finally:
            training.kill()
            training.wait()
            server.stop()
    found: dict[str, Any] = json.loads(output)
    return found


def main() -> None:
    """Measure, print a line, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path("docs/results/journal_cost.json"))
    parser.add_argument("--part", choices=("lead", "fleet"), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--dir", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    parts: dict[str, Callable[[], Any]] = {
        "lead": lambda: run_async(lead(RunUrl.parse(args.url), args.members, args.dir, args.seconds)),
        "fleet": lambda: run_async(fleet(RunUrl.parse(args.url), args.members)),
    }
    if args.part is not None:
        sys.stdout.write(json.dumps(parts[args.part]()))
        return
    found = measure(args.members, args.seconds)
    result = {
        "benchmark": "journal_cost",
        "processor": processor(),
        "cores": cores(),
        "python": platform.python_version(),
        "members": args.members,
        "seconds": args.seconds,
        "share_of_cpu": round(found["journal_s"] / found["cpu_s"], 4),
        "cpu_s": round(found["cpu_s"], 3),
        "journal_s": round(found["journal_s"], 4),
        "bytes_per_hour": round(found["bytes"] / (args.seconds + WARM_S) * 3600),
    }
    sys.stdout.write(
        f"{result['processor']}, {result['cores']} cores; {args.members} members: the journal takes "
        f"{result['share_of_cpu']:.1%} of the CPU and writes {result['bytes_per_hour'] / 1e6:.0f} MB per hour\n"
    )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
