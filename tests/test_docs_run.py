"""What documents tell people to type is typed: every command block, in order, against real processes.

A document tells one story, so each is one test. A line that nobody said how to run, or that does not do it, fails.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest

from anabranch.operate import status
from anabranch.queue.url import RunUrl
from tests.conftest import ServerFactory
from tests.wait import wait_until_sync

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "examples/README.md", *ROOT.glob("docs/*.md")])
FENCE = re.compile(r"^ *```(?:sh|console)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
LONG_S = 240.0  # several processes that each import torch, on a busy machine

NOT_RUN = {  # the beginning of a line: why it is not run here
    "make ": "the suite runs inside of one, the others take minutes; test_docs.py knows the targets",
    "python3 -m venv": "the tests run in an installed environment",
    ".venv/bin/pip install": "the same",
    "export PATH=": "the same",
    "ssh ": "there is nobody to log in at",
    "python -m benchmarks.quality": "an hour of training; it rewrites results",
}
GRANTED = {  # document, beginning of a line: what is typed before it, since the text takes it for granted
    ("README.md", "anabranch evaluator"): ["anabranch worker URL"],
    ("upgrade.md", "anabranch status"): [
        "anabranch orchestrator redis://host/0?run=NAME --spec run.toml --dir runs/old --no-page",
        "anabranch worker redis://host/0?run=NAME",
    ],
    ("tasks.md", "anabranch sample"): ["anabranch checkpoint URL"],
    ("examples/README.md", "anabranch sample"): ["anabranch checkpoint URL"],
    ("examples/README.md", "anabranch export"): ["anabranch checkpoint URL"],
}
SAYS = {  # the word after `anabranch`: what a command that ends has to print
    "demo": r'"heldout_loss_end": [\d.]+',
    "status": r"\bmerged\b|\bmembers\b",
    "stop": r"^stopped .*(.|\n)*^checkpoint: ",
    "checkpoint": r"step|checkpoint",
    "set": r"data\.epochs",
    "sample": r"\S",
    "restore": r"; timeline \d",
    "export": r"weights",
    "replay": r"^the same again: ",
}
LEADERS = ("up", "orchestrator")
NEEDS_LEADER = ("status", "stop", "checkpoint", "set", "worker", "evaluator")


def lines_of(document: Path) -> list[str]:
    """What is typed: without the prompt and what is said about it."""
    typed = []
    for block in FENCE.findall(document.read_text()):
        for line in block.splitlines():
            if words := line.strip().removeprefix("$ ").split("  #")[0].split("   #")[0].strip():
                typed.append(words)
    return typed


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT)).removeprefix("docs/")


@dataclass
class Running:
    """A command that goes on until it is ended."""

    line: str
    verb: str
    child: subprocess.Popen[bytes]
    log: Path
    ended: bool = False  # by us

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def lives(self) -> bool:
        """False once it ended well; anything else is an error, unless we ended what is not ours."""
        status = self.child.poll()
        if self.ended and self.verb in ("python", "torchrun"):
            return status is None
        assert status in (None, 0), f"{self.line}: status {status}\n{self.said()}"
        return status is None

    def end(self) -> None:
        if not self.lives():
            return
        self.child.send_signal(signal.SIGTERM)
        self.ended = True  # a signal is an error to torchrun
        wait_until_sync(lambda: not self.lives(), f"it ends: {self.line}", LONG_S)


@dataclass
class Story:
    """One document's commands in a folder of their own."""

    folder: Path
    servers: ServerFactory
    environment: dict[str, str]
    running: list[Running] = field(default_factory=list)
    url: str = ""
    leader: str = ""
    hosts: dict[str, str] = field(default_factory=dict)  # as documents name them: a real server's host and port
    count: int = 0

    def server(self, host: str) -> str:
        if host not in self.hosts:
            password = None if host == "host" else "PASSWORD"
            self.hosts[host] = self.servers(password=password).url.rpartition("@")[2].removeprefix("redis://")
        return self.hosts[host].split("/")[0]

    def alive(self, *verbs: str) -> list[Running]:
        return [one for one in self.running if one.verb in verbs and one.lives()]

    def substituted(self, line: str) -> str:
        """The line as this machine needs it: the only changes that are made."""
        if self.url and self.alive("up"):
            line = re.sub(r"redis://:PASSWORD@[\d.]+:\d+/0\?run=\w+", self.url, line)
        line = re.sub(r"(redis://:PASSWORD@)([\d.]+):6379", lambda m: f"{m[1]}{self.server(m[2])}", line)
        line = re.sub(r"redis://host/", lambda m: f"redis://{self.server('host')}/", line)
        line = re.sub(r"\bURL\b", lambda m: f"'{self.url}'", line)
        if found := re.search(r"redis://[^\s']+\?run=\w+", line):
            self.url = found[0]
        for old, new in (
            ("--minutes 1", "--minutes 0.15"),
            ("--host 0.0.0.0", "--host 127.0.0.1"),
            (" --port 6379 --page-port 8765", ""),  # free ones
            ("s3://bucket/", f"file://{self.folder}/bucket/"),
            ("runs/demo-20260101-120000", "runs/demo-*"),
            ("task.options.context=512", "task.options.context=128"),  # the model here has 256 positions
            ("data.epochs=", "data.epochs=100"),  # the texts here are short
            ("torchrun ", "torchrun --standalone "),  # its fixed port may be somebody's
        ):
            line = line.replace(old, new)
        if "anabranch orchestrator" in line and "--no-page" not in line:
            line += " --page-port 0"
        return line

    def start(self, line: str, verb: str) -> Running:
        self.count += 1
        log = self.folder / f"{self.count}.log"
        with log.open("wb") as out:
            child = subprocess.Popen(
                ["sh", "-c", f"exec env {line}"],
                cwd=self.folder, env=self.environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return Running(line, verb, child, log)

    def ask(self) -> dict[str, Any]:
        """What `anabranch status` knows, without starting a process each time."""
        return asyncio.run(status(RunUrl.parse(self.url)))

    def finish(self, line: str) -> str:
        """What a command prints that ends, and ends well."""
        done = subprocess.run(
            ["sh", "-c", f"exec env {line}"],
            cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False, timeout=LONG_S,
        )  # fmt: skip
        logs = "".join(f"\n--- {one.line}\n{one.said()[-1500:]}" for one in self.running)
        assert done.returncode == 0, f"{line}: status {done.returncode}\n{done.stdout}{done.stderr}{logs}"
        return done.stdout + done.stderr

    def contributors(self) -> set[str]:
        return {books["name"] for books in self.ask().get("ledger", []) if books["applied"] > 0}

    def measured(self) -> int:
        return len(self.ask().get("heldout", []))

    def end_all(self, *verbs: str) -> None:
        """End what runs, members first: a member that leaves wants to be heard."""
        for one in reversed(self.running):
            if not verbs or one.verb in verbs:
                one.end()

    def lead(self, line: str, verb: str) -> None:
        """Start a leader; another run's members end first, and a folder's own `up` gives way."""
        if verb == "up":
            again = bool(self.leader) and _option(line, "--dir") == _option(self.leader, "--dir")
            self.end_all(*([] if not again else LEADERS))
        one = self.start(line, verb)
        self.running.append(one)
        promise = (
            r"^join with: +ANABRANCH_URL='(\S+)' anabranch worker$" if verb == "up" else r"(leading|standby:) run"
        )

        def stands() -> re.Match[str] | None:
            assert one.lives(), f"{line} ended\n{one.said()}"
            return re.search(promise, one.said(), re.MULTILINE)

        wait_until_sync(stands, f"`{line}` leads or stands by", LONG_S)
        self.leader = line
        if verb == "up" and (found := stands()):
            self.url = found[1]

    def take_part(self, line: str, verb: str) -> None:
        """Start a member and wait until it did what it is there for."""
        contributors, measured = self.contributors(), self.measured()
        one = self.start(line, verb)
        self.running.append(one)

        def does() -> bool:
            one.lives()
            return self.measured() > measured if verb == "evaluator" else bool(self.contributors() - contributors)

        try:
            wait_until_sync(does, f"it takes part: {line}", LONG_S)
        except AssertionError as error:
            error.add_note(one.said()[-3000:])
            raise

    def tell(self, line: str) -> None:
        """Run one line of the document."""
        if line.startswith("export "):
            name, _, value = line.removeprefix("export ").partition("=")
            self.environment[name] = value
            return
        words = [word for word in shlex.split(line) if not word.startswith("ANABRANCH_URL=")]
        verb = words[1] if words[0] == "anabranch" else words[0]
        if verb in NEEDS_LEADER and self.leader and not self.alive(*LEADERS):  # what was stopped is continued
            self.lead(self.leader, shlex.split(self.leader)[1])
        if verb == "orchestrator" and self.alive("up"):  # "instead of `up`"
            self.end_all()
            shutil.rmtree(self.folder / "runs" / "mine")
        line = self.substituted(line)
        if verb in LEADERS:
            self.lead(line, verb)
        elif verb in ("worker", "evaluator", "python", "torchrun"):
            self.take_part(line, verb)
        else:
            assert verb in SAYS, f"nobody said what to expect of: {line}"
            shutil.rmtree(self.folder / "weights", ignore_errors=True)
            said = self.finish(line)
            assert re.search(SAYS[verb], said, re.MULTILINE), f"{line}\n{said}"
            if verb == "stop":
                wait_until_sync(lambda: not any(one.lives() for one in self.running), "all end", LONG_S)


def _option(line: str, name: str) -> str:
    words = shlex.split(line)
    return words[words.index(name) + 1] if name in words else ""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What documents take as given: a small model under each of its names, texts, and a run's definition."""
    sys.path.insert(0, str(ROOT / "examples"))
    example: Any = import_module("hf_trainer")
    sys.path.remove(str(ROOT / "examples"))
    made = tmp_path_factory.mktemp("stage")
    example.make_tiny_model(made / "models/base", example.text_of(None))
    for other in ("checkpoints/base", "runs/tiny"):
        shutil.copytree(made / "models/base", made / other)
    shutil.copy(made / "models/base/config.json", made)
    shutil.copytree(ROOT / "anabranch/workers", made / "text", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(made / "text", made / "texts")
    (made / "run.toml").write_text('[task]\nname = "hf"\noptions = { model = "models/base", data = "text" }\n')
    tasks = (ROOT / "docs/tasks.md").read_text()
    [squares] = [code for code in re.findall(r"```python\n(.*?)```", tasks, re.DOTALL) if "squares.py" in code]
    (made / "squares.py").write_text(squares)
    (made / "examples").symlink_to(ROOT / "examples")
    return made


@contextmanager
def story_of(stage: Path, folder: Path, servers: ServerFactory) -> Iterator[Story]:
    """A story whose processes are all ended, however it goes."""
    shutil.copytree(stage, folder, symlinks=True)
    story = Story(folder, servers, {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    })  # fmt: skip
    try:
        yield story
        story.end_all()
    finally:
        for one in story.running:
            if one.child.poll() is None:
                os.killpg(one.child.pid, signal.SIGKILL)
            one.child.wait()


STORIES = {
    name_of(one): one for one in DOCUMENTS if any(not line.startswith(tuple(NOT_RUN)) for line in lines_of(one))
}


class _Told:
    """A class for each document, so that workers of the suite take them one by one."""

    document: ClassVar[str]

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    def test_every_command_does_what_it_says(
        self, stage: Path, tmp_path: Path, server_factory: ServerFactory
    ) -> None:
        granted = {begins: lines for (name, begins), lines in GRANTED.items() if name == self.document}
        with story_of(stage, tmp_path / "story", server_factory) as story:
            for line in lines_of(STORIES[self.document]):
                if line.startswith(tuple(NOT_RUN)):
                    continue
                for begins in [begins for begins in granted if line.startswith(begins)]:
                    for before in granted.pop(begins):
                        story.tell(before)
                story.tell(line)


class TestReadme(_Told):
    document = "README.md"


class TestJoin(_Told):
    document = "join.md"


class TestTasks(_Told):
    document = "tasks.md"


class TestUpgrade(_Told):
    document = "upgrade.md"


class TestExamples(_Told):
    document = "examples/README.md"


def test_every_document_with_commands_is_told() -> None:
    assert {told.document for told in _Told.__subclasses__()} == STORIES.keys()


def test_what_is_said_about_lines_is_about_lines_of_the_documents() -> None:
    typed = {name_of(document): lines_of(document) for document in DOCUMENTS}
    for begins in NOT_RUN:
        assert any(line.startswith(begins) for lines in typed.values() for line in lines), begins
    for name, begins in GRANTED:
        assert any(line.startswith(begins) for line in typed[name]), (name, begins)
