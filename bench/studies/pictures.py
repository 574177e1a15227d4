"""The pictures of docs/results.md: all claims, and for each study its curve, its maps or its arms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from bench.studies.rows import FILES, SCALES, Gain, StudyRows, gains, improvement, study_names, study_rows
from bench.tables import Row
from train.config.load import read_toml
from train.pictures import save_figure
from train.pose.metrics import METRICS

_AS_IN_PAPER, _OTHER_SIGN, _SEED = "#2f6f4f", "#b3412f", "#9aa5b1"
_LINES: Final = ("#6b7280", "#2f6f4f", "#2b6cb0", "#b7791f")


class Picture(NamedTuple):
    """A picture that can be drawn.

    Attributes:
        file: its name.
        says: what it shows, for those who cannot see it.
        draw: makes it.
    """

    file: str
    says: str
    draw: Callable[[], Figure]

    @property
    def link(self) -> str:
        """The picture in a page of docs/."""
        return f"![{self.says}](images/{self.file})"


def write_pictures(results: Path, images: Path) -> Iterator[str]:
    """Draw everything that has rows. Yields what was drawn."""
    images.mkdir(parents=True, exist_ok=True)
    for scale in SCALES:
        pictures = [picture_of_claims(results, scale)]
        pictures += [
            picture_of_study(name, read_toml(FILES / f"{name}.toml"), scale, study_rows(results, name, scale))
            for name in study_names()
        ]
        for picture in filter(None, pictures):
            save_figure(images / picture.file, picture.draw(), dpi=120)
            yield f"{images / picture.file}: {picture.says}"


def picture_of_claims(results: Path, scale: str) -> Picture | None:
    """Improvement and interval of every claim of the paper that was measured at a scale."""
    claims: dict[tuple[str, ...], tuple[str, Gain]] = {}
    for name in study_names():
        study = read_toml(FILES / f"{name}.toml")
        for gain in gains(study, study_rows(results, name, scale)):
            if gain.claimed:  # once, if two studies share the networks
                of = (study.get("out", name), gain.row["better"], gain.row["than"], gain.row["metric"])
                claims.setdefault(of, (study["source"], gain))
    if not claims:
        return None
    return Picture(
        f"claims_{scale}.png", f"The claims with an interval, scale {scale}", partial(_draw_claims, [*claims.values()])
    )


def picture_of_study(name: str, study: Row, scale: str, found: StudyRows) -> Picture | None:
    """The picture of a study at a scale: its maps, its curve, or its arms if there are more than two."""
    file = f"{name}_{scale}.png"
    if found.maps:
        return Picture(file, "Improvement over rotations and shifts", partial(_draw_maps, study["maps"], found))
    if not found.arms:
        return None
    if "curve" in study:
        return Picture(file, f"The error over {study['curve']['title']}", partial(_draw_curve, study, found))
    if len(found.arms) > 2:
        return Picture(file, "The error of each arm", partial(_draw_arms, study, found))
    return None


def _draw_claims(claims: Sequence[tuple[str, Gain]]) -> Figure:
    figure = Figure(figsize=(8.5, 0.9 + 0.27 * len(claims)), layout="constrained")
    axes = figure.subplots()
    axes.axvline(0, color="black", linewidth=0.8)
    published = [(-place, gain.published) for place, (_, gain) in enumerate(claims) if gain.published is not None]
    for place, (_, gain) in enumerate(claims):
        colour = _AS_IN_PAPER if gain.percent > 0 else _OTHER_SIGN
        axes.plot([gain.low, gain.high], [-place, -place], color=colour, linewidth=2, solid_capstyle="butt")
        axes.plot(gain.percent, -place, "D", color=colour, markersize=5)
    if published:
        heights, percents = zip(*published, strict=True)
        axes.plot(percents, heights, "o", color="black", fillstyle="none", markersize=7, label="published")
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    # An interval from two seeds can be many times as wide as all improvements: it is cut.
    reach = 2 * max(abs(gain.percent) for _, gain in claims)
    ends = np.clip([(gain.low, gain.high) for _, gain in claims], -reach, reach)
    axes.set_xlim(ends.min() - 2, max(ends.max(), *(percent for _, percent in published), 0) + 2)
    axes.set_yticks(
        [-place for place in range(len(claims))],
        [
            f"{source.split(',')[0]}: {gain.row['better']} over {gain.row['than']}, {METRICS[gain.row['metric']].title}"
            for source, gain in claims
        ],
        fontsize=8,
    )
    axes.set_ylim(-len(claims) + 0.4, 0.6)
    axes.set_xlabel("improvement, %; bar: 95 % interval; green: the paper's sign, red: the other", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["left", "top", "right"]].set_visible(False)
    return figure


def _draw_maps(maps: Row, found: StudyRows) -> Figure:
    """The improvement over the angles, for each seed and their mean, and over the shifts, as a mean over seeds."""
    better, than = maps["better"], maps["than"]
    rotations, shifts = (improvement(found, better, than, table) for table in ("rotation_error_px", "shift_error_px"))
    row = next(iter(found.maps[better].values()))
    figure = Figure(figsize=(8.5, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.axhline(0, color="black", linewidth=0.8)
    for values in rotations:
        left.plot(row["rotation_deg"], values, color=_SEED, linewidth=1)
    left.plot(row["rotation_deg"], rotations.mean(axis=0), color=_AS_IN_PAPER, linewidth=2)
    left.set_xlabel("rotation, degrees")
    left.set_ylabel(f"improvement of {better} over {than}, %")
    mean = shifts.mean(axis=0)
    largest = np.nanmax(np.abs(mean))
    shown = right.pcolormesh(row["shift_px"], row["shift_px"], mean, cmap="RdYlGn", vmin=-largest, vmax=largest)
    right.set_xlabel("shift in x, px of 128")
    right.set_ylabel("shift in y, px of 128")
    right.invert_yaxis()
    figure.colorbar(shown, ax=right, label="improvement, %")
    return figure


def _draw_curve(study: Row, found: StudyRows) -> Figure:
    """A panel for each metric that is compared; in it a line for each network that fine-tuning starts from."""
    curve = study["curve"]
    lines: dict[str, list[tuple[float, str]]] = {}
    for name in found.arms:
        arm = study["arms"][name]
        at = {key: value for key, _, value in (entry.partition("=") for entry in arm["set"])}
        lines.setdefault(arm.get("start", "scratch"), []).append((float(at[curve["over"]]), name))
    metrics = _compared(study)
    figure = Figure(figsize=(4.25 * len(metrics), 3.4), layout="constrained")
    for metric, axes in zip(metrics, figure.subplots(1, len(metrics), squeeze=False)[0], strict=True):
        for colour, (start, points) in zip(_LINES, lines.items(), strict=False):
            for x, name in points:
                values = [row[metric] for row in found.arms[name].values()]
                axes.plot([x] * len(values), values, "o", color=colour, alpha=0.35, markersize=3)
            shares, means = zip(*sorted((x, found.mean(name, metric)) for x, name in points), strict=True)
            axes.plot(shares, means, "-o", color=colour, markersize=4, label=curve["lines"][start])
        axes.set_xscale("log")
        shown = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(shown, [f"{100 * x:g}" for x in shown])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(f"{curve['title']}, %")
        axes.set_ylabel(METRICS[metric].title_and_unit)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    return figure


def _draw_arms(study: Row, found: StudyRows) -> Figure:
    """The arms from best to worst in the first metric that is compared: dots of the seeds, and their mean."""
    metric = _compared(study)[0]
    names = [name for name in found.arms if np.isfinite(found.mean(name, metric))]
    names.sort(key=lambda name: found.mean(name, metric), reverse=METRICS[metric].higher_is_better)
    figure = Figure(figsize=(7.5, 0.8 + 0.3 * len(names)), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        values = [row[metric] for row in found.arms[name].values()]
        axes.plot(values, [-place] * len(values), "o", color=_SEED, markersize=4)
        axes.plot(np.mean(values), -place, "D", color=_AS_IN_PAPER, markersize=6)
    axes.set_yticks([-place for place in range(len(names))], names, fontsize=9)
    axes.set_ylim(-len(names) + 0.4, 0.6)
    axes.set_xlabel(f"{METRICS[metric].title_and_unit}; dots: each seed, diamond: their mean", fontsize=9)
    axes.grid(axis="y", linewidth=0.4)
    axes.spines[["left", "top", "right"]].set_visible(False)
    return figure


def _compared(study: Row) -> list[str]:
    """The metrics that are compared, the first one first."""
    return list(dict.fromkeys(claim.get("metric", "pa_epe_cm") for claim in study["compare"]))
