"""`benchmarks.quality`: what is run, that it is repeatable and resumable, and what the report says of it."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import quality, quality_runs
from benchmarks.quality_plot import plot
from benchmarks.quality_report import baseline, excess, groups, interval, reach, rewrite, table, targets
from benchmarks.quality_runs import Config

SHORT = Config(steps=16, H=8, P=4, seed=3)
FIELDS = {
    "config", "workers", "speeds", "H", "P", "K", "grace", "merge", "embedding", "adoption", "staleness", "outer_lr",
    "outer_momentum", "inner", "codec", "seed", "tokens", "virtual_time", "heldout_loss", "heldout_windows", "curve",
    "merged_share", "default",
}  # fmt: skip


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_a_real_run_is_repeatable_and_its_books_add_up(inner: str) -> None:
    config = replace(SHORT, inner=inner)
    first, second = quality_runs.run(config), quality_runs.run(config)  # raises if the books do not
    assert first["curve"] == second["curve"]
    assert first["tokens"] == (16 + 8 + 4 + 4) * 2 * 64
    assert 0.5 < first["merged_share"] <= 1
    assert len(first["merged_shares"]) == 4
    assert first["curve"][-1][2] < first["curve"][0][2] < 5.6  # nats per byte; log 256 = 5.5
    assert first.keys() >= FIELDS | {"processor", "cores"}
    assert json.loads(json.dumps(first))["key"] == config.key
    assert not first["default"]


def test_baselines_see_as_many_tokens_and_take_as_long_as_they_should() -> None:
    sync = quality_runs.run(replace(SHORT, config="sync_dp"))
    balanced = quality_runs.run(replace(SHORT, config="sync_balanced"))
    alone = quality_runs.run(replace(SHORT, config="fastest_alone"))
    assert (sync["tokens"], sync["virtual_time"]) == (32 * 128, 8 * 4.0)  # 8 steps, each as long as the slowest
    assert (balanced["tokens"], balanced["virtual_time"]) == (32 * 128, 16.0)  # 16 steps of 256, nobody waits
    assert (alone["tokens"], alone["virtual_time"]) == (16 * 128, 16.0)
    assert len({record["heldout_loss"] for record in (sync, balanced, alone)}) == 3
    single = quality_runs.of_twin(replace(SHORT, config="single"), [sync])
    assert single is not None
    assert (single["heldout_loss"], single["virtual_time"]) == (sync["heldout_loss"], 8 * 4.0)


def test_batches_may_differ_and_fractions_of_windows_come_every_few_steps() -> None:
    config = replace(SHORT, speeds=(1.0, 0.5, 0.125), batches=(3, 2, 1))
    assert quality_runs.run(config)["tokens"] == (16 * 3 + 8 * 2 + 2 * 1) * 64
    assert quality_runs.run(replace(config, config="sync_balanced"))["tokens"] == int(16 * 4.125) * 64
    assert quality_runs.run(replace(config, config="sync_dp"))["tokens"] == round(16 * 4.125 / 6) * 6 * 64


def test_equal_workers_are_balanced_anyway() -> None:
    equal = replace(SHORT, speeds=(1.0, 1.0), steps=8)
    sync = quality_runs.run(replace(equal, config="sync_dp"))
    twin = quality_runs.of_twin(replace(equal, config="sync_balanced"), [sync])
    assert twin is not None
    assert (twin["config"], twin["curve"]) == ("sync_balanced", [list(point) for point in sync["curve"]])
    assert quality_runs.of_twin(replace(SHORT, config="sync_balanced"), [sync]) is None


def test_the_first_part_of_a_run_may_have_another_h() -> None:
    plain = quality_runs.run(SHORT)
    later = quality_runs.run(replace(SHORT, H_later=32, H_later_from=0.3))
    assert sum(later["rounds"].values()) < sum(plain["rounds"].values())


def test_every_lever_of_a_trial_moves_the_result() -> None:
    plain = quality_runs.run(SHORT)["heldout_loss"]
    levers = [
        "weights=0", "warmup=0.5", "settle=0.2", "end=0.1", "rho=0", "agree=2", "beta1=0.5", "forget=0", "slow=1",
        "ema=0.5", "lean=1", "momenta=1",
    ]  # fmt: skip
    found = {lever: quality_runs.run(replace(SHORT, lever=lever))["heldout_loss"] for lever in levers}
    assert [lever for lever, loss in found.items() if loss == plain] == []


def test_the_official_runs_are_all_possible_and_nothing_was_chosen_on_their_seeds() -> None:
    configs = quality.official()
    assert all(config.spec().hash for config in configs)
    assert {config.seed for config in configs} == set(quality.FRESH)
    assert configs[0].config == "sync_dp"  # what everything is measured against comes first
    assert all(config.steps >= 3000 for config in configs)
    shipped = [config for config in configs if config.config == "decoupled" and config.is_shipped]
    plain = [config for config in shipped if config == Config(seed=config.seed)]
    assert len(plain) == len(quality.FRESH)


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


TIMES = {"sync_dp": 4.0, "single": 4.0}


def record_of(config: Config, loss: float) -> dict[str, Any]:
    time = config.steps * TIMES.get(config.config, 1.0)
    curve = [[1000, time / 2, 2 * loss], [2000, time, loss]]
    figures = {"tokens": 2000, "virtual_time": time, "heldout_loss": loss, "curve": curve, "merged_share": 0.9}
    where = {"processor": "a <fast> one", "cores": 2, "seconds": 1.0, "key": config.key, "workers": 4}
    made: dict[str, Any] = json.loads(
        json.dumps({**asdict(config), **figures, **where, "default": config.is_shipped})
    )
    return made


def records_of(excesses: tuple[float, ...]) -> list[dict[str, Any]]:
    """Synchronous training ends at 2.0, balanced at 1.9, the fastest worker alone at 2.2, or at 2.5 with another
    rate, we at 2.0 × (1 + excess)."""
    made = []
    for seed, above in enumerate(excesses):
        made.append(record_of(Config(config="sync_dp", seed=seed), 2.0))
        made.append(record_of(Config(config="fastest_alone", seed=seed, inner_lr=1e-2), 2.5))
        made.append(record_of(Config(config="fastest_alone", seed=seed), 2.2))
        made.append(record_of(Config(config="sync_balanced", seed=seed), 1.9))
        made.append(record_of(Config(seed=seed), 2.0 * (1 + above)))
        made.append(record_of(Config(H=7, seed=seed), 2.1))
    return made


def test_excess_is_paired_by_seed() -> None:
    sync, _, _, _, ours, other = groups(records_of((0.01, 0.03)))
    assert excess(ours, sync) == pytest.approx([1.0, 3.0])
    assert excess(other, sync) == pytest.approx([5.0, 5.0])
    assert excess(ours, None) == []


def test_of_a_baseline_with_several_rates_the_best_counts_and_never_one_of_other_workers() -> None:
    found = groups(records_of((0.01, 0.03)))
    alone = baseline(found, found[4], "fastest_alone")
    assert alone is found[2]
    [lonely] = groups([record_of(Config(speeds=(1.0, 1.0)), 2.0)])
    assert baseline(found, lonely, "sync_dp") is None
    [muon] = groups([record_of(Config(inner="muon" if Config().inner == "adamw" else "adamw"), 2.0)])
    assert baseline(found, muon, "sync_dp") is None


def test_the_interval_is_students() -> None:
    assert interval([1.0, 3.0]) == pytest.approx(12.706)
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert interval([1.0] * 20) == 0
    assert interval([1.0]) == float("inf")


def test_when_a_loss_is_reached_lies_on_a_line_between_points() -> None:
    record = record_of(Config(steps=1000), 2.0)  # 4.0 at 500, 2.0 at 1000
    assert reach(record, 2.5) == pytest.approx(875)
    assert reach(record, 4.5) == 500
    assert reach(record, 1.9) is None


def test_the_table_has_a_line_per_group_and_the_targets_say_what_holds() -> None:
    records, base = records_of((0.01, 0.03)), json.loads(Config().key)
    lines = table(records, base).splitlines()
    assert len(lines) == 2 + 6
    [ours] = [line for line in lines if "decoupled, as shipped" in line]
    assert "2.0400 ± 0.2541" in ours
    assert "| 2.00 ± 12.71 |" in ours
    assert any("decoupled: H 7" in line for line in lines)
    said = targets(records, base)
    assert "1 % over synchronous training at equal tokens: **missed**, 2.00 ± 12.71 % (by seed +1.00, +3.00)" in said
    assert "below the fastest worker alone: **kept**, -7.27" in said
    assert "eight equal workers: at most 3 % over synchronous training: not measured yet" in said


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
    assert (
        page.read_text() == "# Experiments\n\nbefore\n\n<!-- quality: begin -->\ntwo\n<!-- quality: end -->\nafter\n"
    )
