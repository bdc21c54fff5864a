"""Live runs on one device: server and synchronizer in this process, members in processes of their own."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from anabranch.demo import Child, whole_tokens
from anabranch.loops import run_async
from anabranch.operate import command
from anabranch.orchestrator.core.view import LEDGER
from anabranch.orchestrator.web.app import picture
from anabranch.queue.embedded import watchdog_command
from anabranch.spec import RunSpec, parse_spec
from anabranch.up import LeadOptions, Up, bring_up, members_left
from anabranch.workers.devices import describe
from gpu_check.common import Bench, CheckFailed, Figures, ratio

RUN = "gpu-check"
LONGEST_S = 120.0  # one check
_START_S = 90.0  # to import torch and to set up a GPU
_TICK_S = 0.05
_END_S = 15.0
_LOG_LINES = 12

Picture = dict[str, Any]


def live_spec(bench: Bench) -> RunSpec:
    scale = bench.scale
    return parse_spec(
        {
            "name": RUN,
            "rounds": {"fragments": scale.fragments, "inner_steps": scale.inner_steps},
            "limits": {"superseded_ttl_s": 10.0},  # rounds are quick here: old versions would fill the server
            "checkpoint": {"every_s": 3600.0},
            "task": {"name": "gpt", "options": dict(scale.live)},
        }
    )


class LiveRun:
    """A run that is up, and its members."""

    def __init__(self, up: Up, logs: Path, bench: Bench) -> None:
        self.up = up
        self.bench = bench
        self.losses: dict[str, list[float]] = {}  # of training, as each worker reported them
        self._reports: dict[str, list[tuple[float, int]]] = {}  # monotonic seconds, tokens processed
        self._logs = logs
        self._children: dict[str, Child] = {}
        self._leaving: list[Child] = []

    def start(self, name: str, role: str = "worker", *arguments: str) -> None:
        """A member in a process of its own, on the device; it dies with this process."""
        options = ["--name", name, "--device", str(self.bench.device), *arguments]
        path = self._logs / f"{name}.log"
        with path.open("wb") as log:
            process = subprocess.Popen(
                watchdog_command([sys.executable, "-m", "anabranch", role, *options]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "ANABRANCH_URL": str(self.up.url)},
            )
        self._children[name] = Child(name, process, path)

    async def until(self, done: Callable[[Picture], object], what: str, timeout_s: float = _START_S) -> Picture:
        """What the page shows once `done`. Fails after `timeout_s`, or when a member ends."""
        deadline = time.monotonic() + timeout_s
        while not done(shown := await self._look()):
            for child in self._children.values():
                if (status := child.process.poll()) is not None:
                    raise CheckFailed(f"{child.name} ended with status {status}\n{_tail(child.log)}")
            if time.monotonic() > deadline:
                logs = "\n".join(_tail(child.log) for child in self._children.values())
                raise CheckFailed(f"not within {timeout_s:.0f} s: {what}\n{logs}")
        return shown

    async def tokens_per_s(self, *names: str) -> list[float]:
        """How fast each of these workers trains during the next `window_s`."""
        self._reports.clear()
        began = time.monotonic()
        await self.until(
            lambda _: (
                time.monotonic() - began >= self.bench.scale.window_s
                and all(len(self._reports.get(name, ())) >= 2 for name in names)
            ),
            "two reports of progress of each worker",
        )
        speeds = []
        for name in names:
            (first, before), (last, after) = self._reports[name][0], self._reports[name][-1]
            speeds.append((after - before) / max(last - first, 1e-9))
        return speeds

    def leave(self, name: str) -> None:
        """Ask one member to go; the others train on."""
        self._leaving.append(child := self._children.pop(name))
        child.process.terminate()

    async def stop(self) -> Picture:
        """The run ends, everybody leaves in order; what the page shows in the end."""
        await command(self.up.url, "stop", by=RUN)
        async with asyncio.timeout(_END_S):
            await self.up.synchronizer.stopped.wait()
        await members_left(self.up.synchronizer)
        for child in [*self._children.values(), *self._leaving]:
            if not await asyncio.to_thread(child.wait, _END_S) or child.process.returncode != 0:
                raise CheckFailed(f"{child.name} ended with status {child.process.returncode}\n{_tail(child.log)}")
        return picture(self.up.synchronizer)

    def end(self) -> None:
        """Nothing keeps running, whatever happened."""
        children = [*self._children.values(), *self._leaving]
        for child in children:
            child.process.terminate()
        for child in children:
            _end(child)

    async def _look(self) -> Picture:
        await asyncio.sleep(_TICK_S)
        if self.up.task.done():
            self.up.task.result()
            raise CheckFailed("the synchronizer ended by itself")
        shown = picture(self.up.synchronizer)
        for name, one in workers(shown).items():
            losses, reports = self.losses.setdefault(name, []), self._reports.setdefault(name, [])
            if one["loss"] is not None and one["loss"] not in losses[-1:]:
                losses.append(one["loss"])
            if not reports or one["processed"] != reports[-1][1]:
                reports.append((time.monotonic() - one["seen_s"], one["processed"]))
        return shown


@asynccontextmanager
async def live_run(bench: Bench) -> AsyncIterator[LiveRun]:
    """Up until the block ends; nothing keeps running."""
    with tempfile.TemporaryDirectory(prefix="anabranch-") as folder:
        async with bring_up(Path(folder, "run"), live_spec(bench), RUN, LeadOptions()) as up:
            run = LiveRun(up, Path(folder), bench)
            try:
                yield run
            finally:
                await asyncio.to_thread(run.end)


def in_time(bench: Bench, work: Callable[[Bench], Awaitable[Figures]]) -> Figures:
    """The figures of a live check, within its time."""

    async def limited() -> Figures:
        async with asyncio.timeout(min(LONGEST_S, bench.left_s)):
            return await work(bench)

    try:
        return run_async(limited())
    except TimeoutError:
        raise CheckFailed("the check took too long") from None


# --- check 1 ----------------------------------------------------------------------------------------------


def check_worker(bench: Bench) -> Figures:
    """A worker and an evaluator on the device train; their loss falls, and the ledger adds up."""
    return in_time(bench, _worker)


async def _worker(bench: Bench) -> Figures:
    scale = bench.scale
    async with live_run(bench) as run:
        await command(run.up.url, "pause", by=RUN)  # version 0 is measured before anything is merged
        run.start("evaluator", "evaluator", "--every-s", "1")
        run.start("one")
        await run.until(lambda p: p.get("heldout") and "one" in workers(p), "held-out loss of version 0")
        await command(run.up.url, "resume", by=RUN)
        began = time.monotonic()
        shown = await run.until(
            lambda p: time.monotonic() - began >= scale.train_s and merged(p) >= scale.rounds,
            f"{scale.rounds} merged rounds",
        )
        [speed] = await run.tokens_per_s("one")
        goodput, device = shown["goodput"], workers(shown)["one"]["device"]
        await command(run.up.url, "pause", by=RUN)
        await run.until(_measured, "held-out loss of the final model", _END_S)
        shown = await run.stop()
    heldout, losses, [row] = shown["heldout"], run.losses["one"], rows(shown)
    figures: Figures = {
        "parameters": shown["parameters"],
        "on_the_device": device == describe(bench.device),
        "heldout_loss_start": round(heldout[0][1], 4),
        "heldout_loss_end": round(heldout[-1][1], 4),
        "heldout_loss_ratio": ratio(heldout[-1][1], heldout[0][1]),
        "train_loss_start": round(losses[0], 4),
        "train_loss_end": round(losses[-1], 4),
        "rounds_merged": merged(shown),
        "rounds_abandoned": shown["rounds"]["abandoned"],
        "tokens_per_s": round(speed),
        "merged_share": merged_share(row),
        "goodput": round(goodput, 4),
        **ledger(shown),
    }
    _require(figures["on_the_device"], f"the worker ran on {device!r}", figures)
    _require(row["tokens_applied"] > 0, "nothing of the worker was merged", figures)
    everything = [*losses, *(loss for _, loss in heldout)]
    _require(all(math.isfinite(loss) for loss in everything), "a loss is not finite", figures)
    _require(heldout[-1][1] < heldout[0][1], "the held-out loss did not fall", figures)
    _require(losses[-1] < losses[0], "the training loss did not fall", figures)
    _require(figures["ledger_balanced"], "the ledger does not add up", figures)
    return figures


def _measured(shown: Picture) -> bool:
    """No round is open and the newest versions were measured."""
    return not shown["open"] and bool(shown["heldout"][-1][0] == shown["tokens"])


# --- check 4 ----------------------------------------------------------------------------------------------


def check_two_workers(bench: Bench) -> Figures:
    """Two workers share the device; then one leaves, and the other's speed alone is what both are compared with."""
    return in_time(bench, _two_workers)


