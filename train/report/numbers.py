"""The numbers of a report: the table of metrics, and the result in words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from peclr_dali.train.pose.metrics import CONSTANTS, METRICS, Metric, constants_in_words
from peclr_dali.train.report.contents import Measured

Mark = Literal["", "better", "worse", "open"]


class Cell(NamedTuple):
    """A cell of the table.

    Attributes:
        interval: ends of the confidence interval; None if there is none.
        mark: for a difference: better, worse, or open. It is open if the interval contains zero or there is none.
    """

    value: float
    text: str
    interval: str | None
    mark: Mark = ""


class TableRow(NamedTuple):
    """A metric, with the cells of all runs and of the difference of the first two, and constants in words."""

    metric: Metric
    cells: Sequence[Cell]
    constants: Sequence[str]


def as_text(value: float, metric: Metric, *, signed: bool = False) -> str:
    """A value with the metric's number of decimals."""
    return f"{value:{'+' if signed else ''}.{metric.decimals}f}".replace("-", "\N{MINUS SIGN}")


def _cell(interval: Mapping[str, float | None], metric: Metric, *, signed: bool = False) -> Cell:
    value, low, high = (interval[name] for name in ("value", "low", "high"))
    assert value is not None
    text = as_text(value, metric, signed=signed)
    if low is None or high is None:
        return Cell(value, text, None, "open" if signed else "")
    mark: Mark = ""
    if signed:
        mark = "open" if low <= 0 <= high else "better" if (low > 0) == metric.higher_is_better else "worse"
    limits = (as_text(end, metric, signed=signed) for end in (low, high))
    return Cell(value, text, " to ".join(limits), mark)


def table(found: Measured) -> list[TableRow]:
    """Rows of the metrics that all runs have."""
    rows = []
    for name, metric in METRICS.items():
        if all(name in result["metrics"] for result in found.results):
            cells = [_cell(result["metrics"][name], metric) for result in found.results]
            if found.difference:
                cells.append(_cell(found.difference[name], metric, signed=True))
            rows.append(TableRow(metric, cells, constants_in_words(found.results[0].get("constants", {}), name)))
    return rows


def in_words(found: Measured) -> list[str]:
    """The errors of the only run, or the result of the comparison; and where errors are worse than a constant's."""
    if len(found.runs) > 1:
        return [_comparison_in_words(found), *_worse_than_constants(found)]
    (run,), (result,) = found.runs, found.results
    errors = []
    for name in ("pa_epe_cm", "epe_px"):
        if name in result["metrics"]:
            metric, cell = METRICS[name], _cell(result["metrics"][name], METRICS[name])
            errors.append(f"a {metric.title} of {cell.text} {metric.unit} ({_limits(cell)})")
    return [
        f"On {result['images']} images, “{run.name}” has {' and '.join(errors)}.",
        *_worse_than_constants(found),
    ]


def _comparison_in_words(found: Measured) -> str:
    """The difference in the first error in which one of the two runs is surely better than the constants, then the
    rest."""
    difference = found.difference or {}
    cells = {name: _cell(difference[name], METRICS[name], signed=True) for name in METRICS if name in difference}
    telling = (name for name in cells if any(_beats_constants(result, name) for result in found.results[:2]))
    first = next(telling, next(iter(cells), ""))
    metric, cell = METRICS[first], cells.pop(first)
    ours, theirs = (f"“{run.name}”" for run in found.runs[:2])
    result = {
        "better": f"{ours} is better than {theirs}",
        "worse": f"{ours} is worse than {theirs}",
        "open": f"{ours} and {theirs} cannot be told apart",
    }[cell.mark]
    unit = f" {metric.unit}" if metric.unit else ""
    words = f"By {metric.title}, {result}: {cell.text}{unit}, {_limits(cell)}."
    rest = [
        f"{mark}: {', '.join(titles)}"
        for mark in ("better", "worse", "open")
        if (titles := [METRICS[other].title for other, of_other in cells.items() if of_other.mark == mark])
    ]
    return f"{words} The other metrics: {'; '.join(rest)}." if rest else words


def _beats_constants(result: Mapping[str, Any], name: str) -> bool:
    """Whether a metric is an error, and a run's whole interval is below those of the constant predictions."""
    constants = [errors[name] for errors in result.get("constants", {}).values() if name in errors]
    if METRICS[name].higher_is_better or not constants:
        return False
    found = result["metrics"][name]
    return bool((found["value"] if found["high"] is None else found["high"]) < min(constants))


def _worse_than_constants(found: Measured) -> list[str]:
    """Sentences about runs whose 3D error after alignment is not below a constant prediction's."""
    sentences = []
    for run, result in zip(found.runs, found.results, strict=True):
        constants = {name: errors.get("pa_epe_cm", math.inf) for name, errors in result.get("constants", {}).items()}
        least = min(constants, key=constants.__getitem__, default="")
        error = result["metrics"].get("pa_epe_cm", {"value": -math.inf})["value"]
        if least and error >= constants[least]:
            sentences.append(
                f"In 3D, “{run.name}” is no better than {CONSTANTS[least]}, which does not look at the picture: a "
                f"PA-EPE of {error:.2f} cm beside {constants[least]:.2f} cm."
            )
    return sentences


def _limits(cell: Cell) -> str:
    if cell.interval is None:
        return "no interval: there is only one pose"
    return f"95\N{NO-BREAK SPACE}% interval {cell.interval}"


def facts(found: Measured) -> list[str]:
    """Notes on the data, the alignment and the limits of the numbers."""
    first = found.results[0]
    left_out = ", ".join(f"{count} {reason}" for reason, count in first["left_out"].items() if count)
    notes = [
        f"Measured on {first['images']} images of {first['data']}{f', left out: {left_out}' if left_out else ''}. "
        f"Alignment: {first['alignment']}.",
        "Constant predictions do not look at the picture; their constants are fitted to these labels.",
        "Intervals are 95 %, bootstrapped over images. They do not include the variation between training runs: with "
        "other seeds, the result may differ.",
    ]
    if found.difference:
        notes.append("The difference is that of the first two, paired by image; open: its interval contains zero.")
    if found.unseen:
        names = ", ".join(f"“{run.name}”" for run in found.unseen)
        notes.append(f"Not shown: {names}. 'evaluate RUN --compare RUN2' puts two runs side by side.")
    return notes
