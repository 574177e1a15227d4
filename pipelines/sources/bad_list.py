"""The list of images to leave out, which `check-data` writes."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from peclr_dali.parsing import parse_json
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources.label_files.dataset_file import dataset_file
from peclr_dali.writing import write_text

_log = logging.getLogger(__name__)


def write_bad_list(file: Path, reasons: Mapping[str, str]) -> None:
    """Write paths and reasons. Errors as in `writing.whole_file`."""
    write_text(file, "".join(f"{json.dumps({'path': path, 'reason': why})}\n" for path, why in reasons.items()))


def rows_not_listed(index: Index, file: Path) -> IntArray:
    """Rows (M,) int64 of an index whose files are not on the list, ascending; a file may be several rows.

    The list may also have files that the index does not have, such as those of another split. If it has only such
    files, a warning says so, since it may be the list of another dataset.

    Raises:
        UserError: the list cannot be read.
    """
    with dataset_file(file, "a list of bad files", "'python cli.py check-data' makes it.") as path:
        listed = {parse_json(line)["path"] for line in path.read_text("utf-8-sig").splitlines() if line}
    rows = np.array([row for row, name in enumerate(index.paths) if name not in listed], np.int64)
    if listed and len(rows) == len(index):
        _log.warning("%s: none of its %d files is among the images of %s", file, len(listed), index.root)
    return rows
