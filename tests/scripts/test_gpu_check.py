"""`scripts/gpu_check.sh` without a GPU: the very same checks at toy size on the CPU."""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from anabranch.merge.names import Codec

ROOT = Path(__file__).parents[2]
MACHINE = {"device", "device_type", "device_memory_gb", "torch", "cuda", "driver", "python", "processor", "cores"}
STALL = {"snapshot_ms", "adopt_ms", "carry_ms", "idle_ms", "share_of_step", "share_of_training"}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The program as a module, without its signal handler."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("gpu_check.__main__")


def toy(tmp_path: Path, *only: str) -> dict[str, Any]:
    """The report of these checks at toy size, run as people run them."""
    chosen = [argument for name in only for argument in ("--only", name)]
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu_check.sh"), "--device", "cpu", "--quick", *chosen],
        env={**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["gpu_check.json"]
    text = (tmp_path / "gpu_check.json").read_text()
    report: dict[str, Any] = json.loads(text)
    assert report.keys() == MACHINE | {"check", "anabranch", "quick", "ok", "checks"}
    assert (report["ok"], report["quick"], report["device_type"]) == (True, True, "cpu")
    for private in (socket.gethostname(), str(ROOT), str(tmp_path), "redis://"):
        assert private not in text
    assert list(report["checks"]) == ["worker", "stall", "codecs", "two_workers"]
    for name in only:
        check = report["checks"][name]
        assert check.keys() == {"ok", "error", "seconds", "figures"}
        assert (check["ok"], check["error"]) == (True, None)
        assert f"\n{name} (" in done.stdout
    return report


def test_boundaries_and_codecs_at_toy_size(tmp_path: Path) -> None:
    checks = toy(tmp_path, "stall", "codecs")["checks"]
    assert checks["codecs"]["figures"]["codecs"].keys() == set(get_args(Codec))
    [size] = checks["stall"]["figures"]["sizes"].values()
    assert size["base_on_device"].keys() == size["base_offloaded"].keys() == STALL
    assert checks["worker"]["error"] == "not run"


@pytest.mark.soak
@pytest.mark.timeout(240)
def test_runs_with_real_workers_at_toy_size(tmp_path: Path) -> None:
    checks = toy(tmp_path, "worker", "two_workers")["checks"]
    figures = {name: check["figures"] for name, check in checks.items()}
    assert figures["worker"]["heldout_loss_ratio"] < 1
    assert figures["worker"]["rounds_merged"] >= 4
    assert 0 < figures["worker"]["merged_share"] <= 1
    assert min(figures["two_workers"][f"merged_share_{name}"] for name in ("one", "two")) > 0
    assert figures["two_workers"]["together_of_alone"] > 0
    for name in ("worker", "two_workers"):
        assert (figures[name]["ledger_balanced"], figures[name]["ledger_mismatches"]) == (True, 0)


def test_without_a_gpu_it_says_so_and_writes_nothing(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(program, "choose_device", lambda wish: torch.device("cpu"))
    assert program.main([]) == 2
    said = capsys.readouterr().err
    assert "no GPU: torch" in said
    assert "--device cpu --quick" in said
    assert program.main(["--quick"]) == 2
    assert not list(tmp_path.iterdir())


def test_a_device_that_is_not_there_is_the_same(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert program.main(["--device", "gpu"]) == 2
    assert "--device 'gpu': unknown" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_failed_check_is_reported_with_its_figures_and_the_others_run(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(bench: Any) -> dict[str, Any]:
        raise program.CheckFailed("the loss did not fall", {"loss": 5.5})

    def breaks(bench: Any) -> dict[str, Any]:
        raise RuntimeError(
            f"{tmp_path}/x.py\n  at redis://:secret@127.0.0.1:1/0 of {socket.gethostname()}: no kernel"
        )

    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(program, "CHECKS", {"a": fails, "b": breaks, "c": lambda bench: {"x": 1}, "d": fails})
    assert program.main(["--device", "cpu", "--quick", "--only", "a", "--only", "b", "--only", "c"]) == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["ok"] is False
    a, b, c, d = report["checks"].values()
    assert (a["ok"], a["error"], a["figures"]) == (False, "the loss did not fall", {"loss": 5.5})
    assert (b["ok"], b["error"]) == (False, "RuntimeError: PATH … at URL of HOST: no kernel")
    assert (c["ok"], c["error"], c["figures"]) == (True, None, {"x": 1})
    assert (d["ok"], d["error"]) == (None, "not run")
    captured = capsys.readouterr()
    assert "FAILED: the loss did not fall" in captured.out
    assert "no kernel" in captured.err
