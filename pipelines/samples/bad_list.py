"""Reads and writes the list of bad files, which `check-data` makes and `data.bad_list` excludes.

JSON Lines: first {"checked": samples, "bad": files}, then {"path": ..., "reason": ...} for each file, with paths as in
the index. The number of files in the first line shows whether the list is complete.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import parse_json, regular
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.store import SelectedStore
from peclr_dali.writing import write_text


def write_bad_list(file: Path, reasons: Mapping[str, str], *, checked: int) -> None:
    """Write paths and reasons, whole or not at all.

    Raises:
        NotWritten: the disk is full, or writing is not permitted.
    """
    rows = [{"checked": checked, "bad": len(reasons)}]
    lines = [json.dumps(row) for row in [*rows, *({"path": path, "reason": why} for path, why in reasons.items())]]
    write_text(file, "\n".join(lines) + "\n")


def rows_not_listed(index: Index, file: Path, whole: Callable[[], Iterator[Index]] = lambda: iter(())) -> IntArray:
    """Rows (M,) int64 of an index whose files are not on the list, ascending.

    The list may also have files of the dataset that the index does not have, such as those of another split.

    Args:
        whole: loads the dataset with all splits and parts; called if the index does not have a listed file. If the
            index has some rows of a store, the first has all of them.

    Raises:
        UserError: the list is missing or incomplete, has no file of the dataset, or lists all files of the index.
    """
    listed = _read_paths(file)
    bad = _rows_of(index, listed, whole)
    if listed and not len(bad) and not any(len(_rows_of(one, listed, whole)) for one in whole()):
        raise UserError(
            f"{file}: {index.root} has no {min(listed)!r}: the list is of another dataset. Make it again with "
            "'check-data'."
        )
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


def _rows_of(index: Index, listed: Sequence[str], whole: Callable[[], Iterator[Index]]) -> IntArray:
    """All rows of the listed files; a file may hold several hands, a row each.

    If the names of shards are sorted, bisection reads only a few of them.
    """
    if index.store is not None:
        rows, unknown = _bisect(index, listed)
        if unknown and isinstance(index.store, SelectedStore):
            of_whole, unknown = _bisect(next(whole()), unknown)
            rows += np.flatnonzero(np.isin(index.store.rows, of_whole)).tolist()
        if not unknown:
            return np.array(rows, np.int64)
    wanted = set(listed)
    return np.array([row for row, path in enumerate(index.paths) if path in wanted], np.int64)


def _bisect(index: Index, listed: Sequence[str]) -> tuple[list[int], list[str]]:
    """Rows of the listed files, and the files not found: these are unknown, or the names are not sorted."""
    rows, unknown = list[int](), list[str]()
    for path in listed:
        row = bisect_left(index.paths, path)
        if row == len(index) or index.paths[row] != path:
            unknown.append(path)
        while row < len(index) and index.paths[row] == path:
            rows.append(row)
            row += 1
    return rows, unknown
