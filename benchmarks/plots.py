"""What the plots of docs/ have in common: names, colours, text that stays text, and repeatable files."""

from __future__ import annotations

import io

import matplotlib as mpl
from matplotlib.figure import Figure

COLORS = {"sync_dp": "#999999", "sync_balanced": "#555555", "fastest_alone": "#d08a1d", "decoupled": "#1f6fb2"}
CALLED = {
    "sync_dp": "synchronous, equal batches",
    "sync_balanced": "synchronous, balanced",
    "fastest_alone": "fastest worker alone",
    "decoupled": "decoupled, as shipped",
}
mpl.rcParams.update(
    {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#e5e5e5",
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "anabranch",
    }
)


def drawing(width: float, height: float) -> Figure:
    """An empty one, in inches; it needs no display."""
    return Figure((width, height), layout="constrained")


def svg(drawn: Figure) -> str:
    file = io.StringIO()
    drawn.savefig(file, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
