"""Reads files of a dataset, with errors in one line: arrays in JSON, and tables in CSV files."""

import codecs
import csv
import io
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path

import numpy as np
from pydantic_core import from_json

from peclr_dali.errors import UserError, in_one_line
from peclr_dali.parsing import as_numbers, regular
from peclr_dali.pipelines.arrays import DoubleArray


@contextmanager
def dataset_file(file: Path, expected: str, remedy: str = "Unpack the dataset again.") -> Iterator[Path]:
    """Yield the path of a regular file. An error in the block becomes a line with what was expected and what to do.

    Raises:
        UserError: the file is missing, unreadable or no regular file, or its content raised an error in the block.
    """
    try:
        yield regular(file)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # damaged content may raise anything
        raise UserError(f"{file}: {_reason(error)}; expected {expected}. {remedy}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, KeyError):
        return f"cannot be read (it has no {error})"
    return f"cannot be read ({in_one_line(error) if isinstance(error, ValueError) else repr(error)[:200]})"


def read_json_array(file: Path, shape: tuple[int, ...]) -> DoubleArray:
    """Read a JSON list of N equal arrays of finite numbers: (N, *shape). A number may also be a list of one.

    Raises:
        UserError: the file is missing, unreadable or holds anything else.
    """
    numbers = f"{' x '.join(map(str, shape))} finite numbers" if shape else "one finite number"
    with dataset_file(file, f"a JSON list with {numbers} for each pose or frame") as path:
        array = as_numbers(from_json(path.read_bytes().removeprefix(codecs.BOM_UTF8)))  # faster than the json module
        if array is None:
            raise ValueError("lists of different lengths, or values that are no numbers")
        if array.shape[1:] == (1,) and not shape:
            array = array[:, 0]
        if not array.ndim or array.shape[1:] != shape or not np.isfinite(array).all():
            finite = "" if np.isfinite(array).all() else ", not all finite"
            raise ValueError(f"an array of shape {array.shape}{finite}")
        return array


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
