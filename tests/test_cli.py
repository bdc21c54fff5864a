"""The command line: help, version, settings, and errors that are one line."""

from __future__ import annotations

import inspect
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import typer.main
from redis.exceptions import ResponseError
from typer.testing import CliRunner

from anabranch import cli, operate
from anabranch._version import VERSION
from anabranch.orchestrator import journal, tape
from anabranch.settings import load_spec
from anabranch.spec import RunSpec
from tests.conftest import ServerFactory
from tests.wait import PATIENCE_S

COMMANDS = sorted(typer.main.get_command(cli.app).commands)  # type: ignore[attr-defined]
NOBODY = "redis://127.0.0.1:1/0"


def invoke(*words: str) -> str:
    result = CliRunner().invoke(cli.app, list(words))
    assert result.exit_code == 0, result.output
    return result.output


def test_the_version() -> None:
    assert invoke("--version") == f"anabranch {VERSION}\n"


def test_it_can_be_run_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "anabranch", "--version"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert done.stdout == f"anabranch {VERSION}\n"


def test_without_a_word_it_explains_itself() -> None:
    result = CliRunner().invoke(cli.app, [])
    assert "anabranch demo" in result.output


def test_the_commands_are_those_we_know() -> None:
    known = (
        "checkpoint demo evaluator export orchestrator pause replay restore resume sample set status stop up url "
        "worker"
    )
    assert known.split() == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    shown = invoke(command, "--help")
    assert "Usage:" in shown
    assert len(shown.splitlines()) > 4


# --- settings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["up", "orchestrator"])
def test_print_config_shows_what_is_in_force(command: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[rounds]\nquorum = 3\ninner_steps = 48\n")
    shown = invoke(command, "--spec", str(file), "--set", "rounds.quorum=5", "--print-config")
    printed = tmp_path / "printed.toml"
    printed.write_text(shown)
    spec = load_spec(printed, environment={})
    assert spec == load_spec(file, overrides=["rounds.quorum=5"], environment={})
    assert (spec.rounds.quorum, spec.rounds.inner_steps) == (5, 48)


def test_print_config_without_anything_prints_the_defaults(tmp_path: Path) -> None:
    printed = tmp_path / "run.toml"
    printed.write_text(invoke("orchestrator", "--print-config"))
    assert load_spec(printed, environment={}) == RunSpec()


# --- errors -----------------------------------------------------------------------------------------------

Fail = Callable[..., str]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Fail]:
    """Run a command line that fails; returns its one line on standard error."""

    def leave(status: int) -> NoReturn:
        raise SystemExit(status)

    def fail(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["anabranch", *words])
        monkeypatch.setattr(cli.os, "_exit", leave)  # type: ignore[attr-defined]
        with pytest.raises(SystemExit) as ended:
            cli.main()
        output = capsys.readouterr()
        assert ended.value.code == 2
        assert output.out == ""
        lines = output.err.splitlines()
        assert len(lines) == 1, output.err
        assert lines[0].startswith("anabranch: ")
        return lines[0]

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield fail
    for number, handler in handlers.items():  # members install their own
        signal.signal(number, handler)


@pytest.mark.parametrize("command", ["worker", "evaluator", "status", "stop", "pause", "orchestrator"])
def test_a_wrong_url_is_one_line(failing: Fail, command: str) -> None:
    assert "scheme 'http' is not redis" in failing(command, "http://host/0")


@pytest.mark.parametrize("command", ["worker", "evaluator", "status", "stop"])
def test_a_server_that_is_not_there_is_one_line(failing: Fail, command: str) -> None:
    assert "is the server running" in failing(command, NOBODY)


def test_no_url_at_all_is_one_line(failing: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_URL", raising=False)
    assert "no run URL: give redis" in failing("orchestrator")


def test_a_wrong_password_is_one_line(failing: Fail, server_factory: ServerFactory) -> None:
    server = server_factory(password="right")
    line = failing("status", server.url.replace("right", "wrong"))
    assert "user:password@" in line
    assert "wrong" not in line.replace("wrong number", "").replace("WRONGPASS", "")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--set", "rounds.quorums=2"], "rounds.quorums = 2: unknown key; allowed here: "),
        (["--set", "rounds.quorum"], "expected section.key=value"),
        (["--set", "rounds.quorum=many"], "rounds.quorum"),
        (["--set", "rounds.fragments=900"], "in_flight × inner_steps"),
        (["--spec", "nowhere.toml"], "no such file"),
        (["--spec", "."], "--spec ."),
    ],
)
def test_a_setting_that_cannot_be_is_one_line(failing: Fail, words: list[str], expected: str) -> None:
    assert expected in failing("orchestrator", NOBODY, *words, "--no-page")


def test_a_setting_that_cannot_change_is_one_line(failing: Fail) -> None:
    assert "cannot change while the run goes on" in failing("set", NOBODY, "rounds.fragments=3")
    assert "expected section.key=value" in failing("set", NOBODY, "quorum")
    assert "expected section.key=value" in failing("set", NOBODY)
    assert "expected a URL and one section.key=value" in failing("set", NOBODY, "rounds.quorum=2", "rounds.quorum=3")


def test_a_setting_is_changed_where_the_environment_says(failing: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANABRANCH_URL", raising=False)
    assert "no run URL" in failing("set", "rounds.quorum=2")
    monkeypatch.setenv("ANABRANCH_URL", NOBODY)
    assert "is the server running" in failing("set", "rounds.quorum=2")


def test_a_damaged_spec_file_is_one_line(failing: Fail, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[rounds\n")
    assert "not valid TOML" in failing("up", "--dir", str(tmp_path / "run"), "--spec", str(file))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [cli.up, cli.orchestrator])
def test_what_files_may_grow_to_is_what_the_synchronizer_takes_by_default(command: Callable[..., None]) -> None:
    said = inspect.signature(command).parameters
    assert (said["tape_mb"].default, said["journal_mb"].default) == (tape.DEFAULT_MB, journal.DEFAULT_MB)


def test_an_error_of_the_server_that_nobody_expected_is_one_line(
    failing: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def surprise(*_: object) -> None:
        raise ExceptionGroup("of a task", [ResponseError("SURPRISE what is this")])

    monkeypatch.setattr(operate, "status", surprise)
    assert failing("status", NOBODY) == "anabranch: SURPRISE what is this"


@pytest.mark.parametrize("name", ["a b", "_", "x" * 65])
def test_a_name_that_cannot_be_is_one_line(failing: Fail, run_url: str, name: str) -> None:
    assert "--name" in failing("worker", run_url, "--name", name)


def test_a_duty_cycle_beyond_one_is_one_line(failing: Fail) -> None:
    assert "--duty 2.0" in failing("worker", NOBODY, "--duty", "2")


def test_no_checkpoint_to_sample_from_is_one_line(failing: Fail, tmp_path: Path) -> None:
    assert "neither a checkpoint" in failing("sample", str(tmp_path))


def test_an_unknown_fault_point_is_one_line(failing: Fail, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANABRANCH_FAIL_AT", "somewhere:1:kill")
    assert "fault point 'somewhere' is unknown" in failing("status", NOBODY)


def test_one_line_in_a_process_of_its_own() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "anabranch", "status", "ftp://x"],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
