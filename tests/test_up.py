"""`anabranch up`: what it prints, what it leaves in its directory, and that it continues."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.errors import UsageError
from anabranch.orchestrator.checkpoint import complete_checkpoints
from anabranch.queue.url import RunUrl
from anabranch.up import LeadOptions, RunDirectory, bring_up, reachable_url
from tests.harness import make_spec, process
from tests.wait import PATIENCE_S, wait_until, wait_until_sync


@dataclass
class Running:
    """An `anabranch up` process and what it printed."""

    child: subprocess.Popen[str]
    directory: Path
    join: str
    url: str
    page: str
    log: Path

    def end(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(timeout=PATIENCE_S)

    def status(self) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["status", self.url, "--json"])
        assert result.exit_code == 0, f"{result.output}\n{self.log.read_text()}"
        shown: dict[str, Any] = json.loads(result.stdout)
        return shown


@contextmanager
def up(directory: Path, *arguments: str) -> Iterator[Running]:
    directory.parent.mkdir(parents=True, exist_ok=True)
    log = directory.parent / "up.log"
    with log.open("ab") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "anabranch", "up", "--dir", str(directory), *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(3)]
        page = re.fullmatch(r"status page:   (http://\S+)\n", lines[1])
        join = re.fullmatch(r"join with:     (ANABRANCH_URL='(\S+)' anabranch worker)\n", lines[2])
        assert lines[0] == f"run directory: {directory}\n", log.read_text()
        assert page is not None
        assert join is not None
        yield Running(child, directory, join.group(1), join.group(2), page.group(1), log)
    finally:
        if child.poll() is None:
            child.kill()
        child.communicate()


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "run.toml"
    path.write_text(make_spec("mine").to_toml())
    return path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, spec: Path) -> Iterator[Running]:
    """One `up` that the tests below look at."""
    with up(tmp_path_factory.mktemp("up") / "deep" / "run", "--name", "mine", "--spec", str(spec)) as made:
        yield made


def anabranch(*arguments: str, url: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"ANABRANCH_URL": url} if url else {})}
    return subprocess.run(
        [sys.executable, "-m", "anabranch", *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip


def test_the_join_line_works_as_it_is_printed(running: Running) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["sh", "-c", f"{running.join} --name joiner"]
    joiner = subprocess.Popen(
        command, env={**os.environ, "PATH": path}, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_until_sync(lambda: running.status().get("tokens", 0) > 0, "something was merged")
        assert [member["name"] for member in running.status()["members"]] == ["joiner"]
    finally:
        os.killpg(joiner.pid, signal.SIGKILL)
        joiner.wait()


def test_the_join_line_is_printed_again(running: Running) -> None:
    done = anabranch("url", "--dir", str(running.directory))
    assert (done.returncode, done.stdout) == (0, f"{running.join}\n"), done.stderr


def test_where_nothing_was_brought_up_there_is_no_url(tmp_path: Path) -> None:
    done = anabranch("url", "--dir", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert (
        done.stderr
        == f"anabranch: --dir {tmp_path / 'nothing'}: no run was ever brought up there (`anabranch up --dir`)\n"
    )


def test_it_is_quiet_and_says_how_it_stands(running: Running) -> None:
    phases = re.compile(
        r" · (starting|waiting for a first worker|training: .* 1 live worker|no live worker: .*)$", re.MULTILINE
    )
    wait_until_sync(lambda: phases.search(running.log.read_text()), "it says how it stands")
    assert " merged " not in running.log.read_text()
    stamps = [line[:19] for line in running.log.read_text().splitlines()]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", stamp) for stamp in stamps), stamps


@pytest.mark.parametrize("kind", ["a file", "below a file", "no permission"])
def test_a_directory_that_cannot_be_used_is_one_line(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    where = {
        "a file": tmp_path / "file",
        "below a file": tmp_path / "file" / "run",
        "no permission": Path("/proc/run"),
    }
    done = anabranch("up", "--dir", str(where[kind]))
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"anabranch: --dir {where[kind]}: ")
    assert "choose a folder" in line


def test_only_the_owner_can_read_the_directory(running: Running) -> None:
    assert running.directory.stat().st_mode & 0o777 == 0o700
    for name in ("token", "password", "port", "tape.jsonl", "lock", "data/valkey.conf"):
        assert (running.directory / name).stat().st_mode & 0o777 == 0o600, name


def test_the_run_is_protected_by_a_long_password(running: Running) -> None:
    password = (running.directory / "password").read_text().strip()
    assert len(password) >= 32
    assert f":{password}@" in running.url
    stranger = running.url.replace(f":{password}@", "")
    done = anabranch("status", url=stranger)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "put user:password@ before the host" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_password_is_on_no_command_line(running: Running) -> None:
    password = (running.directory / "password").read_bytes().strip()
    token = (running.directory / "token").read_bytes().strip()
    seen = 0
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:  # it ended meanwhile
            continue
        seen += str(running.directory).encode() in words
        assert password not in words
        assert token not in words
    assert seen >= 2, "up itself and its server were looked at"


def test_a_second_up_on_the_same_directory_is_refused(running: Running) -> None:
    done = anabranch("up", "--dir", str(running.directory))
    assert done.returncode == 2
    assert re.fullmatch(
        r"anabranch: --dir .*: another `anabranch up` is using it; stop that one first\n", done.stderr
    )
    assert running.child.poll() is None


def test_status_for_people_names_the_run(running: Running) -> None:
    result = CliRunner().invoke(app, ["status", running.url])
    assert result.exit_code == 0
    assert "run mine:" in result.output


@pytest.mark.slow
def test_it_ends_on_a_signal_and_continues_under_the_same_address(tmp_path: Path, spec: Path) -> None:
    directory = tmp_path / "run"
    with up(directory, "--name", "mine", "--spec", str(spec)) as first:
        with process("worker", "--name", "w", environment={"ANABRANCH_URL": first.url}):
            wait_until_sync(lambda: first.status().get("tokens", 0) > 0, "something was merged")
        assert first.end() == 0
    with up(directory, "--name", "mine") as second:
        assert second.url == first.url
        wait_until_sync(lambda: second.status().get("leader"), "it leads again")
        shown = second.status()
        assert shown["tokens"] > 0
        assert shown["timeline"].startswith("0-"), "it ended in order: nothing is suspected to be lost"
        assert min(fragment["version"] for fragment in shown["fragments"]) >= 0
        assert shown["settings"]["inner_steps"] == 8, "the stored definition is in force"
        assert anabranch("stop", url=second.url).returncode == 0
        assert second.child.wait(timeout=PATIENCE_S) == 0
    assert len(complete_checkpoints(directory)) == 1


def test_another_definition_for_a_stored_run_is_one_line(tmp_path: Path, spec: Path) -> None:
    directory = tmp_path / "run"
    with up(directory, "--name", "mine", "--spec", str(spec)) as first:
        wait_until_sync(lambda: first.status().get("leader"), "it leads")
        with process("worker", "--name", "w", environment={"ANABRANCH_URL": first.url}):
            wait_until_sync(lambda: first.status().get("fragments"), "it has a model")
        assert first.end() == 0
    again = ("up", "--dir", str(directory), "--name", "mine", "--spec", str(spec))
    done = anabranch(*again, "--set", "merge.outer_lr=0.1")
    assert done.returncode == 2
    assert "merge.outer_lr = 0.1 here, 0.7 in the run" in done.stderr.splitlines()[-1]


# --- the parts --------------------------------------------------------------------------------------------


def test_a_secret_is_made_up_once(tmp_path: Path) -> None:
    first = RunDirectory(tmp_path / "run")
    secret = first.secret("token")
    assert RunDirectory(tmp_path / "run").secret("token") == secret
    assert RunDirectory(tmp_path / "other").secret("token") != secret
    assert (tmp_path / "run" / "token").stat().st_mode & 0o777 == 0o600


def test_an_open_directory_is_closed_to_others(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    RunDirectory(path)
    assert path.stat().st_mode & 0o777 == 0o700


def test_a_lock_is_held_until_unlocked(tmp_path: Path) -> None:
    first, second = RunDirectory(tmp_path), RunDirectory(tmp_path)
    first.lock()
    with pytest.raises(UsageError, match="another `anabranch up`"):
        second.lock()
    first.unlock()
    first.unlock()
    second.lock()
    second.unlock()


def test_a_stored_port_that_somebody_took_is_not_used(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.stored_port() is None
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        directory.write("port", str(other.getsockname()[1]))
        assert directory.stored_port() is None
    assert directory.stored_port() is not None


def test_a_damaged_port_file_is_no_port(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.write("port", "many")
    assert directory.stored_port() is None


async def test_what_is_up_is_down_after_the_block(tmp_path: Path) -> None:
    async with bring_up(tmp_path / "run", make_spec("r"), "r", LeadOptions()) as running:
        await wait_until(lambda: running.synchronizer.core is not None, "it leads")
        await wait_until(lambda: running.server.running, "its server runs")
    ended = running.task.done() and not running.server.running
    assert ended
    again = RunDirectory(tmp_path / "run")
    again.lock()
    again.unlock()


def test_the_address_for_others_is_not_the_loopback() -> None:
    url = RunUrl.parse("redis://:pw@127.0.0.1:7000/0?run=r")
    assert reachable_url(url, "127.0.0.1") == "redis://:pw@127.0.0.1:7000/0?run=r"
    shown = RunUrl.parse(reachable_url(url, "0.0.0.0"))
    assert shown.run == "r"
    assert ":pw@" in shown.server
    assert shown.server.endswith(":7000/0")
    both = RunUrl.parse(reachable_url(RunUrl.parse("redis://:pw@[::1]:7000/0?run=r"), "::"))
    assert both.server.endswith(":7000/0")
    assert ("[::1]" in both.server) == ("127.0.0.1" in shown.server), "loopback only where there is nothing else"


def _server_pid(running: Running) -> int:
    with redis.Redis.from_url(RunUrl.parse(running.url).server) as client:
        info: Any = client.info("server")
        return int(info["process_id"])


def test_it_says_so_when_its_server_dies(tmp_path: Path, spec: Path) -> None:
    with up(tmp_path / "run", "--name", "mine", "--spec", str(spec)) as running:
        wait_until_sync(lambda: running.status()["leader"], "the synchronizer leads")
        os.kill(_server_pid(running), signal.SIGKILL)
        assert running.child.wait(timeout=PATIENCE_S) == 2
        assert "the embedded server ended by itself" in running.log.read_text()


def test_a_machine_of_a_thirtieth_of_the_speed_counts(tmp_path: Path) -> None:
    """Real processes, default settings, a smaller model: who is that slow has nearly all of its work merged."""
    tiny = [part for name in ("layers=1", "width=32") for part in ("--set", f"task.options.{name}")]
    with (
        up(tmp_path / "run", "--name", "mine", *tiny) as run,
        process("worker", "--name", "fast", environment={"ANABRANCH_URL": run.url}),
        process("worker", "--name", "slow", "--duty", str(1 / 30), environment={"ANABRANCH_URL": run.url}),
    ):
        found: dict[str, Any] = {}

        def settled() -> bool:
            """Whether most of a dozen steps of the slow one are no longer on their way."""
            members = {member["name"]: member for member in run.status()["members"]}
            found.update(members.get("slow", {}))
            return bool(found.get("steps", 0) >= 12 and found["processed"] >= 1.2 * found["pending"])

        wait_until_sync(settled, "the slow one made steps, and they were settled")
        assert found["applied"] >= 0.9 * (found["processed"] - found["pending"]), found
        assert found["complaint"] is None, found
