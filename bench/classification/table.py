"""Shows the result of `classify` as a table."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from errors.terminal import printable


def as_table(row: Mapping[str, Any]) -> Table:
    """Accuracies in percent with their intervals."""
    title = f"{row['tested']} images of {row['groups_tested']} groups tested, {len(row['classes'])} classes"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    table.add_column("encoder")
    few = list(row["encoders"][-1]["few"])
    heads = ("logistic regression (95 %)", f"{row['neighbours']} nearest (95 %)", *(f"{n} groups" for n in few))
    for head in (*heads, "trained on"):
        table.add_column(head, justify="right")
    for entry in row["encoders"]:
        seen = entry["trained_on_tested"]
        table.add_row(
            escape(printable(entry["name"])),
            percent(entry["accuracy"]),
            percent(entry["nearest_neighbours"]),
            *(f"{fmean(entry['few'][n]):.1%}" if entry["few"] else "" for n in few),
            "unknown" if seen is None else str(seen),
        )
    return table


def percent(interval: Mapping[str, float | None] | None) -> str:
    """A share with its interval, in percent."""
    if interval is None:
        return ""
    value, low, high = (interval[key] for key in ("value", "low", "high"))
    assert value is not None
    return f"{value:.1%}" if low is None or high is None else f"{value:.1%} ({low:.1%} to {high:.1%})"
