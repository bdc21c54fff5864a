"""`anabranch demo`: three unequal workers and an evaluator train one model on this machine, for real.

Server, synchronizer and page run in this process; workers and evaluator are processes of their own under a
watchdog each, so that nothing outlives this process, however it dies.
"""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout

from anabranch.errors import AnabranchError
from anabranch.loops import end_tasks
from anabranch.operate import command
from anabranch.orchestrator.core.view import LEDGER
from anabranch.orchestrator.web.app import PageOptions, picture
from anabranch.queue.embedded import watchdog_command
from anabranch.spec import RunSpec, parse_spec
from anabranch.terminal import DemoState
from anabranch.up import LeadOptions, Up, bring_up

RUN = "demo"
EVALUATOR = "evaluator"
_NAMES = ("full", "half", "quarter", "eighth")
_TICK_S = 0.25
_START_S = 90.0  # to import torch and measure version 0 on a loaded machine
_SETTLE_S = 20.0  # for open rounds and the last measurement
_PAGE_CHECK_S = 5.0


@dataclass(frozen=True)
class DemoOptions:
    """`minutes` of training; `text`: a folder to train on instead of the standard library's sources."""

    directory: Path
    minutes: float = 2.0
    workers: int = 3
    port: int = 0
    text: Path | None = None


