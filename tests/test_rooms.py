"""Which room may import which: the table in ARCHITECTURE.md, checked for every import, without exceptions."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "anabranch"
EVERYBODYS = {"errors", "_version"}
PEOPLES = {"cli", "demo", "up", "operate", "terminal", "settings", "signals", "__main__", "__init__"}


def table() -> dict[str, tuple[set[str], set[str]]]:
    """Room: what of ours it may import, what of others it never does."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `([\w/]+)` \| (.*?) \| (.*?) \| .*? \|$", text, re.MULTILINE)
    names = [(room, *({n.strip() for n in cell.split(",")} - {"–"} for cell in cells)) for room, *cells in rows]
    return {room: (allowed, never) for room, allowed, never in names}


ROOMS = table()


def modules() -> dict[str, Path]:
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for name, path in names.items()}


MODULES = modules()


def imports(path: Path) -> Iterator[str]:
    """Everything that is imported anywhere in a file, lazily or for types only, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else node.module


def room_of(module: str) -> str:
    """The room of one of our modules: the innermost that the table has."""
    parts = module.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if "/".join(parts[:length]) in ROOMS:
            return "/".join(parts[:length])
    return parts[0] if parts else "__init__"


def test_every_module_has_a_room() -> None:
    homeless = {name for name in MODULES if room_of(name) not in ROOMS.keys() | EVERYBODYS | PEOPLES | FREE}
    assert not homeless


FREE = {"loops", "faults", "shuffle"}  # they import nothing of ours but errors


@pytest.mark.parametrize("module", sorted(name for name in MODULES if room_of(name) not in PEOPLES))
def test_a_module_imports_what_its_room_may(module: str) -> None:
    room = room_of(module)
    allowed, never = ROOMS.get(room, (set(), {"torch"}))
    for name in imports(MODULES[module]):
        if name in MODULES or name.startswith("anabranch."):
            there = room_of(name)
            assert there in allowed | EVERYBODYS | {room}, f"{module} imports {name}, of {there}"
        else:
            assert name.split(".")[0] not in never, f"{module} imports {name}"


def test_the_core_takes_only_messages_of_the_queue() -> None:
    for module, path in MODULES.items():
        if room_of(module) == "orchestrator/core":
            of_queue = {name for name in imports(path) if name.startswith("anabranch.queue")}
            assert of_queue <= {"anabranch.queue.messages"}, module


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: {other for other in imports(path) if other in MODULES} - {name} for name, path in MODULES.items()}
    behind: dict[str, set[str]] = defaultdict(set)

    def reach(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, "a circle: " + " → ".join([*path[path.index(name) :], name])
        if name not in behind:
            for other in sorted(graph[name]):
                reach(other, (*path, name))
                behind[name] |= {other} | behind[other]

    for name in sorted(graph):
        reach(name, ())


def test_every_row_of_the_table_is_a_room_that_is_there() -> None:
    for room in ROOMS:
        assert (PACKAGE / room).is_dir() or (PACKAGE / f"{room}.py").exists(), room


def test_nothing_outside_the_core_changes_its_state() -> None:
    """It is looked at everywhere, and assigned nowhere."""
    assigned, called = r"(\[[^\]]*\])?\s*(=(?!=)|\+=|-=)", r"\.(append|add|pop|clear|update|remove|discard)\("
    wrong = re.compile(rf"\bstate\.\w+({assigned}|{called})")
    beginning = {"loading.py", "store.py"}  # a state that no core has yet
    for module, path in MODULES.items():
        if room_of(module) in ("orchestrator", "orchestrator/web", "simulate") and path.name not in beginning:
            found = [line for line in path.read_text().splitlines() if wrong.search(line)]
            assert not found, f"{module}: {found}"
