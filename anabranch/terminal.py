"""What people see in a terminal: the demo's live display, summaries, status tables."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from anabranch.orchestrator.core.view import LEDGER

log = logging.getLogger("anabranch.run")

LINE_EVERY_S = 10.0  # without a terminal: one line of progress
SUMMARY_EVERY_S = 15.0
NARROW = 100  # columns, below which tables leave something out


def quantity(value: float | None) -> str:
    """1234567 as 1.23M."""
    if value is None:
        return "–"
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{unit}"
    return f"{value:.0f}"


def loss_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def share_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def is_well(member: dict[str, Any]) -> bool:
    return member["condition"] == "live" and member["complaint"] is None


def complaints(shown: dict[str, Any]) -> list[str]:
    """What is wrong with members, a sentence each."""
    return [member["complaint"] for member in shown.get("members", []) if member["complaint"] is not None]


def summary_line(shown: dict[str, Any]) -> str:
    """How a run stands, in one line."""
    if not shown.get("fragments"):
        return str(shown["phase"])
    heldout, rounds = shown["heldout"], shown["rounds"]
    parts = [
        f"held-out loss {heldout[-1][1]:.3f}" if heldout else "",
        f"{quantity(shown['tokens'])} tokens merged",
        f"{rounds['all arrived'] + rounds['grace expired']} rounds",
        f"{rounds['abandoned']} abandoned" if rounds["abandoned"] else "",
        f"{shown['live']} live worker{'s' * (shown['live'] != 1)}",
    ]
    return f"{shown['phase']}: " + ", ".join(part for part in parts if part)


async def report(picture: Callable[[], dict[str, Any]]) -> None:
    """A line in the log for whatever phase a run comes to be in, now and then for how it stands, and once for a
    member whose work is mostly in vain."""
    phase, said_at, said = "", 0.0, ""
    wasted: set[int] = set()
    while True:
        shown, now = picture(), time.monotonic()
        line = summary_line(shown)
        if shown["phase"] != phase or (line != said and now - said_at >= SUMMARY_EVERY_S):
            phase, said_at, said = shown["phase"], now, line
            log.info("· %s", line)
        found = {m["incarnation"]: m["complaint"] for m in shown.get("members", []) if m["complaint"] is not None}
        for incarnation in found.keys() - wasted:
            log.warning("%s", found[incarnation])
        wasted |= found.keys()
        await asyncio.sleep(1.0)


def members_table(members: list[dict[str, Any]], width: int) -> Table:
    """One row each; in a narrow terminal fewer columns instead of cut words."""
    wide = width >= NARROW
    columns = ("member", "state", "steps", "step", "loss", "trained", "merged", "lately", "behind")
    table = Table(box=None, pad_edge=False)
    for name in columns if wide else ("member", "state", "loss", "trained", "lately"):
        left = name in ("member", "state")
        table.add_column(name, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for member in members:
        evaluator = member["role"] == "evaluator"
        loss = loss_text(member["heldout_loss"] if evaluator else member["loss"])
        cells: dict[str, str | Text] = {
            "member": member["name"] + (f" ({member['label']})" if wide and member["label"] else ""),
            "state": Text(member["condition"], style="green" if is_well(member) else "yellow"),
            "loss": loss + (" held out" if wide and evaluator else ""),
        }
        if not evaluator:
            cells["lately"] = share_text((member["lately"] or {}).get("merged"))
            cells["steps"], cells["step"] = str(member["steps"]), f"{member['step_s'] * 1000:.0f} ms"
            cells["trained"], cells["merged"] = quantity(member["processed"]), quantity(member["applied"])
            cells["behind"] = str(member["behind"])
        table.add_row(*(cells.get(str(column.header), "") for column in table.columns))
    return table


def ledger_table(rows: list[dict[str, Any]], width: int) -> Table:
    """processed = applied + rejected + discarded + lost + pending, in tokens; as sentences in a narrow terminal."""
    table = Table(title="ledger (tokens, parameter-weighted)", title_justify="left", box=None, pad_edge=False)
    signs = dict.fromkeys(LEDGER[2:], "+ ") | {"applied": "= "}
    figures = [{name: f"{row.get(f'tokens_{name}', row.get(name, 0)):,.0f}" for name in LEDGER} for row in rows]
    table.add_column("worker", overflow="fold")
    if width < 68 + max((len(row["name"]) for row in rows), default=0):  # what words and figures take
        table.add_column("")
        table.show_header = False
        for row, cells in zip(rows, figures, strict=True):
            table.add_row(row["name"], " ".join(f"{signs.get(name, '')}{cells[name]} {name}" for name in LEDGER))
        return table
    for name in LEDGER:
        table.add_column(signs.get(name, "") + name, justify="right", no_wrap=True)
    for row, cells in zip(rows, figures, strict=True):
        table.add_row(row["name"], *cells.values())
    return table


@dataclass
class DemoState:
    """What the terminal shows."""

    phase: str = "starting"
    page: str = ""
    elapsed_s: float = 0.0
    total_s: float = 0.0
    picture: dict[str, Any] = field(default_factory=dict)
    ended: dict[str, int] = field(default_factory=dict)  # children that ended while they should not: exit status


class DemoDisplay:
    """Live panel on a terminal, a line now and then elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._line_at = 0.0
        self._phase: tuple[str, int] | None = None

    def __enter__(self) -> Callable[[DemoState], None]:
        if self._live is not None:
            self._live.start()
        return self.show

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, state: DemoState) -> None:
        if self._live is not None:
            self._live.update(self._panel(state), refresh=True)
            return
        now = time.monotonic()
        phase = (state.phase, len(state.ended))
        if phase != self._phase or now - self._line_at >= LINE_EVERY_S:
            if not self._phase:
                self._console.print(f"status page: {state.page}", soft_wrap=True)
            self._phase, self._line_at = phase, now
            self._console.print(self._line(state), soft_wrap=True, highlight=False)

    def _line(self, state: DemoState) -> str:
        shown = state.picture
        rounds = sum(shown.get("rounds", {}).values())
        heldout = shown.get("heldout") or [[0, None]]
        ended = "".join(f"  {name} has ended (status {status})" for name, status in state.ended.items())
        return (
            f"{state.elapsed_s:5.0f} s  {state.phase}  held-out loss {loss_text(heldout[-1][1])}  "
            f"tokens {quantity(shown.get('tokens', 0))}  rounds {rounds}  "
            f"live {shown.get('live', 0)}  participating {shown.get('participating', 0)}{ended}"
        )

    def _panel(self, state: DemoState) -> Panel:
        shown = state.picture
        parts: list[Any] = [
            Padding(ProgressBar(total=max(1.0, state.total_s), completed=state.elapsed_s)),  # which ends its line
            Text(self._line(state)),
            Text(f"status page: {state.page}", overflow="fold"),
        ]
        if shown.get("members"):
            parts.append(members_table(shown["members"], self._console.width - 4))
        return Panel(Group(*parts), title="anabranch demo", title_align="left")


