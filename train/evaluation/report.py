"""Writes the results of an evaluation: a table, JSON, a row per sample, PCK curves, and pictures of the worst."""

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import cv2
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from rich.markup import escape
from rich.table import Column, Table

from peclr_dali.errors import printable
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.skeleton import HAND
from peclr_dali.train.evaluation.errors import Evaluation
from peclr_dali.train.pose.inference import Poses
from peclr_dali.train.pose.metrics import (
    METRICS,
    NO_INTERVAL,
    THRESHOLDS_M,
    THRESHOLDS_PX,
    Interval,
    beats_constants,
    constants_in_words,
    mean_over_samples,
    pck_curve,
)
from peclr_dali.train.pose.pictures import pose_picture
from peclr_dali.train.runs.pictures import Image, legend_name, save_figure, save_sheet
from peclr_dali.writing import write_text

CAPTION_PX = 20
"""Height of the text above a picture."""


PCK: Final = {
    "aligned_m": ("PCK, aligned", "pa_epe_cm", 100.0, THRESHOLDS_M),
    "3d_m": ("PCK, camera's frame", "epe_cm", 100.0, THRESHOLDS_M),
    "2d_px": ("PCK, picture", "epe_px", 1.0, THRESHOLDS_PX),
}
"""PCK curves, the share of errors within thresholds, by their names in the results: title, metric, the factor from the
unit of the thresholds to the metric's, thresholds."""


def results(evaluation: Evaluation, constants: Mapping[str, Mapping[str, float]], crop: str) -> dict[str, Any]:
    """All results, for JSON."""
    tables, each = evaluation.errors.tables, evaluation.several
    return {
        "checkpoint": str(evaluation.run.path),
        "checkpoints": [str(one.run.path) for one in each],
        "step": evaluation.run.step,
        "data": printable(f"{evaluation.index.name}: {evaluation.index.root}"),
        "sources": [dataclasses.asdict(source) for source in evaluation.config.data],
        "crop": crop,
        "alignment": "proper rotations" if evaluation.proper_rotation else "reflections allowed, as FreiHAND's script",
        "images": len(evaluation.index),
        "left_out": evaluation.errors.left_out,
        "poses": {name: int((~np.isnan(table)).any(axis=1).sum()) for name, table in tables.items()},
        "metrics": intervals_for_json(evaluation.intervals),
        "confidence": 0.95,
        "constants": constants,
        "lost_to_constants": [
            name
            for name, interval in evaluation.intervals.items()
            if beats_constants(interval.value, name, constants) is False
        ],
        "per_keypoint": {
            name: dict(zip(HAND.keypoints, _for_json(mean_over_samples(table)), strict=True))
            for name, table in tables.items()
        },
        "pck": {
            name: {
                "thresholds": thresholds.tolist(),
                "share": _for_json(
                    np.mean([pck_curve(one.errors.tables[metric] / factor, thresholds) for one in each], axis=0)
                ),
            }
            for name, (_, metric, factor, thresholds) in PCK.items()
            if metric in tables
        },
    }


def lost_and_notes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, list[str]]:
    """What a reader has to know of the difference of two sides' results.

    Returns:
        "lost", the metrics in which both sides are no better than a constant prediction; "notes", sentences.
    """
    lost = [name for name in ours["lost_to_constants"] if name in theirs["lost_to_constants"]]
    notes = ["The interval of the difference is over hands: it does not know how much another seed changes."]
    if (runs := len(ours["checkpoints"])) > 1:
        notes = [
            f"Values are means of {runs} runs. The interval of the difference is over hands and over pairs of runs of "
            "one seed; pairs from one pre-training count as one, and one pair has no interval."
        ]
    if lost:
        notes.append(
            f"Both sides are no better than a constant prediction in {', '.join(METRICS[name].title for name in lost)}."
        )
    return {"lost": lost, "notes": notes}


def intervals_for_json(intervals: Mapping[str, Interval]) -> dict[str, dict[str, float | None]]:
    """Value, low and high of each metric; low and high are None if there is no interval."""
    return {name: dict(zip(interval._fields, _for_json(interval), strict=True)) for name, interval in intervals.items()}


def _for_json(values: Iterable[float]) -> list[float | None]:
    """Replace NaN and infinity by None, since JSON has neither."""
    return [float(value) if np.isfinite(value) else None for value in values]


