"""docs/join.md step by step, on loopback: begin, join, sleep, leave, reboot, stop, take the model home."""

from __future__ import annotations

import configparser
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.operate import status
from anabranch.queue.url import RunUrl
from tests.harness import process
from tests.wait import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
SMALL = ("layers=1", "width=16", "heads=2", "context=16")
SETTINGS = [f"--set=task.options.{item}" for item in SMALL] + ["--set=workers.heartbeat_s=1.0"]


class Home:
    """`anabranch up` on the machine that everybody can reach."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.url = ""

    @contextmanager
    def up(self, *settings: str) -> Iterator[subprocess.Popen[bytes]]:
        """Started, or started again after a reboot; `url` is what it prints."""
        self.url = ""
        with process("up", "--dir", str(self.directory), "--name", "mine", *settings) as child:
            reading = threading.Thread(target=self._read, args=(child,), daemon=True)
            reading.start()
            yield child
        reading.join(10.0)

    def _read(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if found := re.search(r"ANABRANCH_URL='([^']+)' anabranch worker", line.decode()):
                self.url = found.group(1)

    @property
    def environment(self) -> dict[str, str]:
        return {"ANABRANCH_URL": self.url}

    async def answers(self) -> None:
        await wait_until(lambda: bool(self.url), "up prints how to join")

    async def sees(self, what: str, check: Any, timeout_s: float = 2 * PATIENCE_S) -> None:
        """Wait until `check` holds for what `anabranch status` shows."""

        async def holds() -> bool:
            shown = await status(RunUrl.parse(self.url))
            return "members" in shown and bool(check(shown))

        await wait_until(holds, what, timeout_s)


def condition(shown: dict[str, Any], name: str) -> str | None:
    return next((m["condition"] for m in shown["members"] if m["name"] == name), None)


def merged(shown: dict[str, Any], name: str) -> bool:
    return any(m["name"] == name and m["last_round"] for m in shown["members"])


async def ended(child: subprocess.Popen[bytes]) -> int:
    """Its exit status; if it does not end, what it was."""
    words = child.args if isinstance(child.args, list) else []
    await wait_until(lambda: child.poll() is not None, f"it ends: {' '.join(map(str, words[3:6]))}")
    return child.returncode


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_the_walk_through(tmp_path: Path) -> None:
    home = Home(tmp_path / "mine")
    with ExitStack() as boxes:

        def start(*words: str) -> subprocess.Popen[bytes]:
            return boxes.enter_context(process(*words, environment=home.environment))

        with home.up(*SETTINGS) as first:
            await home.answers()
            box = start("worker", "--name", "box-1", "--batch", "auto")
            laptop = start("worker", "--name", "laptop", "--duty", "0.5", "--batch", "2")
            judge = start("evaluator", "--every-s", "1")
            await home.sees("both are merged", lambda s: merged(s, "box-1") and merged(s, "laptop"))
            await home.sees("somebody measures", lambda s: s["heldout"])

            laptop.send_signal(signal.SIGSTOP)  # the lid is closed
            await home.sees("the run goes on without it", lambda s: condition(s, "laptop") in (None, "gone"))
            laptop.send_signal(signal.SIGCONT)
            await home.sees("it comes back by itself", lambda s: merged(s, "laptop"))

            box.send_signal(signal.SIGTERM)
            assert await ended(box) == 0
            first.send_signal(signal.SIGTERM)  # the machine reboots
            assert await ended(first) == 0
        with home.up() as second:
            await home.answers()
            await home.sees("the laptop goes on", lambda s: condition(s, "laptop") == "live")
            assert await ended(start("stop")) == 0
            for child in (laptop, judge, second):
                assert await ended(child) == 0
    out = CliRunner().invoke(
        app, ["export", str(home.directory), str(tmp_path / "weights"), "--format", "safetensors"]
    )
    assert out.exit_code == 0, out.output
    assert load_file(next((tmp_path / "weights").glob("*.safetensors")))["head.weight"].shape == (256, 16)


# --- deploy/ ----------------------------------------------------------------------------------------------

UNITS = sorted((ROOT / "deploy").glob("*.service"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_starts_a_command_that_exists_and_leaves_it_time_to_leave(unit: Path) -> None:
    # systemd repeats keys; what is looked at here comes once
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit.read_text())
    service = parser["Service"]
    program, command, *words = shlex.split(service["ExecStart"])
    assert program.endswith("/anabranch")
    shown = CliRunner().invoke(app, [command, "--help"])
    assert shown.exit_code == 0
    assert all(word in shown.output for word in words if word.startswith("--"))
    assert int(service["TimeoutStopSec"]) > 10, "--drain-s is 10 by default"
    assert service["User"] != "root"
    assert service["NoNewPrivileges"] == "yes"
    assert "PASSWORD" not in service["ExecStart"], "not where ps shows it"


def test_both_sides_have_a_unit() -> None:
    assert [path.name for path in UNITS] == ["anabranch-up.service", "anabranch-worker@.service"]