async def _two_workers(bench: Bench) -> Figures:
    async with live_run(bench) as run:
        run.start("one")
        run.start("two")
        await run.until(_both_merged, "contributions of both workers are merged")
        first, second = await run.tokens_per_s("one", "two")
        run.leave("two")
        await run.until(lambda p: workers(p).keys() == {"one"}, "one worker has left", _END_S)
        [alone] = await run.tokens_per_s("one")
        shown = await run.stop()
    figures: Figures = {
        "tokens_per_s_alone": round(alone),
        "one_of_alone": ratio(first, alone),
        "two_of_alone": ratio(second, alone),
        "together_of_alone": ratio(first + second, alone),
        **{
            f"merged_share_{row['name']}": ratio(row["tokens_applied"], row["tokens_processed"])
            for row in rows(shown)
        },
        "rounds_merged": merged(shown),
        **ledger(shown),
    }
    _require(figures["ledger_balanced"], "the ledger does not add up", figures)
    return figures


def _both_merged(shown: Picture) -> bool:
    return sum(bool(row["applied"] > 0) for row in shown.get("ledger", ())) == 2


# --- reading the page -------------------------------------------------------------------------------------


def workers(shown: Picture) -> dict[str, Picture]:
    """Live workers by name."""
    return {
        m["name"]: m
        for m in shown.get("members", ())
        if m["role"] == "worker" and m["condition"] not in ("left", "gone")
    }


