"""`anabranch demo` from start to end, and from start to every kind of violent end."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.wait import PATIENCE_S, wait_until_sync

MARK = "ANABRANCH_TEST_MARK"
COLUMNS = ("applied", "rejected", "discarded", "lost", "pending")


@dataclass
class Running:
    """A demo process; everything it starts inherits a mark in its environment."""

    process: subprocess.Popen[str]
    directory: Path
    mark: str

    def family(self) -> set[int]:
        """Pids of all processes that carry the mark."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    if f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.add(int(entry.name))
                except OSError:
                    continue  # it ended meanwhile, or is not ours to read
        return found - {os.getpid()}

    def log(self, name: str) -> str:
        path = self.directory / "logs" / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def merges(self) -> int:
        path = self.directory / "tape.jsonl"
        return path.read_text().count('"kind":"merged"') if path.exists() else 0


@contextmanager
def running(directory: Path, *arguments: str) -> Iterator[Running]:
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, "-m", "anabranch", "demo", "--dir", str(directory), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, MARK: mark},
        start_new_session=True,
    )
    demo = Running(process, directory, mark)
    try:
        yield demo
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()
        wait_until_sync(lambda: not demo.family(), "nothing of the demo runs any more")


def test_a_short_demo_with_a_worker_killed_in_the_middle(tmp_path: Path) -> None:
    with running(tmp_path / "run", "--minutes", "0.3", "--json") as demo:
        wait_until_sync(lambda: demo.merges() >= 8, "rounds are merged", timeout_s=90)
        os.kill(int(demo.log("half").splitlines()[0]), signal.SIGKILL)
        output, errors = demo.process.communicate(timeout=100)
        assert demo.process.returncode == 1, errors
        assert not demo.family()
        summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert list(summary["ended"]) == ["half"]
    assert "half ended with status" in errors
    assert summary["heldout_loss_start"] > 5.0
    assert summary["heldout_loss_end"] < 3.3
    assert summary["page"]["answers"] >= 1
    assert summary["page"]["failures"] == 0
    assert summary["ledger_mismatches"] == 0
    assert 0 < summary["goodput"] <= 1
    assert sum(summary["rounds"].values()) >= 8
    workers = {worker["name"]: worker for worker in summary["workers"]}
    assert set(workers) == {"full", "half", "quarter"}
    for worker in workers.values():
        assert worker["tokens_applied"] > 0, worker
        assert worker["tokens_processed"] == sum(worker[f"tokens_{column}"] for column in COLUMNS), worker
    assert workers["half"]["tokens_lost"] > 0
    tape = [json.loads(line) for line in (tmp_path / "run" / "tape.jsonl").read_text().splitlines()]
    assert any(event["kind"] == "gone" and event["name"] == "half" for event in tape)
    _sample(Path(summary["checkpoint"]))


def _sample(checkpoint: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "anabranch", "sample", str(checkpoint), "--bytes", "40", "--prompt", "import "],
        capture_output=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"import ")
    assert len(done.stdout) >= 40


def test_without_any_worker_left_it_ends_and_says_so(tmp_path: Path) -> None:
    with running(tmp_path / "run", "--minutes", "5", "--workers", "2") as demo:
        wait_until_sync(lambda: all("joined run" in demo.log(name) for name in ("full", "half")), "both joined")
        for name in ("full", "half"):
            os.kill(int(demo.log(name).splitlines()[0]), signal.SIGKILL)
        _, errors = demo.process.communicate(timeout=PATIENCE_S)
        assert demo.process.returncode == 2, errors
        assert "no worker is left: " in errors
        assert "full ended with status" in errors


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGHUP, 130)],
    ids=["kill", "int", "hup"],
)
def test_nothing_keeps_running(tmp_path: Path, number: signal.Signals, status: int) -> None:
    with running(tmp_path / "run", "--minutes", "5", "--workers", "1") as demo:
        wait_until_sync(lambda: "joined run" in demo.log("full"), "a worker joined")
        assert len(demo.family()) >= 5  # demo, server, evaluator, worker, their watchdogs
        demo.process.send_signal(number)
        assert demo.process.wait(timeout=PATIENCE_S) == status
        wait_until_sync(lambda: not demo.family(), "nothing keeps running")
