"""Label curves: errors over the amount of labels, and what one curve is better by than another."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from peclr_dali.bench.rows import Row
from peclr_dali.bench.studies.rows import Gain, StudyRows, best_constant, mean_and_range
from peclr_dali.train.pose.metrics import METRICS


def label_curves(study: Row, found: StudyRows, metric: str) -> dict[str, dict[float, list[float]]]:
    """Errors over the amount of labels: start of the network -> amount -> an error for each seed.

    They are of arms named START_NUMBER or START_all whose settings have data.label_fraction, a share, or a file
    labelled_NUMBER.csv of boxes; a start with one amount has no curve.
    """
    curves: dict[str, dict[float, list[float]]] = {}
    for name, (start, amount) in _places(study).items():
        values = [row[metric] for row in found.arms.get(name, {}).values() if metric in row]
        if values:
            curves.setdefault(start, {})[amount] = values
    return {start: curve for start, curve in curves.items() if len(curve) > 1}


def _places(study: Row) -> dict[str, tuple[str, float]]:
    """Arm -> start and amount of labels, of arms that may be part of a curve: no other arm has both."""
    places = {}
    for name, arm in study["arms"].items():
        start = re.fullmatch(r"(.+)_(?:\d+|all)", name)
        amount = re.search(r"data\.label_fraction=(\S+)|labelled_(\d+)\.csv", " ".join(arm.get("set", ())))
        if start and amount:
            places[name] = start[1], float(amount[1] or amount[2])
    taken = Counter(places.values())  # batch_128 and batch_512 are no amounts of labels
    return {name: place for name, place in places.items() if taken[place] == 1}


def arms_of_curves(study: Row, found: StudyRows) -> set[str]:
    """The arms that a label curve of any metric has."""
    curves = {start for metric in METRICS for start in label_curves(study, found, metric)}
    return {name for name, (start, _) in _places(study).items() if start in curves}


def curve_table(study: Row, found: StudyRows, metric: str) -> tuple[list[str], list[list[str]]]:
    """Label curves as a table: heads, and a line for each start with a column for each amount; last, a constant's."""
    decimals = 1 if metric == "epe_px" else 2
    cells = {
        start: {amount: mean_and_range(values, decimals) for amount, values in curve.items()}
        for start, curve in label_curves(study, found, metric).items()
    }
    if cells and (constant := best_constant(found, metric)) is not None:
        amounts = {amount for curve in cells.values() for amount in curve}
        cells["the best constant"] = dict.fromkeys(amounts, f"{constant:.{decimals}f}")
    return _by_amount(f"{METRICS[metric].title_and_unit}, by the labels", cells)


def gains_between_curves(
    study: Row, found: StudyRows, gained: Sequence[Gain]
) -> tuple[tuple[list[str], list[list[str]]], list[Gain]]:
    """The comparisons of two curves at several amounts of labels as a table, and the other comparisons.

    A cell is an improvement in 2D error in percent with its interval; bold if the interval does not contain zero.
    """
    places, curves = _places(study), label_curves(study, found, "epe_px")
    cells: dict[str, dict[float, str]] = {}
    others = []
    for gain in gained:
        better, than = (places.get(gain.row[arm], ("", 0.0)) for arm in ("better", "than"))
        if gain.row["metric"] == "epe_px" and {better[0], than[0]} <= curves.keys() and better[1] == than[1]:
            mean = f"**{gain.percent:+.1f}**" if gain.is_clear() else f"{gain.percent:+.1f}"
            worse = " †" if gain.beats_constants is False else ""
            cell = f"{mean} ({gain.low:+.1f} to {gain.high:+.1f}){worse}"
            cells.setdefault(f"{better[0]} over {than[0]}", {})[better[1]] = cell
        else:
            others.append(gain)
    return _by_amount("2D EPE better by, %, by the labels", cells), others


def _by_amount(title: str, cells: Mapping[str, Mapping[float, str]]) -> tuple[list[str], list[list[str]]]:
    amounts = sorted({amount for of_line in cells.values() for amount in of_line})
    lines = [[name, *(of_line.get(amount, "-") for amount in amounts)] for name, of_line in cells.items()]
    return [title, *map(amount_in_words, amounts)], lines


def amount_in_words(amount: float) -> str:
    """An amount of labels: a share up to 1 in percent, or a number."""
    return f"{100 * amount:g} %" if amount <= 1 else f"{amount:,g}"
