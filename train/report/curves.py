"""The charts of a report: losses, errors over time, and errors by keypoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from peclr_dali.models.losses import LOSSES
from peclr_dali.skeleton import SKELETONS
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.evaluation.report import PCK
from peclr_dali.train.pose.metrics import CONSTANTS
from peclr_dali.train.report.charts import Chart, Line, keypoint_chart, line_chart
from peclr_dali.train.report.contents import Measured, Row, Run

_PER_KEYPOINT: Final = {
    "pa_epe_cm": "Mean error, aligned [cm]",
    "pa_epe_px": "Mean error, aligned [px]",
    "epe_px": "Mean error, picture [px]",
}


class Curves(NamedTuple):
    """Charts with their legend."""

    title: str
    text: str
    names: Sequence[str]
    charts: Sequence[Chart]


def error_curves(found: Measured) -> list[Curves]:
    """PCK curves and errors by keypoint."""
    charts, config = [], found.runs[0].config
    assert isinstance(config, FinetuneConfig), "no other run is evaluated"
    for name, (title, unit, factor, _) in PCK.items():
        if all(name in result["pck"] for result in found.results):
            lines = [
                Line([factor * x for x in result["pck"][name]["thresholds"]], result["pck"][name]["share"], number)
                for number, result in enumerate(found.results)
            ]
            charts.append(line_chart(title, lines, x_label=f"distance [{unit}]", percent=True))
    for name, title in _PER_KEYPOINT.items():
        if all(name in result["per_keypoint"] for result in found.results):
            rows = [list(result["per_keypoint"][name].values()) for result in found.results]
            charts.append(keypoint_chart(title, rows, SKELETONS[config.pose.skeleton]))
    text = "PCK: the share of keypoints whose error is at most the distance. Below, the error of each keypoint."
    return [Curves("Where the errors are", text, [run.name for run in found.runs], charts)]


def pretraining_curves(runs: Sequence[Run]) -> list[Curves]:
    """Charts of the loss and of the rank of the positive."""
    runs = [run for run in runs if isinstance(run.config, Config)]
    if not runs:
        return []
    rows = [run.rows for run in runs]
    text = "The rank says how well the positive of a view is found among all other views of a batch."
    losses, batches = {LOSSES.get(run.loss) for run in runs}, {run.config.train.batch for run in runs}
    loss = losses.pop() if len(losses) == 1 else None  # None, too, if it is not known here
    level = None
    if len(batches) == 1:
        (batch,) = batches
        text = f"Of the {2 * batch - 1} other views of a batch, one is a view's positive. Its rank is at best 1."
        if loss is not None and (chance := loss().chance(batch)) is not None:
            level = chance[0], f"chance, {chance[1]}"
    charts = [
        line_chart("loss" if loss is None else loss.title, _lines(rows, "loss"), x_label="step", level=level),
        line_chart("Mean rank of the positive", _lines(rows, "positive_rank"), x_label="step", log=True),
    ]
    probes = [run.validations for run in runs]
    if any(probes):
        text += (
            " The probe reads keypoints out of the frozen features by ridge regression, on images it was not fitted to."
            " Its first value is that of the starting weights after one step."
        )
        charts.append(_error_chart("Probe, 2D error [px of 224]", probes, "epe_px_of_224"))
        if any(np.isfinite(row["pa_epe_cm"]) for rows in probes for row in rows):
            charts.append(_error_chart("Probe, PA-EPE [cm]", probes, "pa_epe_cm"))
    return [Curves("Pre-training", text, [run.name for run in runs], charts)]


def finetuning_curves(runs: Sequence[Run]) -> list[Curves]:
    """Charts of the losses, and of the errors on held-out images."""
    runs = [run for run in runs if isinstance(run.config, FinetuneConfig)]
    if not runs:
        return []
    rows = [run.rows for run in runs]
    keypoints_px = _lines(rows, "keypoints_px")
    charts = [line_chart("2D keypoints, error [px of the view]", keypoints_px, x_label="step", log=True)]
    if any(row["depth"] for of_run in rows for row in of_run):
        charts.append(line_chart("Depths, error [reference bones]", _lines(rows, "depth"), x_label="step", log=True))
    validations = [row for run in runs for row in run.validations]
    if validations:
        in_3d = any(np.isfinite(row["pa_epe_cm"]) for row in validations)
        name, title = ("pa_epe_cm", "Held out, PA-EPE [cm]") if in_3d else ("epe_px", "Held out, 2D EPE [px]")
        charts.append(_error_chart(title, [run.validations for run in runs], name, log=True))
    text = "The losses on augmented training images, and the error on images that were not trained on."
    return [Curves("Fine-tuning", text, [run.name for run in runs], charts)]


def _error_chart(title: str, rows_of_runs: Sequence[Sequence[Row]], key: str, *, log: bool = False) -> Chart:
    """Errors over the steps, with the constant prediction's if it is the same for all runs."""
    constants = {row.get(f"constant_{key}") for rows in rows_of_runs for row in rows}
    level = None
    if len(constants) == 1 and (value := constants.pop()) is not None:
        level = value, f"constant: {CONSTANTS['rigid_pose' if key == 'pa_epe_cm' else 'mean_keypoints']}"
    return line_chart(title, _lines(rows_of_runs, key, dots=True), x_label="step", log=log, level=level)


def _lines(rows_of_runs: Sequence[Sequence[Row]], key: str, *, dots: bool = False) -> list[Line]:
    """A line for each run: one value of its rows over the steps."""
    return [
        Line([row["step"] for row in rows], [row[key] for row in rows], number, dots)
        for number, rows in enumerate(rows_of_runs)
    ]