@dataclass
class Child:
    """A worker or evaluator process under its watchdog; the end of its stdin pipe, when we die, ends it."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, timeout_s: float) -> bool:
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True


Show = Callable[[DemoState], None]


def demo_spec(options: DemoOptions) -> RunSpec:
    """The demo's run. Its outer step is the default's; see docs/experiments.md for how it was chosen."""
    task: dict[str, Any] = {"name": "gpt", "options": {}}
    if options.text is not None:
        task["options"]["data"] = str(options.text.absolute())
    return parse_spec({"name": RUN, "checkpoint": {"every_s": 3600.0}, "task": task})


def duty_of(index: int) -> float:
    """1, ½, ¼ and then again: workers of clearly different speed."""
    return 0.5 ** (index % 3)


def worker_name(index: int) -> str:
    name = _NAMES[index % 3]
    return name if index < 3 else f"{name}-{index // 3 + 1}"


class Demo:
    """One demonstration run; `run` returns the summary."""

    def __init__(self, options: DemoOptions, show: Show, ending: asyncio.Event) -> None:
        self._options = options
        self._show = show
        self._ending = ending
        self._children: list[Child] = []
        self._stopping = False  # from now on children end by themselves
        self._page_answers = 0
        self._page_failures = 0
        self.state = DemoState(total_s=options.minutes * 60)

    async def run(self) -> dict[str, Any]:
        """Start, train, stop, sum up. Every process is gone when this returns, also on an error."""
        options = LeadOptions(PageOptions(port=self._options.port))
        async with bring_up(self._options.directory, demo_spec(self._options), RUN, options) as up:
            self.state.page = up.page
            try:
                watcher = asyncio.create_task(self._watch_page(up.page), name="demo: watch page")
                try:
                    seconds = await self._train(up)
                    await self._finish(up)
                finally:
                    await end_tasks(watcher)
            finally:
                await asyncio.to_thread(self._end_children)
            return self._summary(up, seconds)

    async def _train(self, up: Up) -> float:
        """Measure version 0 before anything is merged, then train for the time asked. Returns the seconds."""
        await command(up.url, "pause", by="demo", begun=False)
        self._start_children(up)
        self.state.phase = "measuring version 0"
        await self._until(up, lambda p: bool(p.get("heldout")), _START_S, "no held-out loss of version 0")
        await command(up.url, "resume", by="demo")
        self.state.phase = "training"
        started = time.monotonic()
        while not self._ending.is_set() and self.state.elapsed_s < self.state.total_s:
            await self._tick(up)
            self.state.elapsed_s = time.monotonic() - started
        return time.monotonic() - started

    async def _finish(self, up: Up) -> None:
        """Let open rounds close, measure the final model, stop, let everybody say farewell."""
        self.state.phase = "measuring the final model"
        await command(up.url, "pause", by="demo")
        if not self._ending.is_set():
            with suppress(AnabranchError):
                await self._until(up, _settled, _SETTLE_S, "the last rounds did not settle")
        self.state.phase = "stopping"
        self._stopping = True
        await command(up.url, "stop", by="demo")
        async with asyncio.timeout(_SETTLE_S):
            await up.synchronizer.stopped.wait()
        await asyncio.to_thread(self._wait_children)
        with suppress(AnabranchError):
            await self._until(
                up, lambda p: p["live"] == 0, 5.0, "a member did not say farewell", needs_children=False
            )

    async def _until(
        self,
        up: Up,
        done: Callable[[dict[str, Any]], bool],
        timeout_s: float,
        otherwise: str,
        *,
        needs_children: bool = True,
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while not done(await self._tick(up)):
            if needs_children and self._ending.is_set():
                return
            if time.monotonic() > deadline:
                raise AnabranchError(f"{otherwise} within {timeout_s:.0f} s; see the logs in {self._logs}")

    async def _tick(self, up: Up) -> dict[str, Any]:
        await asyncio.sleep(_TICK_S)
        if up.task.done():
            up.task.result()
            raise AnabranchError("the synchronizer ended by itself")
        self._look_after_children()
        self.state.picture = picture(up.synchronizer)
        self._show(self.state)
        return self.state.picture

    def _look_after_children(self) -> None:
        """While all should be at work: one that has ended is said, and without any worker there is no demo."""
        for child in self._children:
            status = child.process.poll()
            if status is not None and child.name not in self.state.ended and not self._stopping:
                self.state.ended[child.name] = status
                self._show(self.state)
        at_work = [child for child in self._children if child.name not in self.state.ended]
        if self._children and all(child.name == EVALUATOR for child in at_work):
            name, status = next(iter(self.state.ended.items()))
            child = next(child for child in self._children if child.name == name)
            ended = describe_ended(self.state.ended)
            raise AnabranchError(f"no worker is left: {ended}; the log of {name} ends with\n{_tail(child.log)}")

    async def _watch_page(self, address: str) -> None:
        """The page has to answer while the run goes on."""
        async with ClientSession(timeout=ClientTimeout(total=5.0)) as session:
            while True:
                try:
                    async with session.get(address) as response:
                        self._page_answers += response.status == 200
                        self._page_failures += response.status != 200
                except (ClientError, TimeoutError):
                    self._page_failures += 1
                await asyncio.sleep(_PAGE_CHECK_S)

    # --- processes ----------------------------------------------------------------------------------------

    @property
    def _logs(self) -> Path:
        return self._options.directory / "logs"

    def _start_children(self, up: Up) -> None:
        self._logs.mkdir(mode=0o700, exist_ok=True)
        self._start_child(up, EVALUATOR, ["evaluator", "--name", EVALUATOR])
        for index in range(self._options.workers):
            name, duty = worker_name(index), duty_of(index)
            self._start_child(
                up, name, ["worker", "--name", name, "--duty", str(duty), "--label", f"duty cycle {duty:g}"]
            )

    def _start_child(self, up: Up, name: str, arguments: list[str]) -> None:
        path = self._logs / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                watchdog_command([sys.executable, "-m", "anabranch", *arguments]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "ANABRANCH_URL": str(up.url), "OMP_NUM_THREADS": "1"},  # not on a command line
            )
        self._children.append(Child(name, process, path))

    def _wait_children(self) -> None:
        """Members leave by themselves when the run stops."""
        deadline = time.monotonic() + 10.0
        for child in self._children:
            child.wait(max(0.1, deadline - time.monotonic()))

    def _end_children(self) -> None:
        for child in self._children:
            child.process.terminate()  # nothing happens where it has ended
        for child in self._children:
            if not child.wait(5.0):
                child.process.kill()
                child.process.wait()
            if child.process.stdin is not None:
                with suppress(OSError):
                    child.process.stdin.close()

    # --- summary ------------------------------------------------------------------------------------------

    def _summary(self, up: Up, seconds: float) -> dict[str, Any]:
        shown = picture(up.synchronizer)
        heldout = shown.get("heldout") or [[0, None]]
        same = {name: shown.get(name) for name in ("tokens", "parameters", "goodput", "bytes_sent", "checkpoint")}
        rounds, refused = shown.get("rounds", {}), shown.get("refused", {})
        return {
            **same,
            "heldout_loss_start": heldout[0][1],
            "heldout_loss_end": heldout[-1][1],
            "seconds": round(seconds, 1),
            "rounds": rounds,
            "refused": refused,
            "page": {"address": up.page, "answers": self._page_answers, "failures": self._page_failures},
            "ended": self.state.ended,
            "ledger_mismatches": refused.get("ledger mismatches", 0),
            "workers": [whole_tokens(row) for row in shown.get("ledger", [])],
        }


def describe_ended(ended: dict[str, int]) -> str:
    return ", ".join(f"{name} ended with status {status}" for name, status in ended.items())


def whole_tokens(row: dict[str, Any]) -> dict[str, Any]:
    """A parameter-weighted ledger row in whole tokens that still add up: largest remainders are rounded up."""
    parts = LEDGER[1:]
    floors = {column: math.floor(row[column] + 1e-6) for column in parts}
    short = round(sum(row[column] for column in parts)) - sum(floors.values())
    by_remainder = sorted(parts, key=lambda column: floors[column] - row[column])
    for column in by_remainder[: max(0, short)]:
        floors[column] += 1
    figures = {"processed": round(row["processed"]), **floors}
    return {"name": row["name"], **{f"tokens_{column}": figures[column] for column in LEDGER}}


def _settled(shown: dict[str, Any]) -> bool:
    """No round is open and the evaluator has measured the newest versions."""
    heldout = shown.get("heldout") or []
    return not shown["open"] and bool(heldout) and heldout[-1][0] == shown["tokens"]


def _tail(path: Path, lines: int = 12) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
