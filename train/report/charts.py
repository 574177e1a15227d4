"""Draws charts with Matplotlib as inline SVG. Their colours follow the page's light or dark scheme."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from peclr_dali.skeleton import Skeleton
from peclr_dali.train.runs.pictures import level_line, log_axis

SERIES: Final = 6
"""Number of colours for series, as in the page's style sheet."""

_INK, _MUTED, _GRID = "#000001", "#000002", "#000003"  # placeholders for the page's colours, replaced in the SVG
_SERIES = tuple(f"#00000{number + 10:x}" for number in range(SERIES))
_VARIABLES = {_INK: "--ink", _MUTED: "--muted", _GRID: "--line"} | {
    colour: f"--series-{number + 1}" for number, colour in enumerate(_SERIES)
}
_STYLE: Final[dict[Any, Any]] = {
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True,
    "grid.color": _GRID, "grid.linewidth": 0.8, "axes.edgecolor": _GRID, "axes.labelcolor": _MUTED, "text.color": _INK,
    "xtick.color": _MUTED, "ytick.color": _MUTED, "xtick.major.size": 0, "xtick.major.pad": 5, "ytick.major.size": 0,
    "xtick.minor.size": 0, "ytick.minor.size": 0, "lines.linewidth": 1.8, "svg.fonttype": "none",
}  # fmt: skip


class Line(NamedTuple):
    """Values of y over x; None leaves a gap. `series` is the number of the colour; `dots` marks every value."""

    x: Sequence[float]
    y: Sequence[float | None]
    series: int = 0
    dots: bool = False


class Chart(NamedTuple):
    """A title, and the HTML element of the chart below it."""

    title: str
    svg: str


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    log: bool = False,
    percent: bool = False,
    level: tuple[float, str] | None = None,
) -> Chart:
    """A chart of at least one line over a common axis.

    The y axis is logarithmic, or shows a share of one in percent. `level` is the value and name of a dashed line.
    """
    with _figure() as (figure, axes):
        for line in lines:
            y = np.array([np.nan if value is None else value for value in line.y])
            dots = line.dots or np.isfinite(y).sum() == 1  # a line needs two values to be visible
            axes.plot(line.x, y, color=_SERIES[line.series % SERIES], marker="o" if dots else "", markersize=4)
        if level is not None:
            level_line(axes, *level, _MUTED)
        if log:
            log_axis(axes)
            axes.grid(which="both" if np.ptp(np.log10(axes.get_ylim())) < 1 else "major")
        if percent:
            axes.set_ylim(0, 1)
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        axes.margins(x=0)
        axes.set_xlabel(x_label)
        return Chart(title, _svg(figure, title))


def keypoint_chart(title: str, rows: Sequence[Sequence[float | None]], skeleton: Skeleton) -> Chart:
    """Bars for the keypoints, with gaps between groups. Each row is a series of K values in the skeleton's order."""
    names, sizes = zip(*skeleton.groups, strict=True)
    group = np.repeat(np.arange(len(sizes)), sizes)  # (K,)
    with _figure() as (figure, axes):
        starts = np.arange(len(skeleton)) + 0.7 * group
        width = 0.9 / len(rows)
        for number, row in enumerate(rows):
            heights = [np.nan if value is None else value for value in row]
            axes.bar(starts + number * width, heights, width, align="edge", color=_SERIES[number % SERIES])
        axes.set_xticks([starts[group == number].mean() + 0.45 for number in range(len(sizes))], names)
        axes.grid(axis="x", visible=False)
        axes.margins(x=0.01)
        axes.set_xlabel(skeleton.groups_order)
        return Chart(title, _svg(figure, title))


@contextmanager
def _figure() -> Iterator[tuple[Figure, Any]]:
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.0, 2.5), layout="constrained")
        yield figure, figure.add_subplot()


def _svg(figure: Figure, title: str) -> str:
    """The figure as an SVG element that fills the available width."""
    buffer = io.StringIO()
    unnamed = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with mpl.rc_context({"svg.hashsalt": title}):  # reproducible ids, unique on the page
        figure.savefig(buffer, format="svg", transparent=True, metadata=unnamed)
    content = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", buffer.getvalue(), flags=re.DOTALL)
    head, _, body = content[content.index("<svg") :].partition(">")
    view_box = re.search(r'viewBox="[^"]*"', head)
    assert view_box is not None
    body = body.replace("xlink:href", "href")
    used = set(re.findall(r"#(\w+)", body))  # other ids are the same in all charts
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", body)
    body = re.sub(r"font-family: [^;\"]*;? ?", "", body)
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    return f'<svg class="chart" role="img" aria-label="{html.escape(title)}" {view_box[0]}>{body}'