def print_summary(console: Console, summary: dict[str, Any], directory: str) -> None:
    """What the demo found out."""
    rounds, goodput, page = summary["rounds"], summary["goodput"], summary["page"]
    how = ", ".join(f"{count} {name}" for name, count in rounds.items())
    console.print(
        f"held-out loss of the global model: {loss_text(summary['heldout_loss_start'])} → "
        f"[bold]{loss_text(summary['heldout_loss_end'])}[/] nats/byte in {summary['seconds']:.0f} s of training"
    )
    console.print(ledger_table(summary["workers"], console.width))
    console.print(f"rounds: {how}")
    console.print(f"goodput: {goodput:.1%} of worker time in training steps" if goodput else "goodput: –")
    console.print(f"payload sent by workers: {quantity(summary['bytes_sent'])}B")
    console.print(f"status page: answered {page['answers']} times, failed {page['failures']}")
    console.print(f"checkpoint: {summary['checkpoint']}", soft_wrap=True)
    for name, status in summary["ended"].items():
        console.print(
            f"[bold red]{name} ended with status {status} before the demo did[/]; its log: {directory}/logs"
        )
    console.print(f"\nread what it learned:  anabranch sample {directory}", soft_wrap=True, highlight=False)


def print_status(console: Console, shown: dict[str, Any]) -> None:
    """`anabranch status`."""
    console.print(f"run [bold]{shown['run']}[/]: {shown['phase']}", highlight=False)
    if "members" not in shown:
        return
    heldout = shown["heldout"][-1][1] if shown["heldout"] else None
    rounds = ", ".join(f"{count} {name}" for name, count in shown["rounds"].items())
    console.print(
        f"tokens merged {quantity(shown['tokens'])}, held-out loss {loss_text(heldout)}, rounds: {rounds}",
        highlight=False,
    )
    for item in shown["open"]:
        waits = item["waits_for"] or item["phase"]
        console.print(f"  round {item['round']} of fragment {item['fragment']}: {waits}", highlight=False)
    if (data := shown.get("data")) is not None:
        epochs = f" of {data['epochs']}" if data["epochs"] else ""
        console.print(
            f"data: epoch {data['epoch']}{epochs}, {data['handed_out']} of {data['ranges']} ranges handed out, "
            f"{data['leased']} in hand, {data['waiting']} to be redone, {data['done']} done",
            highlight=False,
        )
    console.print(members_table(shown["members"], console.width))
    for sentence in complaints(shown):
        console.print(f"[yellow]![/] {escape(sentence)}", highlight=False)
    console.print(ledger_table(shown["ledger"], console.width))
    for event in shown.get("events", []):
        console.print(f"  {event['kind']:<10} {event['reason']}", highlight=False, markup=False)
