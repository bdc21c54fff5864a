"""The synchronizer needs no torch: neither to install nor to run."""

from __future__ import annotations

import asyncio
import sys
import tomllib
from pathlib import Path

from anabranch.queue.url import RunUrl
from anabranch.workers.synthetic import Pace, SyntheticWorker
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
