"""What people read in a terminal, however narrow it is."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from anabranch.orchestrator.core.view import LEDGER, ledger_rows, view
from anabranch.terminal import DemoDisplay, DemoState, is_well, print_status, print_summary, summary_line
from tests.orchestrator.bench import Bench, make_spec

NAMES = ("laptop-of-ada", "gpu-box-with-a-long-name")


@pytest.fixture
def picture() -> dict[str, Any]:
    bench = Bench(make_spec(quorum=2))
    for name in NAMES:
        bench.worker(name)
    bench.steps(**dict.fromkeys(NAMES, 4))
    bench.contribute(NAMES[0])
    shown = view(bench.state, bench.now)
    return {**shown, "ledger": ledger_rows(shown), "events": [{"kind": "merged", "reason": "all arrived: 2 of 2"}]}


def printed(width: int) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width, force_terminal=True, color_system=None), out


@pytest.mark.parametrize("width", [60, 80, 140])
def test_no_word_is_cut_in_any_terminal(width: int, picture: dict[str, Any]) -> None:
    console, out = printed(width)
    print_status(console, picture)
    text = out.getvalue()
    assert "…" not in text
    assert all(name in text for name in NAMES)
    assert all(column in text for column in LEDGER)
    assert "quorum 1/2" in text
    assert max(map(len, text.splitlines())) <= width


def test_whose_work_is_in_vain_is_not_green_and_a_sentence_says_what_to_do(picture: dict[str, Any]) -> None:
    said = "of it 20% were merged lately: [set] workers.adoption"
    members = [dict(member) for member in picture["members"]]
    members[0] |= {"complaint": said, "lately": {"merged": 0.2, "rejected": 0.0, "discarded": 0.8}}
    assert [is_well(member) for member in members[:2]] == [False, True]
    console, out = printed(140)
    print_status(console, {**picture, "members": members})
    assert f"! {said}" in out.getvalue()
    assert " 20% " in out.getvalue()


@pytest.mark.parametrize("width", [60, 140])
def test_the_demos_panel_shows_how_it_goes_and_where_the_page_is(width: int, picture: dict[str, Any]) -> None:
    console, out = printed(width)
    display = DemoDisplay(console)
    state = DemoState("training", "http://127.0.0.1:43210/", 12.0, 120.0, picture, {"half": -9})
    with display as show:
        show(state)
    text = out.getvalue()
    assert "12 s  training" in text
    assert "half has ended" in text.replace("\n", " ")
    assert "status page: http://127.0.0.1:43210/" in text
    assert all(name in text for name in NAMES)


def test_the_summary_names_who_ended_too_early(picture: dict[str, Any]) -> None:
    console, out = printed(60)
    summary = {
        "rounds": {"all arrived": 3}, "goodput": None, "page": {"answers": 3, "failures": 0},
        "heldout_loss_start": 5.6, "heldout_loss_end": None, "seconds": 120.0, "workers": picture["ledger"],
        "bytes_sent": 1_234_567, "checkpoint": None, "ended": {"half": -9},
    }  # fmt: skip
    print_summary(console, summary, "runs/demo")
    assert "half ended with status -9 before the demo did" in out.getvalue().replace("\n", " ")


def test_how_a_run_stands_in_one_line(picture: dict[str, Any]) -> None:
    assert summary_line(picture) == "training: 0 tokens merged, 0 rounds, 2 live workers"
    assert summary_line(
        {**picture, "heldout": [(0, 5.5)], "live": 1, "rounds": {**picture["rounds"], "abandoned": 2}}
    ) == ("training: held-out loss 5.500, 0 tokens merged, 0 rounds, 2 abandoned, 1 live worker")
    assert summary_line({"phase": "starting"}) == "starting"
    assert summary_line({**picture, "fragments": [], "phase": "waiting for a first worker"}) == (
        "waiting for a first worker"
    )
