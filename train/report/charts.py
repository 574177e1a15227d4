"""The charts of a report: losses and errors over the steps."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.figure import Figure

from peclr_dali.models.config import NT_XENT
from peclr_dali.models.nt_xent import loss_at_chance
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.pose.metrics import CONSTANTS
from peclr_dali.train.report.contents import Run
from peclr_dali.train.report.galleries import Picture, Section
from peclr_dali.train.runs.pictures import level_line, log_axis

_MUTED: Final = "#62666d"
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e2e3e0", "axes.edgecolor": "#e2e3e0", "axes.labelcolor": _MUTED, "xtick.color": _MUTED,
    "ytick.color": _MUTED, "lines.linewidth": 1.8, "legend.frameon": False,
    "axes.prop_cycle": cycler(color=("#1f6fb4", "#d2691e", "#2e8b57", "#8e5bb5", "#b5372b", "#5b6770")),
}  # fmt: skip
_INCHES, _DPI = (4.2, 2.8), 160


def pretraining_charts(runs: Sequence[Run]) -> list[Section]:
    """Charts of the loss, of the rank of the positive, and of the probe."""
    runs = [run for run in runs if run.kind == "pre-training"]
    if not runs:
        return []
    kinds = {(run.config.loss.name, run.config.train.batch) for run in runs if isinstance(run.config, Config)}
    text = "The rank says how well the positive of a view is found among all other views of a batch."
    level = None
    if len(kinds) == 1:
        ((loss, batch),) = kinds
        text = f"Of the {2 * batch - 1} other views of a batch, one is a view's positive. Its rank is at best 1."
        if loss == NT_XENT:
            chance, formula = loss_at_chance(batch)
            level = chance, f"chance, {formula}"
    charts = _over_steps("Loss", runs, "loss", level=level)
    charts += _over_steps("Mean rank of the positive", runs, "positive_rank", log=True)
    if any(run.validations for run in runs):
        text += " The probe reads keypoints out of the frozen features, on images to which it was not fitted."
        charts += _validated("Probe, 2D error [px of 224]", runs, "epe_px_of_224")
    return [Section("Pre-training", text, charts)]


def finetuning_charts(runs: Sequence[Run]) -> list[Section]:
    """Charts of the losses, and of the errors on held-out images."""
    runs = [run for run in runs if run.kind == "fine-tuning"]
    if not runs:
        return []
    charts = _over_steps("2D keypoints, error [px of the view]", runs, "keypoints_px", log=True)
    if any(row["depth"] for run in runs for row in run.rows):
        charts += _over_steps("Depths, error [reference bones]", runs, "depth", log=True)
    in_3d = _validated("Held out, PA-EPE [cm]", runs, "pa_epe_cm", log=True)
    charts += in_3d or _validated("Held out, 2D EPE [px]", runs, "epe_px", log=True)
    text = "The losses on augmented training images, and the error on images that were not trained on."
    return [Section("Fine-tuning", text, charts)]


def _validated(title: str, runs: Sequence[Run], key: str, *, log: bool = False) -> list[Picture]:
    """A chart of held-out errors, and of the constant prediction's if it is the same for all runs; none if there is
    none.
    """
    rows = [row for run in runs for row in run.validations]
    if not any(np.isfinite(row[key]) for row in rows):
        return []
    constants = {row.get(f"constant_{key}") for row in rows}
    level = None
    if len(constants) == 1 and (value := constants.pop()) is not None:
        level = value, f"constant: {CONSTANTS['rigid_pose' if key == 'pa_epe_cm' else 'mean_keypoints']}"
    return _over_steps(title, runs, key, validations=True, log=log, level=level)


def _over_steps(
    title: str,
    runs: Sequence[Run],
    key: str,
    *,
    validations: bool = False,
    log: bool = False,
    level: tuple[float, str] | None = None,
) -> list[Picture]:
    """A chart with a line for each run: a value of its rows, or of its validations. `level` is a dashed line."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=_INCHES, layout="constrained")
        axes = figure.add_subplot()
        for run in runs:
            rows = [row for row in (run.validations if validations else run.rows) if key in row]
            dots = validations or len(rows) == 1  # a line needs two values to be visible
            steps, values = [row["step"] for row in rows], [row[key] for row in rows]
            axes.plot(steps, values, marker="o" if dots else "", ms=4, label=run.name)
        if len(runs) > 1:
            axes.legend()
        if level is not None:
            level_line(axes, *level, _MUTED)
        if log:
            log_axis(axes)
        axes.set_xlabel("step")
        axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=_DPI)
    width, height = (round(_DPI * length) for length in _INCHES)
    uri = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return [Picture(uri, width, height, title if level is None else f"{title}; dashed: {level[1]}")]
