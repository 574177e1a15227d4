"""The table and the picture of docs/ about `make photographs`, from the rows that `classify` records.

Each row is a seed of pre-training with other people held out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from matplotlib.figure import Figure
from scipy.stats import t as student

from bench.tables import NoRowError, Row, markdown, measured_on, rows_of
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


def found_in(rows: Sequence[Row], kind: Kind) -> Found:
    """The shares of a kind of encoder in all rows."""
    entries = [entry for row in rows for entry in row["encoders"] if kind.is_of(entry)]
    return Found(
        {people: [fmean(entry["few"][people]) for entry in entries] for people in entries[0]["few"]},
        [entry["accuracy"]["value"] for entry in entries],
        [entry["nearest_neighbours"]["value"] for entry in entries if entry["nearest_neighbours"]],
    )


def photographs_table(results: Path) -> str:
    """The shares of all kinds of encoders, and PeCLR's differences to the others.

    Raises:
        NoRowError: there is no row.
    """
    rows = _rows(results)
    found = {kind.name: found_in(rows, kind) for kind in KINDS}
    first, *others = (found[kind.name] for kind in KINDS[:5])
    heads = ("frozen features", *(f"{count} people" for count in first.few), "all", "all, nearest neighbours")
    lines = [
        (name, *(_range(of.few.get(count, [])) for count in first.few), _range(of.everybody), _range(of.nearest))
        for name, of in found.items()
    ]
    differences = [
        (f"minus {kind.name}", *(_difference(first.few[count], of.few[count]) for count in first.few),
         _difference(first.everybody, of.everybody), _difference(first.nearest, of.nearest))
        for kind, of in zip(KINDS[1:5], others, strict=True)
    ]  # fmt: skip
    return (
        f"{_measured_on(rows)} Mean and range over seeds, in percent, by the number of people with labels:\n\n"
        f"{markdown(heads, lines)}\nPeCLR minus the others, in points, paired by seed, with Student's 95 % interval:"
        "\n\n"
        f"{markdown(('PeCLR', *heads[1:]), differences)}"
    )


def photographs_in_short(results: Path) -> str:
    """Means over seeds, for the README.

    Raises:
        NoRowError: there is no row.
    """
    rows = _rows(results)
    lines = []
    for kind in KINDS:
        of = found_in(rows, kind)
        shares = (of.few.get("2", []), of.few.get("10", []), of.everybody)
        lines.append((kind.name, *(f"{100 * fmean(share):.1f}" if share else "-" for share in shares)))
    heads = ("frozen features: digits told right, in %", "labels of 2 people", "of 10", "of all the others")
    return f"{_measured_on(rows)}\n\n{markdown(heads, lines)}"


def draw_photographs(results: Path, images: Path) -> str:
    """Draw the accuracy over the number of people with labels. Returns what was drawn.

    Raises:
        NoRowError: there is no row.
    """
    rows = _rows(results)
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = figure.subplots()
    for kind in KINDS[:5]:
        found = found_in(rows, kind)
        people = [int(count) for count in found.few] + [
            round(fmean(row["groups"] - row["groups_tested"] for row in rows))
        ]
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
    return f"{images / PICTURE}: accuracy over the number of people with labels"


def _rows(results: Path) -> list[Row]:
    rows = list(rows_of(results / FILE))
    if not rows:
        raise NoRowError
    return rows


def _measured_on(rows: Sequence[Row]) -> str:
    tested, people = (sum(row[key] for row in rows) for key in ("tested", "groups_tested"))
    return (
        f"{measured_on(rows[-1])}. {len(rows)} seeds, each with other people held out: {tested} photographs of "
        f"{people} people tested."
    )


def _range(shares: Sequence[float]) -> str:
    """Mean and range, in percent."""
    if not shares:
        return "-"
    return f"{100 * fmean(shares):.1f} ({100 * min(shares):.1f} to {100 * max(shares):.1f})"


def _difference(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Mean of the paired differences, with Student's interval over seeds."""
    points = [100 * (one - other) for one, other in zip(ours, theirs, strict=True)]
    mean, count = fmean(points), len(points)
    if count < 2:
        return f"{mean:+.1f}"
    deviation = (sum((point - mean) ** 2 for point in points) / (count - 1)) ** 0.5
    half = float(student.ppf(0.975, count - 1)) * deviation / count**0.5
    return f"{mean:+.1f} ({mean - half:+.1f} to {mean + half:+.1f})"
