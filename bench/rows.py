"""Makes, prints, writes and reads the rows of bench/results/."""

from __future__ import annotations

import datetime
import errno
import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import psutil  # type: ignore[import-untyped]
from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table

from peclr_dali.errors import UserError
from peclr_dali.machine.cores import available_cores
from peclr_dali.parsing import parse_json, regular

Row = Mapping[str, Any]

_TABLE_WIDTH = 128  # a narrower terminal wraps the lines


def describe_machine() -> dict[str, str | int]:
    """Date, processor, cores, memory, GPU, versions and commit."""
    import torch  # only here: its import takes seconds, and a file of rows is checked before

    from peclr_dali.train.runs.folder import versions

    cpu = re.search(r"^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)  # psutil lacks it
    found: dict[str, str | int] = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu[1] if cpu is not None else "unknown",
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
    }
    return found | versions()


def show(*parts: RenderableType) -> None:
    """Print tables and lines to the terminal."""
    for part in parts:
        if isinstance(part, str):
            click.echo(part)
        else:
            Console(width=max(Console().width, _TABLE_WIDTH)).print(part)


def as_table(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]]) -> Table:
    """A table for the terminal; its first column is aligned to the left, the others to the right."""
    table = Table(title=title, box=SIMPLE_HEAD)
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    return table


def append(file: Path, row: Row) -> None:
    """Add a row to a file, whole or not at all. Several processes may append at once.

    Raises:
        OSError: the disk is full, or the like; the row is in its notes.
    """
    line = f"{json.dumps(row)}\n".encode()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab", buffering=0) as opened:
            fcntl.flock(opened, fcntl.LOCK_EX)
            size = opened.seek(0, os.SEEK_END)
            if opened.write(line) < len(line):
                opened.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    except OSError as error:
        error.add_note(f"The row is: {line.decode()}")
        raise


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of bench/results/. A file that cannot be read, or is not whole lines of JSON, is a `UserError`."""
    expected = "expected one JSON object a line, as --record writes them. Name another file"
    try:
        *lines, rest = regular(file).read_bytes().split(b"\n")
        if rest:
            raise ValueError("its last line has no newline")
        rows = [parse_json(line) for line in lines if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"{file}: holds no rows ({getattr(error, 'strerror', None) or error}); {expected}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{file}: holds no rows, but other values; {expected}")
    return rows


def rows_of(file: Path) -> Iterator[Row]:
    """Rows of a file, each with its "place"; empty if there is no such file."""
    for number, row in enumerate(read_rows(file) if file.exists() else [], 1):
        yield {**row, "place": f"`{file.name}`, row {number}"}


def measured_on(row: Row) -> str:
    """Place, machine, date and commit of a row of `rows_of`, in words."""
    machine = row["machine"]
    cores = row.get("settings", {}).get("cores", machine["cores"])
    where = machine["gpu"] if machine["gpu"] != "none" else "no GPU"
    return (
        f"{row['place']}: {cores} cores of an {machine['cpu']}, {where}, {machine['date']}, commit {machine['commit']}"
    )


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "".join(f"| {' | '.join(row)} |\n" for row in [heads, ["---"] * len(heads), *lines])
