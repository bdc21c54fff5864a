"""Documents move with the code: settings, commands and links in them are checked."""

from __future__ import annotations

import ast
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from anabranch.cli import app
from anabranch.spec import MUTABLE, RunSpec

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
    from anabranch.workers import session

    for name in used & {"join", "batches", "step", "close"}:
        assert hasattr(session, name) or hasattr(session.Session, name)
    assert {"join", "batches", "step", "close"} <= used


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text()):
        assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_imports_point_one_way() -> None:
    shared = {"checkpoints", "queue", "merge", "errors", "spec", "faults", "model", "_version", "loops", "shuffle"}
    rules = {
        "merge": {"merge", "errors"},
        "queue": {"queue", "merge", "errors", "spec", "loops", "_version"},
        "checkpoints": {"checkpoints", "merge", "errors", "model", "_version"},
        "orchestrator": {"orchestrator", *shared},
        "workers": {"workers", *shared},
    }
    pure = {
        "core",
        "rounds",
        "membership",
        "policies",
        "grace",
        "ledger",
        "state",
        "view",
        "events",
        "ranges",
        "timelines",
    }
    for room, allowed in rules.items():
        for path in (ROOT / "anabranch" / room).rglob("*.py"):
            names = _imports(path)
            ours = {name.split(".")[1] for name in names if name.startswith("anabranch.")}
            assert ours <= allowed, f"{path.name} imports {ours - allowed}"
            if room in {"queue", "merge", "checkpoints", "orchestrator"}:
                assert not any(name.split(".")[0] == "torch" for name in names), f"{path.name} imports torch"
            if room == "orchestrator" and path.stem in pure:
                assert not {"asyncio", "time", "redis", "logging", "random"} & {n.split(".")[0] for n in names}, path


def _imports(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def test_compose_file_fits_its_schema_and_keeps_the_promises() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = (ROOT / "compose.yaml").read_text()
    for promise in ("noeviction", "--appendonly", "--requirepass", "127.0.0.1:8765:8765"):
        assert promise in text
    for target in re.findall(r"target: (\w+)", text):
        assert f" AS {target}" in (ROOT / "Dockerfile").read_text()


def test_constraints_pin_every_direct_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    pinned = {
        re.split(r"[=]=", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for line in wanted:
        name = re.split(r"[\[><=~; ]", line)[0].lower()
        assert name in pinned, f"{name} is not in constraints.txt"


def test_json_results_in_docs_parse() -> None:
    for path in (ROOT / "docs").rglob("*.json"):
        json.loads(path.read_text())
