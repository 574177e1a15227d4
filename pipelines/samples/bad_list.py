"""Reads and writes the list of bad files, which `check-data` makes and `data.bad_list` excludes.

JSON Lines: first {"checked": samples, "bad": files}, then {"path": ..., "reason": ...} for each file, with paths as in
the index. The number of files in the first line shows whether the list is complete.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from errors import UserError
from parsing import parse_json, regular
from pipelines.arrays import IntArray
from pipelines.samples.index import Index
from writing import write_text


def write_bad_list(file: Path, reasons: Mapping[str, str], *, checked: int) -> None:
    """Write paths and reasons, whole or not at all.

    Raises:
        NotWritten: the disk is full, or writing is not permitted.
    """
    rows = [{"checked": checked, "bad": len(reasons)}]
    lines = [json.dumps(row) for row in [*rows, *({"path": path, "reason": why} for path, why in reasons.items())]]
    write_text(file, "\n".join(lines) + "\n")


def rows_not_listed(index: Index, file: Path) -> IntArray:
    """Rows (M,) int64 of an index whose files are not on the list, ascending.

    Raises:
        UserError: the list is missing or incomplete, has a file that is not in the index, or lists all files.
    """
    listed = _read_paths(file)
    bad = (_rows_of_paths if index.store is None else _rows_of_store)(index, listed, file)
    left = np.setdiff1d(np.arange(len(index)), bad)
    if not len(left):
        raise UserError(f"{file}: lists all {len(index)} images of {index.root} as bad. Check the data again.")
    return left


def _read_paths(file: Path) -> list[str]:
    try:
        rows = [parse_json(line) for line in regular(file).read_text(encoding="utf-8").splitlines()]
        paths = [row["path"] for row in rows[1:]]
        expected = rows[0]["bad"]
        if not all(isinstance(path, str) for path in paths) or not isinstance(expected, int):
            raise TypeError
    except OSError as error:
        raise UserError(
            f"data.bad_list = {str(file)!r}: {error.strerror}; 'python cli.py check-data' makes it."
        ) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{file}: damaged, or not a list of bad files. Make it again with 'check-data'.") from error
    if len(paths) != expected:
        raise UserError(f"{file}: incomplete, with {len(paths)} of {expected} files. Make it again with 'check-data'.")
    return paths


def _rows_of_paths(index: Index, listed: Sequence[str], file: Path) -> IntArray:
    """All rows of the listed files; a file may hold several hands, a row each."""
    wanted = set(listed)
    missing = wanted.difference(index.paths)
    if missing:
        raise _unknown(index, min(missing), file)
    return np.array([row for row, path in enumerate(index.paths) if path in wanted], np.int64)


def _rows_of_store(index: Index, listed: Sequence[str], file: Path) -> IntArray:
    """As `_rows_of_paths`, for shards. If their names are sorted, bisection reads only a few of them."""
    rows = []
    for path in listed:
        row = bisect_left(index.paths, path)
        if row == len(index) or index.paths[row] != path:  # unknown, or the names are not sorted
            return _rows_of_paths(index, listed, file)
        while row < len(index) and index.paths[row] == path:
            rows.append(row)
            row += 1
    return np.array(rows, np.int64)


def _unknown(index: Index, path: str, file: Path) -> UserError:
    return UserError(
        f"{file}: {index.root} has no {path!r}: the list is of another dataset. Make it again with 'check-data'."
    )
