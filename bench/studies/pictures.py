"""The pictures of docs/results.md: the claims of the paper that were measured; a study's maps or label curves."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from peclr_dali.bench.rows import Row
from peclr_dali.bench.studies.curves import amount_in_words, label_curves
from peclr_dali.bench.studies.rows import (
    CONSTANT_ROTATION,
    FILES,
    SCALES,
    Gain,
    StudyRows,
    claims_of_paper,
    improvement,
    study_names,
    study_rows,
)
from peclr_dali.train.config.load import read_toml
from peclr_dali.train.pose.metrics import METRICS
from peclr_dali.train.runs.pictures import save_figure

_AS_IN_PAPER, _OTHER_SIGN, _GREY = "#2f6f4f", "#b3412f", "#9aa5b1"


def write_pictures(results: Path, images: Path) -> Iterator[str]:
    """Draw claims_SCALE.png, and STUDY_SCALE.png of each study with maps or label curves. Yields the paths."""
    images.mkdir(parents=True, exist_ok=True)
    for scale in SCALES:
        figures = {}
        if claims := claims_of_paper(results, scale):
            figures["claims"] = draw_claims(claims)
        for name in study_names():
            study, found = read_toml(FILES / f"{name}.toml"), study_rows(results, name, scale)
            if found.maps:
                figures[name] = draw_maps(study["maps"], found)
            elif curves := label_curves(study, found, "epe_px"):
                figures[name] = draw_label_curves(curves, found)
        for name, figure in figures.items():
            save_figure(images / f"{name}_{scale}.png", figure, dpi=120)
            yield str(images / f"{name}_{scale}.png")


def draw_claims(claims: Sequence[tuple[str, Gain]]) -> Figure:
    """Improvement and interval of each claim, with the published figures."""
    figure = Figure(figsize=(8.5, 0.9 + 0.27 * len(claims)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="black", linewidth=0.8)
    for place, (_, gain) in enumerate(claims):
        colour = _GREY if not gain.beats_constants else _AS_IN_PAPER if gain.percent > 0 else _OTHER_SIGN
        pale = 1.0 if gain.is_clear() else 0.35
        axes.plot([gain.low, gain.high], [-place, -place], color=colour, linewidth=2, alpha=pale, solid_capstyle="butt")
        axes.plot(gain.percent, -place, "D", color=colour, markersize=5, alpha=pale)
        if gain.published is not None:
            axes.plot(gain.published, -place, "o", color="black", fillstyle="none", markersize=7)
    # An interval from two seeds can be many times as wide as all improvements: it is cut.
    reach = 2 * max(max(abs(gain.percent), gain.published or 0) for _, gain in claims)
    axes.set_xlim(-reach, reach)
    names = [f"{source.split(',')[0]}: {gain.title}, {METRICS[gain.row['metric']].title}" for source, gain in claims]
    axes.set_yticks([-place for place in range(len(claims))], names, fontsize=8)
    axes.set_title(
        "improvement, %; bar: 95 % interval; circle: published\n"
        "green: the paper's sign; red: the other; pale: the interval contains zero; grey: does not count",
        fontsize=9,
        x=0,
    )
    axes.spines[["left", "top", "right"]].set_visible(False)
    return figure


def draw_maps(maps: Row, found: StudyRows) -> Figure:
    """The improvement over the angles, for each seed and their mean, and over the shifts, as a mean over seeds."""
    better, than = maps["better"], maps["than"]
    rotations, shifts = (improvement(found, better, than, table) for table in ("rotation_error_px", "shift_error_px"))
    row = next(iter(found.maps[better].values()))
    figure = Figure(figsize=(8.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.axhline(0, color="black", linewidth=0.8)
    left.plot(row["rotation_deg"], rotations.T, color=_GREY, linewidth=1)
    left.plot(row["rotation_deg"], rotations.mean(axis=0), color=_AS_IN_PAPER, linewidth=2)
    if (constant := row.get(CONSTANT_ROTATION)) is not None:
        theirs = np.mean([one["rotation_error_px"] for one in found.maps[than].values()], axis=0)
        gain = 100 * (1 - np.divide(constant, theirs, out=np.full_like(theirs, np.nan), where=theirs > 1e-6))
        left.plot(row["rotation_deg"], gain, "--", color=_OTHER_SIGN, label="the mean keypoints, a constant")
        left.legend(frameon=False, fontsize=8)
    left.set_xlabel("rotation, degrees")
    left.set_ylabel(f"improvement, {maps.get('title', f'{better} over {than}')}, %")
    mean = shifts.mean(axis=0)
    largest = np.nanmax(np.abs(mean))
    shown = right.pcolormesh(row["shift_px"], row["shift_px"], mean, cmap="RdYlGn", vmin=-largest, vmax=largest)
    right.set_xlabel("shift in x, px of 128")
    right.set_ylabel("shift in y, px of 128")
    right.invert_yaxis()
    figure.colorbar(shown, ax=right, label="improvement, %")
    return figure


def draw_label_curves(curves: Mapping[str, Mapping[float, Sequence[float]]], found: StudyRows) -> Figure:
    """Means with the range over seeds as a band, beside a constant's error.

    Left: the 2D EPE over the amount of labels. Right: the probe over the steps of the longest pre-trainings named START
    or START_NUMBER, if all were probed on the same images.
    """
    probed = {arm: by_seed for arm, by_seed in found.pretrain.items() if _start_of(arm) in curves}
    steps = {arm: next(iter(by_seed.values()))["probe_step"][-1] for arm, by_seed in probed.items()}
    probed = {arm: by_seed for arm, by_seed in probed.items() if steps[arm] == max(steps.values())}
    constants = {row["probe_constant_epe_px"] for by_seed in probed.values() for row in by_seed.values()}
    probed = probed if len(constants) == 1 else {}
    figure = Figure(figsize=(9.5 if probed else 6, 4), layout="constrained")
    left, *others = figure.subplots(1, 2 if probed else 1, squeeze=False)[0]
    colours = {start: f"C{number}" for number, start in enumerate(curves)}
    for start, curve in curves.items():
        amounts = sorted(curve)
        _draw_band(left, start, colours[start], amounts, [curve[amount] for amount in amounts])
    _draw_constant(left, found.constant.get("mean_keypoints_epe_px"))
    left.set_xscale("log")
    left.xaxis.set_major_formatter(FuncFormatter(lambda amount, _: amount_in_words(amount)))
    left.xaxis.set_minor_formatter(NullFormatter())
    left.set_xticks(sorted({amount for curve in curves.values() for amount in curve}))
    left.set_xlabel("labelled images, fine-tuned")
    left.set_ylabel(METRICS["epe_px"].title_and_unit)
    for right in others:
        for arm, by_seed in probed.items():
            errors = np.transpose([row["probe_epe_px"] for row in by_seed.values()])
            row = next(iter(by_seed.values()))
            _draw_band(right, arm, colours[_start_of(arm)], row["probe_step"], errors)
        _draw_constant(right, *constants)
        right.set_xlabel("step of pre-training")
        right.set_ylabel("2D EPE of the linear probe, px of 224")
    for axes in (left, *others):
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _start_of(pretraining: str) -> str:
    """START of START_60, a longer pre-training, or of START."""
    return re.sub(r"_\d+$", "", pretraining)


def _draw_band(axes: Axes, name: str, colour: str, x: Sequence[float], values: Iterable[Sequence[float]]) -> None:
    """A line through the means of the values at each place, and their range."""
    low, mean, high = np.transpose([(np.min(of_one), np.mean(of_one), np.max(of_one)) for of_one in values])
    axes.plot(x, mean, "o-", color=colour, label=name, markersize=4)
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def _draw_constant(axes: Axes, error_px: float | None) -> None:
    if error_px is not None:
        axes.axhline(error_px, linestyle="--", color=_OTHER_SIGN, label="the mean keypoints, a constant")