def merged(shown: Picture) -> int:
    """Rounds that were merged."""
    return sum(count for outcome, count in shown["rounds"].items() if outcome != "abandoned")


def rows(shown: Picture) -> list[Picture]:
    """The ledger in whole tokens."""
    return [whole_tokens(row) for row in shown["ledger"]]


def merged_share(row: Picture) -> float:
    """Of the tokens a worker trained on."""
    return ratio(row["tokens_applied"], row["tokens_processed"])


def ledger(shown: Picture) -> Figures:
    """Whether every worker's tokens add up, and how often the synchronizer found that they did not."""
    mismatches = shown["refused"].get("ledger mismatches", 0)
    unexplained = sum(
        abs(row["tokens_processed"] - sum(row[f"tokens_{column}"] for column in LEDGER[1:])) for row in rows(shown)
    )
    return {
        "ledger_balanced": mismatches == 0 and unexplained == 0,
        "ledger_mismatches": mismatches,
        "tokens_unexplained": unexplained,
    }


def _require(holds: object, otherwise: str, figures: Figures) -> None:
    if not holds:
        raise CheckFailed(otherwise, figures)


def _end(child: Child) -> None:
    if not child.wait(_END_S):
        child.process.kill()
        child.process.wait()
    if child.process.stdin is not None:
        with suppress(OSError):
            child.process.stdin.close()


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:])
