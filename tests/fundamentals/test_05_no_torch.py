"""The synchronizer needs no torch, neither to install nor to run; nor does being a member."""

from __future__ import annotations

import ast
import asyncio
import sys
import tomllib
from pathlib import Path

from anabranch.queue.url import RunUrl
from anabranch.workers.member.synthetic import Pace, SyntheticWorker
from tests.harness import make_spec
from tests.wait import wait_until

ROOT = Path(__file__).parents[2]

BLOCKED = """
import sys
class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch' (blocked by the test)", name="torch")
sys.meta_path.insert(0, NoTorch())
sys.argv = ["anabranch", *sys.argv[1:]]
from anabranch.cli import main
main()
"""


def test_core_dependencies_do_not_name_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [line for line in project["dependencies"] if line.startswith("torch")]
    assert [line for line in project["optional-dependencies"]["worker"] if line.startswith("torch")]


def test_what_a_member_does_without_training_needs_no_torch() -> None:
    """Not even where it is only named: whoever reads the room needs nothing else of the workers."""
    room = "anabranch.workers.member"
    for path in (ROOT / room.replace(".", "/")).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path.name}: a relative import"
                names = [node.module or ""] if node.module != "anabranch.workers" else [f"{node.module}.{names[0]}"]
            for name in names:
                assert name.split(".")[0] != "torch", f"{path.name} imports torch"
                assert not name.startswith("anabranch.workers.") or name.startswith(room), f"{path.name}: {name}"


async def test_it_leads_a_run_where_torch_cannot_be_imported(run_url: str, run_name: str, tmp_path: Path) -> None:
    spec = tmp_path / "run.toml"
    spec.write_text(make_spec(run_name).to_toml())
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BLOCKED, "orchestrator", run_url, "--spec", str(spec), "--no-page",
        "--dir", str(tmp_path / "run"),
    )  # fmt: skip
    worker = SyntheticWorker(RunUrl.parse(run_url), "solo", Pace(step_s=0.003))
    task = asyncio.create_task(worker.run(), name="worker")
    try:
        await wait_until(
            lambda: task.done() or (worker.ready.is_set() and worker.client.tokens > 0), "something was merged"
        )
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        process.terminate()
        assert await process.wait() == 0
