"""Makes Markdown tables from rows of bench/results/. Each table names its row and its machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.rows import read_rows

Row = Mapping[str, Any]


class NoRowError(LookupError):
    """There is no row yet for a table."""


def rows_of(file: Path) -> Iterator[Row]:
    """Rows of a file, each with its "place"; empty if there is no such file."""
    for number, row in enumerate(read_rows(file) if file.exists() else [], 1):
        yield {**row, "place": f"`{file.name}`, row {number}"}


def measured_on(row: Row) -> str:
    """Place and machine of a row, in words."""
    return f"{row['place']}: {machine_of(row)}"


def machine_of(row: Row) -> str:
    """Machine, date and commit of a row, in words."""
    machine = row["machine"]
    cores = row.get("settings", {}).get("cores", machine["cores"])
    where = machine["gpu"] if machine["gpu"] != "none" else "no GPU"
    return f"{cores} cores of an {machine['cpu']}, {where}, {machine['date']}, commit {machine['commit']}"


def markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    rows = [heads, ["---"] * len(heads), *lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
