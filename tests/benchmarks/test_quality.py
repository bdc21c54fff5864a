"""`benchmarks.quality`: what is run, that it is repeatable and resumable, and what the report says of it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.workers.tasks import gpt
from benchmarks import quality
from benchmarks.quality import Config
from benchmarks.quality_plot import plot
from benchmarks.quality_report import BEGIN, END, excess, groups, reach, rewrite, table, targets, time_shares

SHORT = Config(steps=16, H=8, P=4, seed=3)
FIELDS = {"workers", "speeds", "H", "P", "K", "grace", "merge", "adoption", "outer_lr", "outer_momentum", "codec"}


@pytest.fixture(autouse=True)
def little_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "POINTS", 2)
    monkeypatch.setattr(gpt, "HELDOUT_WINDOWS", 32)


def test_a_real_run_is_repeatable_and_its_books_add_up() -> None:
    first, second = quality.run(SHORT), quality.run(SHORT)  # raises if the books do not
    assert first["curve"] == second["curve"]
    assert first["tokens"] == (16 + 8 + 4 + 4) * 2 * 64
    assert 0.5 < first["merged_share"] <= 1
    assert first["curve"][-1][2] < first["curve"][0][2] < 5.6  # nats per byte; log 256 = 5.5
    assert first.keys() >= FIELDS | {"config", "seed", "tokens", "virtual_time", "heldout_loss", "processor", "cores"}
    assert json.loads(json.dumps(first))["key"] == SHORT.key


def test_baselines_see_as_many_tokens_and_take_as_long_as_they_should() -> None:
    sync = quality.run(replace(SHORT, config="sync_dp"))
    alone = quality.run(replace(SHORT, config="fastest_alone"))
    assert (sync["tokens"], sync["virtual_time"]) == (32 * 128, 8 * 4.0)  # 8 steps, each as long as the slowest
    assert (alone["tokens"], alone["virtual_time"]) == (16 * 128, 16.0)
    single = quality.of_twin(replace(SHORT, config="single"), [sync])
    assert single is not None
    assert (single["heldout_loss"], single["virtual_time"]) == (sync["heldout_loss"], 8 * 4.0)


def test_every_lever_of_a_trial_moves_the_result() -> None:
    plain = quality.run(SHORT)["heldout_loss"]
    levers = [
        "weights=0", "warmup=0.5", "settle=0.2", "end=0.1", "rho=0", "agree=2", "beta1=0.5", "forget=0", "slow=1",
        "later=32,from=0.3", "ema=0.5",
    ]  # fmt: skip
    found = {lever: quality.run(replace(SHORT, lever=lever))["heldout_loss"] for lever in levers}
    assert [lever for lever, loss in found.items() if loss == plain] == []


def test_the_official_runs_are_at_most_sixty_and_all_possible() -> None:
    configs = quality.official()
    assert len({config.key for config in configs}) == len(configs) <= 60
    assert all(config.spec().hash for config in configs)
    assert configs[0].config == "sync_dp"  # what everything is measured against comes first
    assert all(config.steps >= 3000 for config in configs)


def test_what_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def fake(config: Config, show: object) -> dict[str, Any]:
        ran.append(config.key)
        return record_of(config, 2.0)

    monkeypatch.setattr(quality, "run", fake)
    path = tmp_path / "results" / "quality.jsonl"
    configs = [replace(SHORT, seed=seed) for seed in range(3)]
    quality.run_all(configs[:2], path)
    quality.run_all(configs, path)
    assert ran == [config.key for config in configs]
    assert [record["seed"] for record in quality.done(path)] == [0, 1, 2]


# --- the report -------------------------------------------------------------------------------------------


def record_of(config: Config, loss: float) -> dict[str, Any]:
    time = config.steps * (4.0 if config.config in ("sync_dp", "single") else 1.0)
    curve = [[1000, time / 2, 2 * loss], [2000, time, loss]]
    figures = {"tokens": 2000, "virtual_time": time, "heldout_loss": loss, "curve": curve, "merged_share": 0.9}
    where = {"processor": "a <fast> one", "cores": 2, "seconds": 1.0, "key": config.key, "workers": 4}
    made: dict[str, Any] = json.loads(json.dumps({**asdict(config), **figures, **where}))
    return made


def records_of(excesses: tuple[float, ...]) -> list[dict[str, Any]]:
    """Synchronous training ends at 2.0, the fastest worker alone at 2.2, we at 2.0 × (1 + excess)."""
    made = []
    for seed, above in enumerate(excesses):
        made.append(record_of(Config(config="sync_dp", seed=seed), 2.0))
        made.append(record_of(Config(config="fastest_alone", seed=seed), 2.2))
        made.append(record_of(Config(seed=seed), 2.0 * (1 + above)))
        made.append(record_of(Config(adoption="rebase", seed=seed), 2.1))
    return made


def test_excess_is_paired_by_seed() -> None:
    sync, _, ours, rebase = groups(records_of((0.01, 0.03)))
    assert excess(ours, sync) == pytest.approx([1.0, 3.0])
    assert excess(rebase, sync) == pytest.approx([5.0, 5.0])
    assert excess(ours, None) == []


def test_when_a_loss_is_reached_lies_on_a_line_between_points() -> None:
    record = record_of(Config(steps=1000), 2.0)  # 4.0 at 500, 2.0 at 1000
    assert reach(record, 2.5) == pytest.approx(875)
    assert reach(record, 4.5) == 500
    assert reach(record, 1.9) is None
    sync, _, ours, _ = groups(records_of((-0.1, 0.1)))
    first, second = time_shares(ours, sync)
    assert first is not None
    assert first < 0.25
    assert second is None


def test_the_table_has_a_line_per_group_and_the_targets_say_what_holds() -> None:
    records, base = records_of((0.01, 0.03)), json.loads(Config().key)
    lines = table(records, base).splitlines()
    assert len(lines) == 2 + 4
    [ours] = [line for line in lines if "decoupled, base" in line]
    assert "2.0400 ± 0.0200" in ours
    assert "| 2.0 ± 1.0 |" in ours
    assert any("adoption rebase" in line for line in lines)
    said = targets(records, base)
    assert "1.00, 3.00 % by seed; kept in 1 of 2" in said


def test_the_plot_is_an_svg_whatever_is_there_so_far() -> None:
    base = json.loads(Config().key)
    for records in (records_of((0.01,)), records_of((0.0, 0.2)), records_of((0.01,))[:1]):
        root = ElementTree.fromstring(plot(records, base))
        assert root.tag.endswith("svg")


def test_the_report_replaces_its_own_part_of_a_page_only(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Experiments\n\nbefore\n")
    rewrite(page, "one")
    page.write_text(page.read_text() + "after\n")
    rewrite(page, "two")
    assert page.read_text() == f"# Experiments\n\nbefore\n\n{BEGIN}\ntwo\n{END}\nafter\n"
