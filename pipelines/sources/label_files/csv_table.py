"""Reads tables in CSV files by the names of their columns, and compares the names of images in them."""

from __future__ import annotations

import csv
import io
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path

from peclr_dali.errors import UserError


def csv_rows(
    file: Path, columns: Sequence[str], optional: Sequence[Sequence[str]] = ()
) -> Iterator[tuple[str, dict[str, str]]]:
    """The place of each row of a CSV file, for messages, and its cells by the names in the header, "" if missing.

    Args:
        columns: names that the header must have.
        optional: groups of names; the header has all names of a group or none.

    Raises:
        UserError: the header lacks one of these columns or has it twice, or a row is longer than the header.
    """
    text = file.read_bytes().decode("utf-8-sig", errors="surrogateescape")  # names need not be in UTF-8
    lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    header = [cell.strip().lower() for cell in next(lines, [])]
    needed = [*columns]
    for group in optional:
        if not {*group}.isdisjoint(header):
            needed += group
    for name in needed:
        if header.count(name) != 1:
            raise UserError(
                f"{file}: line 1 is {','.join(header)[:80]!r}, with {header.count(name) or 'no'} columns {name!r}; "
                f"expected a header with each of the columns {','.join(needed)[:160]} once, separated by commas. Write "
                "it, and the rows below it."
            )
    for cells in filter(None, lines):
        if any(cells[len(header) :]):
            found = f"{file}, line {lines.line_num}: {len(cells)} cells"
            raise UserError(f"{found}; expected {len(header)}, as in line 1. Are these decimal commas? Mend the row.")
        yield f"{file}, line {lines.line_num}", dict(zip_longest(header, cells[: len(header)], fillvalue=""))


def plain_name(name: str) -> str:
    """A file's name in the form in which names are compared: Unicode's NFC, and without "./" before it."""
    return unicodedata.normalize("NFC", name.removeprefix("./"))
