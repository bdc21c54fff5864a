"""Documents move with the code: settings, commands and links in them are checked."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.spec import MUTABLE, RunSpec
from anabranch.workers.tasks.base import Recipe
from anabranch.workers.tasks.gpt import GPTConfig
from anabranch.workers.tasks.hf import HFConfig

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def _settings(model: type[BaseModel], prefix: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            found |= _settings(annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = field.default
    return found


def _table() -> dict[str, tuple[str, str]]:
    rows = re.findall(r"^\| `([\w.]+)` \| (.*?) \| (.*?) \|$", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    return {key: (default, text) for key, default, text in rows}


def test_every_setting_is_documented_with_its_default() -> None:
    settings, table = _settings(RunSpec), _table()
    assert set(table) == set(settings)
    for key, (default, text) in table.items():
        assert ("*live*" in text) == (key in MUTABLE), key
        if default.startswith("`"):
            documented = tomllib.loads("x = " + default.strip("`"))["x"]
            expected = settings[key] if key != "task.options" else {}
            assert documented == expected, key


@pytest.mark.parametrize(("task", "config"), [("gpt", GPTConfig), ("hf", HFConfig)])
def test_every_option_of_a_task_is_documented_with_its_default(task: str, config: type[Recipe]) -> None:
    _, _, table = (ROOT / "docs/tasks.md").read_text().partition(f"| option of `{task}` |")
    found: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) \| .*? \|$", table.partition("\n\n")[0], re.MULTILINE):
        values = re.split(r", (?=\S)", defaults)
        found |= dict(zip(re.findall(r"`(\w+)`", names), values, strict=True))
    assert set(found) == set(config.__dataclass_fields__)
    for name, text in found.items():
        default = config.__dataclass_fields__[name].default
        if default == "" or isinstance(default, bool):
            assert default == "" or text == str(default).lower(), name
        elif isinstance(default, str):
            assert text == f"`{default}`", name
        else:
            assert float(text.replace(",", "")) == default, name


def _commands() -> list[tuple[str, str]]:
    found = []
    for path in DOCUMENTS:
        for block in re.findall(r"```sh\n(.*?)```", path.read_text(), re.DOTALL):
            found += [(path.name, line.split("  #")[0].strip()) for line in block.splitlines() if line.strip()]
    return found


@pytest.mark.parametrize(("document", "line"), _commands())
def test_every_command_in_the_documents_exists(document: str, line: str) -> None:
    words = [word for word in shlex.split(line) if not word.startswith("ANABRANCH_URL=")]
    if words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"{document}: {line}"
        return
    assert words[0] == "anabranch", f"{document}: {line}"
    result = CliRunner().invoke(app, [words[1], "--help"])
    assert result.exit_code == 0, f"{document}: {line}"
    for option in (word for word in words[2:] if word.startswith("--")):
        assert option in result.output, f"{document}: {option} in {line}"


def test_the_five_lines_in_the_readme_are_python_and_name_what_exists() -> None:
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code is not None
    used = {node.attr for node in ast.walk(ast.parse(code.group(1))) if isinstance(node, ast.Attribute)}
    from anabranch.workers import joining

    for name in used & {"join", "batches", "step", "close"}:
        assert hasattr(joining, name) or hasattr(joining.Session, name)
    assert {"join", "batches", "step", "close"} <= used


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name}: {target}"
