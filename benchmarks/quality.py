"""Quality at equal tokens and at equal time: held-out loss of decoupled training against synchronous training.

    python -m benchmarks.quality --all       # every configuration that is not in docs/results/quality.jsonl yet
    python -m benchmarks.quality --report    # table in docs/experiments.md and docs/quality.svg from that file
    python -m benchmarks.quality --try "H=8;adoption=rebase" --seeds 40 41 --out docs/results/quality_trials.jsonl

What is run, and what against, is in `benchmarks/quality_runs.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.quality_plot import plot
from benchmarks.quality_report import machine_of, rewrite, table, targets
from benchmarks.quality_runs import UNEQUAL, Config, of_twin, run, twin_of

DOCS = Path(__file__).parents[1] / "docs"
RESULTS = DOCS / "results" / "quality.jsonl"


def done(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_all(configs: list[Config], path: Path, processes: int = 1) -> None:
    """Run what is missing, `processes` at a time, and keep each as soon as it is there."""
    known = {record["key"] for record in done(path)}
    missing = [config for config in configs if config.key not in known]
    wanted = known | {config.key for config in configs}
    twins = {config.key: twin_of(config) for config in missing}
    runs = [c for c in missing if (same := twins[c.key]) is None or same.key not in wanted]
    began = time.monotonic()
    for number, (config, record) in enumerate(_finished(runs, processes), start=1):
        _keep(record, path)
        left_s = (time.monotonic() - began) / number * (len(runs) - number)
        what = f"{json.dumps(differs(config))} {record['heldout_loss']:.4f}"
        sys.stderr.write(f"\r{number}/{len(runs)} {what}, {left_s / 60:.0f} min left\n")
    for config in missing:
        if config not in runs and (twin := of_twin(config, done(path))) is not None:
            _keep(twin, path)


def _finished(configs: list[Config], processes: int) -> Iterator[tuple[Config, dict[str, Any]]]:
    """Each run as soon as it is done."""
    if processes == 1:
        yield from ((config, run(config, _show)) for config in configs)
        return
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(run, config): config for config in configs}
        for finished in as_completed(waiting):
            yield waiting[finished], finished.result()


def _keep(record: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _show(share: float, loss: float) -> None:
    sys.stderr.write(f"\r{share:4.0%}: {loss:.4f}")


MEASURED_H = (8, 24, 100, 300)  # of which benchmarks/link_speed.py makes a function of H
FRESH = range(100, 106)  # never used to choose anything


def official() -> list[Config]:
    """The runs of docs/experiments.md, what matters most first: one factor at a time around what is shipped."""
    base = Config()

    def seeds(count: int, **changes: Any) -> list[Config]:
        return [replace(base, **changes, seed=seed) for seed in FRESH[:count]]

    def against(count: int, *baselines: str, **changes: Any) -> list[Config]:
        return [c for name in (*baselines, "decoupled") for c in seeds(count, config=name, **changes)]

    fair = ("sync_dp", "sync_balanced", "fastest_alone")
    other = "muon" if base.inner == "adamw" else "adamw"
    return [
        *against(6, *fair, "single"),
        *(c for rate in (2e-3, 4.5e-3) for c in seeds(3, config="fastest_alone", inner_lr=rate)),
        *against(6, *fair, speeds=(1.0,) * 8),
        *against(6, *fair, inner=other),
        *against(3, *fair, size="large"),
        *(c for speeds in ((1.0,), (1.0, 1 / 16), (1.0, *(1 / 16,) * 4)) for c in seeds(6, speeds=speeds)),
        *against(3, *fair, speeds=(1.0,) * 4, batches=(8, 4, 2, 2)),
        *against(3, *fair, batch=4),
        *(c for fragments in (1, 16) for c in seeds(3, P=fragments)),
        *(c for steps in MEASURED_H if steps != base.H for c in seeds(3, H=steps)),
        *(c for steps in MEASURED_H if steps != base.H for c in seeds(3, H=steps, speeds=(1.0,) * 8)),
        *seeds(3, adoption="overwrite" if base.adoption != "overwrite" else "rebase"),
        *seeds(3, merge="average", embedding="average"),
        *seeds(3, embedding="average"),
        *seeds(3, outer_lr=0.5, outer_momentum=0.5),
        *seeds(3, outer_lr=0.7, outer_momentum=0.5),
        *seeds(3, K="all", grace=0.0),
        *seeds(3, grace=0.0),
        *seeds(3, tau=1),
        *against(3, *fair, speeds=UNEQUAL[8]),
        *against(3, *fair, speeds=UNEQUAL[2]),
    ]


def report(path: Path) -> None:
    """The table and the plot."""
    base = json.loads(Config().key)
    place = {config.key: number for number, config in enumerate(official())}
    records = sorted(
        (record for record in done(path) if record["key"] in place), key=lambda record: place[record["key"]]
    )
    if not records:
        raise SystemExit(f"no official run in {path} yet: start them with --all")
    text = "\n\n".join([machine_of(records), targets(records, base), table(records, base)])
    rewrite(DOCS / "experiments.md", text)
    (DOCS / "quality.svg").write_text(plot(records, base))
    sys.stdout.write(text + "\n")


def differs(config: Config) -> dict[str, Any]:
    """What is not as in the base configuration."""
    base = asdict(Config())
    return {key: value for key, value in asdict(config).items() if value != base[key]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--try", dest="tried", action="append", default=[], metavar="KEY=VALUE;...")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0], help="of what is tried")
    parser.add_argument("--all", action="store_true", help="the official runs that are missing")
    parser.add_argument("--report", action="store_true", help="table and plot from what is there")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--processes", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    tried = [replace(Config(), seed=seed, **_pairs(item)) for item in options.tried for seed in options.seeds]
    configs = tried + (official() if options.all else [])
    run_all(configs, options.out, options.processes)
    if options.report:
        report(options.out)


def _pairs(text: str) -> dict[str, Any]:
    pairs = dict(item.split("=", 1) for item in text.split(";") if item)
    values = {key: json.loads(value) if value[:1] in '0123456789["' else value for key, value in pairs.items()}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}


if __name__ == "__main__":
    main()
