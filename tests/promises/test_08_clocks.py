"""Wall clocks do not matter: workers a minute fast and a minute slow, and the same decisions.

Shown twice: real processes whose clocks are wrong give what processes with right ones give; and nothing in the
package reads a wall clock but to stamp what people read.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.queue.url import RunUrl
from tests.harness import bench
from tests.promises import lives
from tests.promises.lives import Bits, Script, scripted_spec, stored_run

LAST = 4  # the script's last version
RIGHT, WRONG = (0.0, 0.0, 0.0), (-60.0, 60.0, -60.0)  # seconds off, of each worker
SKEW = Path(__file__).parent / "skew"

PACKAGE = Path(anabranch.__file__).parent
#: The only functions that may ask what time it is, and why.
REMARKS = {
    ("orchestrator/tape.py", "stamp"),  # when an event happened, for people
    ("cli.py", "demo"),  # the name of a new run directory
    ("workers/tokens.py", "_key"),  # whether a file is still the one that was tokenized, on this machine
}
WALL_CLOCKS = {
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime", "clock_gettime"},
    "datetime": {"now", "utcnow", "today"},
    "date": {"today"},
}
FILE_TIMES = {"st_mtime", "st_mtime_ns", "st_ctime", "st_ctime_ns", "getmtime", "getctime"}


@contextmanager
def member(url: str, name: str, off_s: float) -> Iterator[subprocess.Popen[bytes]]:
    """A scripted worker process whose wall clock is so many seconds off."""
    path = os.pathsep.join([str(SKEW), str(lives.ROOT)])
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.promises.member", url, name, str(LAST)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path, "ANABRANCH_TEST_CLOCK_S": str(off_s)},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def minutes_off(child: subprocess.Popen[bytes]) -> int:
    """By how much its wall clock was off ours when it began; the monotonic clock is one for the whole machine."""
    assert child.stdout is not None
    said: dict[str, float] = json.loads(child.stdout.readline())
    return round((said["clock"] - said["monotonic"] - time.time() + time.monotonic()) / 60)


async def decisions(url: RunUrl, offs: tuple[float, ...]) -> tuple[list[Any], list[Bits]]:
    """What a run with these clocks decided, by fragment and version, and its bits."""
    script, spec = Script(last=LAST), scripted_spec(url.run)
    async with bench(str(url), spec) as running, stored_run(url) as stored:
        with ExitStack() as stack:
            children = [
                stack.enter_context(member(str(url), name, off_s))
                for name, off_s in zip(script.names, offs, strict=True)
            ]
            await stored.reach(LAST)
            shown = [await asyncio.to_thread(minutes_off, child) for child in children]
            tape = await stored.tape()
            lives.check_tape(tape, script)
            names = {m.incarnation: m.name for m in running.state.members.values()}
            bits = await stored.bits()
            assert all(m.live for m in running.state.members.values())
            assert [60.0 * minutes for minutes in shown] == list(offs), "the clocks were really that wrong"
        merged = [_without_timing(event, names) for event in tape if event["kind"] == "merged"]
        return sorted(merged, key=lambda m: (m[0], m[1])), bits


def _without_timing(event: dict[str, Any], names: dict[int, str]) -> list[Any]:
    """Who joined first decides an incarnation's number; it is not the clock's doing."""
    verdicts = [(names[v["incarnation"]], v["base"], v["applied"], v["tokens"]) for v in event["verdicts"]]
    weights = [(names[incarnation], *rest) for incarnation, *rest in event["weights"]]
    return [event["fragment"], event["version"], event["closed"], sorted(verdicts), sorted(weights)]


async def test_clocks_a_minute_fast_and_slow_change_no_decision(run_url: str, run_name: str) -> None:
    server = RunUrl.parse(run_url).server
    right, wrong = await asyncio.gather(
        decisions(RunUrl(server, f"{run_name[:50]}-right"), RIGHT),
        decisions(RunUrl(server, f"{run_name[:50]}-wrong"), WRONG),
    )
    assert wrong == right
    assert right[1] == lives.expected_bits(scripted_spec(run_name), Script(last=LAST))


# --- nobody asks ------------------------------------------------------------------------------------------


class _Readings(ast.NodeVisitor):
    """Names of the functions in which a wall clock is read."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self._inside = ["(module)"]

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()

    visit_FunctionDef = _visit_function  # noqa: N815
    visit_AsyncFunctionDef = _visit_function  # noqa: N815

    def visit_Attribute(self, node: ast.Attribute) -> None:
        owner = node.value
        name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
        if node.attr in WALL_CLOCKS.get(name, ()) or node.attr in FILE_TIMES:
            self.found.add(self._inside[-1])
        self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        if any(alias.asname and alias.name in WALL_CLOCKS for alias in node.names):  # would hide a reading
            self.found.add(self._inside[-1])

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module == "time" and {alias.name for alias in node.names} & WALL_CLOCKS["time"]:
            self.found.add(self._inside[-1])


def wall_clock_readings(source: str) -> set[str]:
    readings = _Readings()
    readings.visit(ast.parse(source))
    return readings.found


def test_nothing_in_the_package_reads_a_wall_clock_but_for_remarks() -> None:
    found = {
        (path.relative_to(PACKAGE).as_posix(), function)
        for path in PACKAGE.rglob("*.py")
        for function in wall_clock_readings(path.read_text(encoding="utf-8"))
    }
    assert found == REMARKS


def test_no_script_asks_the_server_for_the_time() -> None:
    for path in PACKAGE.rglob("*.lua"):
        assert "'TIME'" not in path.read_text(encoding="utf-8").upper(), path.name


@pytest.mark.parametrize(
    "source",
    [
        "import time\ndef f(): return time.time()",
        "import time as t",
        "from time import monotonic, time",
        "import datetime\ndef f(): return datetime.datetime.now()",
        "from datetime import datetime\ndef f(): return datetime.utcnow()",
        "from datetime import date\nasync def f(): return date.today()",
        "def f(path): return path.stat().st_mtime",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert wall_clock_readings(source)


def test_the_search_leaves_monotonic_clocks_alone() -> None:
    assert not wall_clock_readings("import time\ndef f(): return time.monotonic() - time.perf_counter()")
