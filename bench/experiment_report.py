"""What an experiment found: for a terminal, as a picture, and as a table of docs/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.table import Table

from bench.experiments import Outcome
from train.pictures import save_figure

Row = Mapping[str, Any]

UNITS: Final[Mapping[str, str]] = {
    "pa_epe_cm": "PA-EPE, cm",
    "epe_cm": "EPE, cm",
    "epe_px": "2D EPE, px",
    "pa_auc": "PA-AUC",
    "auc": "AUC",
}
_BETTER, _WORSE, _SEED = "#2f6f4f", "#b3412f", "#9aa5b1"


def as_table(outcomes: Sequence[Outcome]) -> Table:
    """The comparisons for a terminal."""
    table = Table(title="better minus than, paired by seed and hand")
    for title in ("better", "than", "metric", "each seed", "mean", "95 % interval", "holds"):
        table.add_column(title)
    for row in outcomes:
        each = ", ".join(f"{difference:+.3f}" for difference in row.differences)
        interval = f"{row.low:+.3f} to {row.high:+.3f}"
        table.add_row(
            row.better, row.than, row.metric, each, f"{row.mean:+.3f}", interval, "yes" if row.holds else "no"
        )
    return table


def save_comparisons(rows: Sequence[Row], out: Path) -> None:
    """Draw comparisons: for each the seeds' differences, their mean and its interval.

    A panel for each comparison, since they have different units.

    Args:
        rows: of the kind "comparison", at least one.
        out: a picture.
    """
    figure = Figure(figsize=(7.5, 0.55 + 0.85 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    for row, axes in zip(rows, figure.subplots(len(rows), squeeze=False)[:, 0], strict=True):
        colour = _BETTER if row["holds"] else _WORSE
        axes.axvline(0, color="black", linewidth=0.8)
        axes.plot([row["low"], row["high"]], [0, 0], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot(row["differences"], [0.35] * len(row["differences"]), "o", color=_SEED, markersize=4)
        axes.plot(row["mean"], 0, "D", color=colour, markersize=6)
        axes.set_ylim(-0.6, 0.8)
        axes.set_yticks([])
        axes.spines[["left", "top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        axes.set_title(f"{row['better']} minus {row['than']}: {UNITS[row['metric']]}", fontsize=9, loc="left")
    figure.supxlabel("difference; dots: each seed, diamond and bar: mean and 95 % interval", fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    save_figure(out, figure, dpi=120)
