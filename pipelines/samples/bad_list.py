"""Reads and writes the list of bad files, which `check-data` makes and `data.bad_list` excludes.

JSON Lines, {"path": ..., "reason": ...} for each file, with paths as in the index.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import parse_json, regular
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.writing import write_text

log = logging.getLogger(__name__)


def write_bad_list(file: Path, reasons: Mapping[str, str]) -> None:
    """Write paths and reasons. Errors as in `writing.whole_file`."""
    write_text(file, "".join(f"{json.dumps({'path': path, 'reason': why})}\n" for path, why in reasons.items()))


def rows_not_listed(index: Index, file: Path) -> IntArray:
    """Rows (M,) int64 of an index whose files are not on the list, ascending; a file may be several rows.

    The list may also have files that the index does not have, such as those of another split. If it has only such
    files, a warning says so, since it may be the list of another dataset.

    Raises:
        UserError: the list cannot be read, or has all files of the index.
    """
    try:
        listed = {parse_json(line)["path"] for line in regular(file).read_text(encoding="utf-8").splitlines()}
    except OSError as error:
        raise UserError(
            f"data.bad_list = {str(file)!r}: {error.strerror}; 'python cli.py check-data' makes it."
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{file}: damaged, or not a list of bad files. Make it again with 'check-data'.") from error
    left = np.array([row for row, path in enumerate(index.paths) if path not in listed], np.int64)
    if not len(left):
        raise UserError(f"{file}: lists all {len(index)} images of {index.root} as bad. Check the data again.")
    if listed and len(left) == len(index):
        log.warning("%s: none of its %d files is among the images of %s", file, len(listed), index.root)
    return left
