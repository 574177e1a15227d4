"""Writes and reads the rows of bench/results/, and makes tables."""

import datetime
import fcntl
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from peclr_dali.errors import UserError
from peclr_dali.machine import available_cores
from peclr_dali.parsing import parse_json, regular

Row = Mapping[str, Any]


def describe_machine() -> dict[str, str | int]:
    """Date, processor, cores, memory, GPU, versions and commit."""
    import torch  # only here: its import takes seconds, and a file of rows is checked before

    from peclr_dali.train.runs.folder import versions

    cpu = re.search(r"^model name\s*: *(.+)", Path("/proc/cpuinfo").read_text(), re.MULTILINE)  # psutil lacks it
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": cpu[1] if cpu is not None else "unknown",
        "cores": available_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        **versions(),
    }


def append(file: Path, row: Row) -> None:
    """Add a row to a file. Several processes may append at once."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        opened.write(f"{json.dumps(row)}\n")


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of bench/results/. A file that cannot be read, or is not whole lines of JSON, is a `UserError`."""
    try:
        *lines, rest = regular(file).read_bytes().split(b"\n")
        if rest:
            raise ValueError("its last line has no newline")
        rows = [parse_json(line) for line in lines if line.strip()]
        if not all(isinstance(row, dict) for row in rows):
            raise ValueError("a line is no object")
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        expected = "expected one JSON object a line, as --record writes them. Name another file"
        raise UserError(f"{file}: holds no rows ({found}); {expected}") from error
    return rows


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, its columns aligned."""
    rows = [heads, ["---"] * len(heads), *lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in padded)