def table_of(
    title: str,
    intervals: Mapping[str, Interval],
    *,
    constants: Mapping[str, Mapping[str, float]] | None = None,
    signed: bool = False,
    remarks: Sequence[str] = (),
) -> Table:
    """A table of the metrics with their intervals and those of constant predictions, on the terminal; remarks below."""
    table = Table(
        "metric",
        Column("value", justify="right"),
        Column("95 % interval", justify="right"),
        *(["constant predictions"] if constants else []),
        title=escape(printable(title)),
        title_justify="left",
        title_style="bold",
        caption=" ".join(remarks),
        caption_justify="left",
    )
    sign = "+" if signed else ""
    for name, interval in intervals.items():
        low, high = f"{interval.low:{sign}.3f}", f"{interval.high:{sign}.3f}"
        limits = f"{low} to {high}" if np.isfinite(interval.low) else NO_INTERVAL
        beside = [", ".join(constants_in_words(constants, name))] if constants else []
        table.add_row(METRICS[name].title_and_unit, f"{interval.value:{sign}.3f}", limits, *beside)
    return table


def of_poses(evaluation: Evaluation, rows: Iterable[int]) -> list[dict[str, Any]]:
    """For each row: its file, and each metric's mean over the keypoints (None if not measured)."""
    means = {name: _for_json(mean_over_samples(table.T)) for name, table in evaluation.errors.tables.items()}
    return [{"file": evaluation.index.paths[row], **{name: means[name][row] for name in means}} for row in rows]


def save_poses(path: Path, evaluation: Evaluation) -> None:
    """Write `of_poses` of all images as CSV; a value that was not measured is empty."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, ["file", *evaluation.errors.tables])
    table.writeheader()
    for pose in of_poses(evaluation, range(len(evaluation.index))):
        table.writerow({key: f"{cell:.6g}" if isinstance(cell, float) else cell for key, cell in pose.items()})
    write_text(path, text.getvalue())


def save_pck(path: Path, results_of: Mapping[str, Mapping[str, Any]]) -> None:
    """Draw the PCK curves of one or two runs, and below the error of each keypoint. Keys are names for the legend."""
    shown = [name for name in PCK if all(name in results["pck"] for results in results_of.values())]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(4.2 * max(len(shown), 1), 6.4), layout="constrained")
        axes = figure.subplots(2, max(len(shown), 1), squeeze=False)
        names = [keypoint.replace("_", " ") for keypoint in HAND.keypoints]
        for name, curve, bars in zip(shown, *axes, strict=False):
            title, metric, factor, _ = PCK[name]
            for number, (label, results) in enumerate(results_of.items()):
                pck, width = results["pck"][name], 0.8 / len(results_of)
                colour = ("#1f6fb4", "#c0504d")[number]
                curve.plot(factor * np.array(pck["thresholds"]), pck["share"], color=colour, label=legend_name(label))
                means = np.array([*results["per_keypoint"][metric].values()], np.float64)
                bars.bar(np.arange(len(names)) + width * number, means, width, align="edge", color=colour)
            curve.set(ylim=(0, 1), xlim=(0, None), title=title, xlabel=f"error within [{METRICS[metric].unit}]")
            curve.grid(color="0.9")
            if len(results_of) > 1:
                curve.legend(frameon=False)
            bars.set_ylabel(f"mean error [{METRICS[metric].unit}]")
            bars.set_xticks(np.arange(len(names)) + 0.4, names, rotation=90)
            bars.tick_params(labelsize=7)
        axes[0][0].set_ylabel("share of keypoints")
        save_figure(path, figure, dpi=130)


def save_worst(path: Path, evaluation: Evaluation, rows: IntArray, poses: Poses) -> None:
    """Draw the samples of some rows: three pictures each, with the errors above. `poses` has the views' images."""
    pictures = []
    for number, (row, errors) in enumerate(zip(rows.tolist(), of_poses(evaluation, rows.tolist()), strict=True)):
        picture = pose_picture(poses, number, evaluation.labels, row, depth=evaluation.run.depth)
        words = [
            f"{METRICS[name].title} {errors[name]:.2f} cm"
            for name in ("pa_epe_cm", "epe_cm")
            if errors.get(name) is not None
        ]
        caption: Image = np.full((CAPTION_PX, picture.shape[1], 3), 255, np.uint8)
        text = "   ".join([printable(Path(errors["file"]).name), *words])
        cv2.putText(caption, text, (3, 14), cv2.FONT_HERSHEY_SIMPLEX, 0.42, (0, 0, 0), 1, cv2.LINE_AA)
        pictures.append(np.concatenate([caption, picture]))
    save_sheet(path, pictures, columns=2)
