"""The tables and the picture of docs/ about `make photographs`, from the rows that `classify` records.

Each row is a seed of pre-training with other people held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from matplotlib.figure import Figure

from bench.measure import interval_of_mean
from bench.rows import Row, rows_of
from train.pictures import save_figure

FILE: Final = "photographs.jsonl"
PICTURE: Final = "photographs.png"


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


class Found(NamedTuple):
    """The shares of one kind of encoder, one value for each row.

    Attributes:
        few: by the number of people with labels.
        everybody: logistic regression with the labels of all people that are not tested.
        nearest: by nearest neighbours, with the same labels.
    """

    few: dict[str, list[float]]
    everybody: list[float]
    nearest: list[float]


def kinds_in(rows: Sequence[Row]) -> list[Kind]:
    """The kinds of encoders that every row has."""
    return [kind for kind in KINDS if all(any(map(kind.is_of, row["encoders"])) for row in rows)]


def found_in(rows: Sequence[Row], kind: Kind) -> Found:
    """The shares of a kind of encoder in all rows."""
    entries = [entry for row in rows for entry in row["encoders"] if kind.is_of(entry)]
    return Found(
        {people: [fmean(entry["few"][people]) for entry in entries] for people in entries[0]["few"]},
        [entry["accuracy"]["value"] for entry in entries],
        [entry["nearest_neighbours"]["value"] for entry in entries if entry["nearest_neighbours"]],
    )


class Summary(NamedTuple):
    """The rows as tables.

    Attributes:
        rows: the rows.
        heads: heads of `lines` and of `differences`; each begins with a name.
        lines: mean and range over seeds of each kind of encoder, in percent.
        differences: the first kind minus each other one, in points, with Student's interval over seeds.
        short: name, and means with the labels of 2 people, of 10 and of all, in percent.
    """

    rows: Sequence[Row]
    heads: Sequence[str]
    lines: Sequence[Sequence[str]]
    differences: Sequence[Sequence[str]]
    short: Sequence[Sequence[str]]


def summary(results: Path) -> Summary | None:
    """The tables from the rows in a folder; None if there is no row."""
    if not (rows := list(rows_of(results / FILE))):
        return None
    found = {kind.name: found_in(rows, kind) for kind in kinds_in(rows)}
    (_, first), *others = ((name, of) for name, of in found.items() if of.few)
    return Summary(
        rows,
        (*(f"{count} people" for count in first.few), "all", "all, nearest neighbours"),
        [(name, *(_range(of.few.get(count, [])) for count in first.few), _range(of.everybody), _range(of.nearest))
         for name, of in found.items()],
        [(f"minus {name}", *(_difference(first.few[count], of.few[count]) for count in first.few),
          _difference(first.everybody, of.everybody), _difference(first.nearest, of.nearest))
         for name, of in others],
        [(name, *(f"{100 * fmean(share):.1f}" if share else "-"
                  for share in (of.few.get("2", []), of.few.get("10", []), of.everybody)))
         for name, of in found.items()],
    )  # fmt: skip


def draw_photographs(results: Path, images: Path) -> list[str]:
    """Draw the accuracy over the number of people with labels. Returns the picture's path; nothing without rows."""
    if not (rows := list(rows_of(results / FILE))):
        return []
    everybody = round(fmean(row["groups"] - row["groups_tested"] for row in rows))
    found_by_kind = {kind: found for kind in kinds_in(rows) if (found := found_in(rows, kind)).few}
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for kind, found in found_by_kind.items():
        people = [*map(int, found.few), everybody]
        shares = [*found.few.values(), found.everybody]
        low, high = ([100 * pick(values) for values in shares] for pick in (min, max))
        axes.fill_between(people, low, high, color=kind.colour, alpha=0.18, linewidth=0)
        axes.plot(people, [100 * fmean(values) for values in shares], "o-", color=kind.colour, label=kind.name)
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
