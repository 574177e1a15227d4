"""The tables and the picture of docs/ about `make photographs`, from the rows that `classify` records.

Each row is a seed of pre-training with other people held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from matplotlib.figure import Figure

from peclr_dali.bench.measure import interval_of_mean
from peclr_dali.bench.rows import Row, rows_of
from peclr_dali.train.runs.pictures import save_figure

FILE: Final = "photographs.jsonl"
PICTURE: Final = "photographs.png"
NEAREST: Final = "all, nearest neighbours"


class Kind(NamedTuple):
    """A kind of encoder: its name, its colour, and which entry of a row it is."""

    name: str
    colour: str
    is_of: Callable[[Row], bool]


KINDS: Final = (
    Kind("PeCLR, no labels", "#2f6f4f", lambda entry: entry.get("variant", "none") != "none"),
    Kind("SimCLR, no labels", "#2b6cb0", lambda entry: entry.get("variant") == "none"),
    Kind("hand_rn18: rendered hands, with poses", "#b7791f", lambda entry: entry.get("trained") == "fine-tuning"),
    Kind("untrained encoder", "#9aa5b1", lambda entry: entry["name"] == "random"),
    Kind("raw pixels", "#6b7280", lambda entry: entry["name"] == "pixels"),
    Kind("always one digit", "#d0d5db", lambda entry: entry["name"] == "constant"),
)


def shares_in(rows: Sequence[Row]) -> dict[str, dict[str, list[float]]]:
    """Kind of encoder -> head of a column -> the shares in all rows. Only kinds that every row has.

    The heads are numbers of people with labels, "all" for all people that are not tested, and `NEAREST` for nearest
    neighbours with the same labels.
    """
    found = {}
    for kind in KINDS:
        entries = [[entry for entry in row["encoders"] if kind.is_of(entry)] for row in rows]
        if not all(entries):
            continue
        columns = found[kind.name] = dict[str, list[float]]()
        for entry in (entry for of_row in entries for entry in of_row):
            shares = {f"{people} people": fmean(draws) for people, draws in entry["few"].items()}
            shares["all"] = entry["accuracy"]["value"]
            if entry["nearest_neighbours"]:
                shares[NEAREST] = entry["nearest_neighbours"]["value"]
            for head, share in shares.items():
                columns.setdefault(head, []).append(share)
    return found


def summary(results: Path) -> dict[str, Any] | None:
    """The tables from the rows in a folder; None if there is no row.

    "lines": mean and range over seeds of each kind of encoder, in percent. "differences": the first kind minus each
    other one, in points, with Student's interval over seeds. "short": means for a few columns, in percent.
    """
    if not (rows := list(rows_of(results / FILE))):
        return None
    found = shares_in(rows)
    name, first = next(iter(found.items()))
    others = {other: of for other, of in found.items() if other != name and of.keys() == first.keys()}
    few = ("2 people", "10 people", "all")
    return {
        "rows": rows,
        "heads": list(first),
        "lines": [(kind, *(_range(of.get(head, [])) for head in first)) for kind, of in found.items()],
        "differences": [
            (f"minus {other}", *(_difference(first[head], of[head]) for head in first)) for other, of in others.items()
        ],
        "short": [
            (kind, *(f"{100 * fmean(of[head]):.1f}" if head in of else "-" for head in few))
            for kind, of in found.items()
        ],
    }


def draw_photographs(results: Path, images: Path) -> list[str]:
    """Draw the accuracy over the number of people with labels. Returns the picture's path; nothing without rows."""
    if not (rows := list(rows_of(results / FILE))):
        return []
    everybody = round(fmean(row["groups"] - row["groups_tested"] for row in rows))
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    people: list[int] = []
    for name, columns in shares_in(rows).items():
        shares = {head: of for head, of in columns.items() if head != NEAREST}
        if len(shares) == 1:  # a constant
            continue
        people = [everybody if head == "all" else int(head.split()[0]) for head in shares]
        low, high = ([100 * pick(of) for of in shares.values()] for pick in (min, max))
        colour = next(kind.colour for kind in KINDS if kind.name == name)
        axes.fill_between(people, low, high, color=colour, alpha=0.18, linewidth=0)
        axes.plot(people, [100 * fmean(of) for of in shares.values()], "o-", color=colour, label=name)
    axes.axhline(10, color=KINDS[5].colour, linestyle="--", label=KINDS[5].name)
    axes.set_xscale("log")
    axes.set_xticks(people, [str(count) for count in people])
    axes.minorticks_off()
    axes.set_ylim(0, 100)
    axes.set_xlabel("people whose ten photographs have labels")
    axes.set_ylabel("digits told right [%]")
    axes.grid(color="0.92")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 0.12), fontsize=8.5)
    save_figure(images / PICTURE, figure, dpi=120)
    return [str(images / PICTURE)]


def _range(shares: Sequence[float]) -> str:
    """Mean and range, in percent."""
    if not shares:
        return "-"
    return f"{100 * fmean(shares):.1f} ({100 * min(shares):.1f} to {100 * max(shares):.1f})"


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Mean of the paired differences, with Student's interval over seeds."""
    points = [100 * (one - other) for one, other in zip(ours, theirs, strict=True)]
    if len(points) < 2:
        return f"{points[0]:+.1f}"
    mean, low, high = interval_of_mean(points)
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"
