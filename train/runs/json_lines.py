"""Reads and cuts the JSON Lines files of a run, one row per logged step. Damaged rows are left out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from peclr_dali.parsing import regular
from peclr_dali.writing import write_bytes

log = logging.getLogger(__name__)


def read_undamaged_rows(file: Path, *, numbers: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The undamaged rows of a file; a warning counts the damaged ones. Empty if there is no file.

    An undamaged row has "step" and the keys in `numbers`.
    """
    return [row for _, row in _whole(file, numbers)]


def cut_rows(file: Path, step: int) -> None:
    """Keep the undamaged rows of a file up to a step, byte for byte. After an OSError the file is unchanged."""
    if file.exists():
        write_bytes(file, b"".join(line for line, row in _whole(file, ()) if row["step"] <= step))


def _whole(file: Path, numbers: Sequence[str]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line with its row. An incomplete last line is skipped without a warning: it may be half written."""
    if not file.exists():
        return
    damaged = []
    for number, line in enumerate(regular(file).read_bytes().splitlines(keepends=True), start=1):
        row = _row(line, numbers)
        if row is not None and line.endswith(b"\n"):
            yield line, row
        elif line.endswith(b"\n"):
            damaged.append(number)
    if damaged:
        rows = "1 row is damaged" if len(damaged) == 1 else f"{len(damaged)} rows are damaged"
        log.warning("%s: %s and left out, the first in line %d", file, rows, damaged[0])


def _row(line: bytes, numbers: Sequence[str]) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # also raised for bytes that are not UTF-8
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return row if all(type(row.get(name)) in (int, float) for name in numbers) else None
