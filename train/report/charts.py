"""The charts of a report: losses, errors over the steps, PCK curves, and errors by keypoint."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from peclr_dali.models.config import NT_XENT
from peclr_dali.models.losses.nt_xent import loss_at_chance
from peclr_dali.skeleton import HAND
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.config.pretraining import Config
from peclr_dali.train.evaluation.report import PCK
from peclr_dali.train.pose.metrics import CONSTANTS
from peclr_dali.train.report.contents import Measured, Row, Run
from peclr_dali.train.runs.pictures import level_line, log_axis

_COLOURS: Final = ("#1f6fb4", "#d2691e", "#2e8b57", "#8e5bb5", "#b5372b", "#5b6770")
_MUTED: Final = "#62666d"
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": "#e2e3e0", "axes.edgecolor": "#e2e3e0", "axes.labelcolor": _MUTED, "xtick.color": _MUTED,
    "ytick.color": _MUTED, "lines.linewidth": 1.8, "legend.frameon": False,
}  # fmt: skip


class Picture(NamedTuple):
    """A picture as a data URI, its size in pixels, its alternative text, and a line below it."""

    uri: str
    width: int
    height: int
    alt: str
    caption: str = ""


class Section(NamedTuple):
    """Pictures of a kind, with a title and a line of explanation; `wide` pictures take a row each."""

    title: str
    text: str
    pictures: Sequence[Picture]
    wide: bool = False


def error_charts(found: Measured) -> Section:
    """PCK curves and errors by keypoint."""
    names, results = [run.name for run in found.runs], found.results
    charts = []
    for name, (title, _, unit, factor, _) in PCK.items():
        if all(name in result["pck"] for result in results):
            with _chart(title, names) as (axes, figures):
                for result in results:
                    curve = result["pck"][name]
                    axes.plot(factor * np.array(curve["thresholds"]), curve["share"])
                axes.set(ylim=(0, 1), xlabel=f"distance [{unit}]")
                axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
            charts += figures
    parts = [name.partition("_")[0] for name in HAND.keypoints]  # "wrist", or the finger
    part_names = list(dict.fromkeys(parts))
    part = np.array([part_names.index(name) for name in parts])  # (K,)
    starts, width = np.arange(len(HAND)) + 0.7 * part, 0.9 / len(results)
    for name, (_, metric, unit, _, _) in PCK.items():
        if all(metric in result["per_keypoint"] for result in results) and name != "3d_m":
            with _chart(f"Mean error of each keypoint, {unit}", names) as (axes, figures):
                for number, result in enumerate(results):
                    means = np.array([*result["per_keypoint"][metric].values()], np.float64)
                    axes.bar(starts + number * width, means, width, align="edge")
                axes.set_xticks([starts[part == number].mean() + 0.45 for number in range(len(part_names))], part_names)
                axes.set_xlabel("each finger from the palm to its tip")
            charts += figures
    return Section("Where the errors are", "PCK: the share of keypoints whose error is at most the distance.", charts)


def pretraining_charts(runs: Sequence[Run]) -> list[Section]:
    """Charts of the loss, of the rank of the positive, and of the probe."""
    runs = [run for run in runs if isinstance(run.config, Config)]
    if not runs:
        return []
    text = "The rank says how well the positive of a view is found among all other views of a batch."
    configs = [run.config for run in runs if isinstance(run.config, Config)]
    losses, batches = {config.loss.name for config in configs}, {config.train.batch for config in configs}
    level = None
    if len(batches) == 1:
        (batch,) = batches
        text = f"Of the {2 * batch - 1} other views of a batch, one is a view's positive. Its rank is at best 1."
        if losses == {NT_XENT}:
            chance, formula = loss_at_chance(batch)
            level = chance, f"chance, {formula}"
    charts = [
        *_over_steps("Loss", runs, "loss", level=level),
        *_over_steps("Mean rank of the positive", runs, "positive_rank", log=True),
    ]
    if any(run.validations for run in runs):
        text += " The probe reads keypoints out of the frozen features, on images to which it was not fitted."
        charts += _validated("Probe, 2D error [px of 224]", runs, "epe_px_of_224")
        charts += _validated("Probe, PA-EPE [cm]", runs, "pa_epe_cm")
    return [Section("Pre-training", text, charts)]


def finetuning_charts(runs: Sequence[Run]) -> list[Section]:
    """Charts of the losses, and of the errors on held-out images."""
    runs = [run for run in runs if isinstance(run.config, FinetuneConfig)]
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
    """A chart of held-out errors with the constant prediction's, if it is the same for all runs; none if there is
    none."""
    rows: list[Row] = [row for run in runs for row in run.validations]
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
    with _chart(title, [run.name for run in runs], "" if level is None else f"; dashed: {level[1]}") as (axes, figures):
        for run in runs:
            rows = run.validations if validations else run.rows
            dots = validations or len(rows) == 1  # a line needs two values to be visible
            axes.plot([row["step"] for row in rows], [row[key] for row in rows], marker="o" if dots else "", ms=4)
        if level is not None:
            level_line(axes, *level, _MUTED)
        if log:
            log_axis(axes)
        axes.set_xlabel("step")
    return figures


@contextmanager
def _chart(title: str, names: Sequence[str], described: str = "") -> Iterator[tuple[Axes, list[Picture]]]:
    """Axes to draw on, and a list that holds the chart as a PNG afterwards. Several `names` make a legend.

    `described` completes the title as the alternative text.
    """
    figures: list[Picture] = []
    with mpl.rc_context({**_STYLE, "axes.prop_cycle": cycler(color=_COLOURS)}):
        figure = Figure(figsize=(4.2, 2.8), layout="constrained")
        axes = figure.add_subplot()
        yield axes, figures
        axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
        if len(names) > 1:
            drawn: list[Any] = [*axes.containers, *(line for line in axes.lines if line.get_linestyle() == "-")]
            axes.legend(drawn[: len(names)], names)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
    uri = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    figures.append(Picture(uri, 672, 448, title + described))
