"""What docs/tasks.md and examples/README.md show is tried out."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.settings import load_spec
from anabranch.spec import RoundsSpec
from anabranch.workers.run import Ending, MemberOptions, run_worker
from anabranch.workers.tasks.hf import HFConfig
from tests.examples.test_examples import EXAMPLES, in_process, spec_of
from tests.harness import bench
from tests.wait import wait_until

ROOT = EXAMPLES.parent
TASKS = (ROOT / "docs" / "tasks.md").read_text()
README = (EXAMPLES / "README.md").read_text()


def commands(text: str) -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


async def test_the_task_in_the_document_trains_in_a_run(
    run_url: str, run_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [code] = [block for block in re.findall(r"```python\n(.*?)```", TASKS, re.DOTALL) if "class SquaresTask" in block]
    (tmp_path / "squares.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    default = {"fragments": RoundsSpec().fragments}  # more than it has tensors
    async with bench(run_url, spec_of(run_name, task="squares:SquaresTask", rounds=default)) as run:
        ending = Ending()
        worker = asyncio.create_task(asyncio.to_thread(run_worker, run.url, MemberOptions(name="w"), ending))
        losses: list[float] = []

        def learns() -> bool:
            losses.extend(member.loss for member in run.state.members.values() if member.loss is not None)
            return bool(losses) and losses[-1] < losses[0] / 2

        await wait_until(learns, "its loss is halved")
        await run.reach(3)
        ending.reason = "test"
        await worker


def test_other_pieces_of_python_in_the_document_are_python() -> None:
    for block in re.findall(r"```python\n(.*?)```", TASKS, re.DOTALL):
        ast.parse(block)


def test_every_option_of_hf_is_documented_with_its_default() -> None:
    table = dict(
        re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*?) \|", TASKS.split("### Who says what")[1], re.MULTILINE)
    )
    documented: dict[str, str] = {}
    for names, defaults in table.items():
        found = re.findall(r"`(\w+)`", names)
        values = [defaults] if len(found) == 1 else defaults.split(", ")
        documented |= dict(zip(found, values, strict=True))
    fields = {field.name: field.default for field in dataclasses.fields(HFConfig)}
    assert documented.keys() == fields.keys()
    words = {"model": "none", "data": "Python's own sources", "checksum": "not compared"}
    for name, default in fields.items():
        said = documented[name].strip("`").replace(",", "")
        expected = words.get(name, str(default).lower() if isinstance(default, bool) else default)
        assert said == expected or float(said) == expected, name


@pytest.mark.parametrize("line", [*commands(README), *commands(TASKS)])
def test_every_command_exists_and_takes_its_options(line: str) -> None:
    words = shlex.split(line)
    if words[0] == "export":
        return
    if words[0] == "anabranch":
        shown = CliRunner().invoke(app, [words[1], "--help"]).output
        settings = [value for key, value in pairwise(words) if key == "--set"]
        load_spec(overrides=settings, environment={})
    else:
        [script] = [word for word in words if word.endswith(".py")]
        assert (ROOT / script).is_file()
        shown = (ROOT / script).read_text()
        words = words[words.index(script) :]
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", shown), f"{option} in {line}"


@pytest.mark.parametrize("name", ["nanogpt_loop", "ddp_island", "hf_trainer"])
def test_an_example_explains_itself(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", [name, "--help"])
    with in_process("nanogpt_loop"), in_process(name) as example, pytest.raises(SystemExit) as ended:
        example.main()
    assert ended.value.code == 0
    assert f"examples/{name}.py URL" in capsys.readouterr().out
