"""The charts of a report: losses and errors over the steps."""

import io
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from peclr_dali.models.config import NT_XENT
from peclr_dali.models.nt_xent import loss_at_chance
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pose.metrics import CONSTANTS
from peclr_dali.train.report.contents import Measured, Run
from peclr_dali.train.report.galleries import Picture, Section
from peclr_dali.train.runs.pictures import legend_name, level_line, log_axis


class Chart(NamedTuple):
    """A value in the rows of runs, or in those of their validations and probes if `held_out`."""

    title: str
    key: str
    held_out: bool = False
    log: bool = False


SECTIONS: Final[dict[str, tuple[str, *tuple[Chart, ...]]]] = {  # for each kind of run, a text and charts
    "pre-training": (
        "The rank says how well the positive of a view is found among all other views of a batch; it is at best 1. A "
        "probe, if there is one, reads keypoints out of the frozen features, on images to which it was not fitted.",
        Chart("Loss", "loss"),
        Chart("Mean rank of the positive", "positive_rank", log=True),
        Chart("Probe, 2D error [px of 224]", "epe_px_of_224", held_out=True),
    ),
    "fine-tuning": (
        "The losses on augmented training images, and the errors on images that were not trained on.",
        Chart("2D keypoints, error [px of the view]", "keypoints_px", log=True),
        Chart("Depths, error [reference bones]", "depth", log=True),
        Chart("Held out, 2D EPE [px]", "epe_px", held_out=True, log=True),
        Chart("Held out, PA-EPE [cm]", "pa_epe_cm", held_out=True, log=True),
    ),
}

_GREY: Final = "#62666d"
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.ymargin": 0.12, "axes.grid": True,
    "grid.color": "#e2e3e0", "axes.labelcolor": _GREY, "xtick.color": _GREY, "ytick.color": _GREY,
    "lines.linewidth": 1.8, "legend.frameon": False,
}  # fmt: skip


def charts(runs: Sequence[Run], measured: Measured | None) -> list[Section]:
    """PCK curves and errors by keypoint, as `evaluate` drew them; the charts of pre-training, and of fine-tuning."""
    sections = []
    if measured is not None and (file := measured.runs[0].folder.root / "evaluation" / "pck.png").exists():
        text = "PCK: the share of keypoints whose error is at most the distance."
        sections.append(Section("Where the errors are", text, [Picture("png", file.read_bytes())], wide=True))
    for kind, (text, *charts_of_kind) in SECTIONS.items():
        same_kind = [run for run in runs if run.kind == kind]
        if pictures := [picture for chart in charts_of_kind if (picture := _draw(chart, same_kind)) is not None]:
            sections.append(Section(kind.capitalize(), text, pictures))
    return sections


def _draw(chart: Chart, runs: Sequence[Run]) -> Picture | None:
    """A chart with a line for each run; None if no run has the value."""
    lines, levels = {}, set()
    for run in runs:
        rows = run.validations if chart.held_out else run.rows
        known = [(row["step"], row[chart.key]) for row in rows if row.get(chart.key) and np.isfinite(row[chart.key])]
        if known:
            lines[run.name] = known
            levels.add(_level(chart, run))
    if not lines:
        return None
    level = levels.pop() if len(levels) == 1 else None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.2, 2.8), layout="constrained")
        axes = figure.add_subplot()
        for name, known in lines.items():
            dots = chart.held_out or len(known) == 1  # a line needs two values to be visible
            axes.plot(*zip(*known, strict=True), marker="o" if dots else "", ms=4, label=legend_name(name))
        if len(lines) > 1:
            axes.legend()
        if level is not None:
            level_line(axes, *level, _GREY)
        if chart.log:
            log_axis(axes)
        axes.set_xlabel("step")
        axes.set_title(chart.title, loc="left", fontsize=9, fontweight="bold")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
    limit, constant = level if chart.held_out and level is not None else (np.inf, "")
    no_better = ", ".join(name for name, known in lines.items() if known[-1][1] >= limit)
    caption = f"{no_better}: no better than {constant}, which does not look at the picture." if no_better else ""
    return Picture("png", buffer.getvalue(), caption)


def _level(chart: Chart, run: Run) -> tuple[float, str] | None:
    """The loss of a run at chance, or the error of a constant prediction on its held-out images, and what it is."""
    if chart.key == "loss" and isinstance(run.config, Config) and run.config.loss.name == NT_XENT:
        chance, formula = loss_at_chance(run.config.train.batch)
        return chance, f"chance, {formula}"
    if not chart.held_out or f"constant_{chart.key}" not in run.validations[-1]:
        return None
    name = "rigid_pose" if chart.key == "pa_epe_cm" else "mean_keypoints"
    return run.validations[-1][f"constant_{chart.key}"], f"a constant, {CONSTANTS[name]}"
