"""Finds the partners of a source's images: other versions, or the pairs of a file."""

import logging
from collections import Counter
from pathlib import Path

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.partners import Partners, of_pairs, of_same_group
from peclr_dali.pipelines.sources.label_files.dataset_file import csv_rows, dataset_file, plain_name

_log = logging.getLogger(__name__)


def partners_of(index: Index, config: DataConfig) -> Partners | None:
    """The partners that `config.positive` asks for; None for "self".

    One line of the log counts the images without any.

    Raises:
        UserError: the source has no versions, the file of pairs cannot be used, or no image of the index has a partner,
            or a file is given for another kind than "file".
    """
    kind = config.positive
    if (config.pairs is not None) != (kind == "file"):
        raise UserError(
            f"data.positive = {kind!r} and data.pairs = {config.pairs!r}: data.pairs names the file of pairs of "
            "data.positive = 'file', and is unset otherwise"
        )
    if kind == "self":
        return None
    if kind == "version":
        if config.source not in ("freihand", "shards") or not index.name.startswith("freihand") or index.group is None:
            raise UserError(
                f"data.positive = 'version': {index.root} ({config.source}) has no versions of a pose; expected "
                "FreiHAND's layout or shards packed from it. Choose another data.positive"
            )
        partners, where = of_same_group(index.group), "among data.versions"
    else:
        partners, where = _read_pairs(Path(str(config.pairs)), index)
    without = int((partners.count == 0).sum())
    if without == len(index):
        raise UserError(
            f"data.positive = {kind!r}: no image of {index.root}, such as {index.paths[0]!r}, has a partner {where}. "
            + ("Name more in data.versions" if kind == "version" else "Names are relative to data.root. Mend the pairs")
            + ", or choose another data.positive"
        )
    if without:
        _log.warning("%s: %d of %d images have no partner, and pair with themselves", index.root, without, len(index))
    return partners


def _read_pairs(file: Path, index: Index) -> tuple[Partners, str]:
    """The partners by a file, and where they are, in words.

    Pairs of an image with itself, or of one that is not used, are left out.

    A hand's number counts the hands of its image, from 0, in the index's order. A warning counts what is left out.
    """
    row_of, seen = dict[tuple[str, int], int](), Counter[str]()  # by an image's name and the hand's number there
    for row, path in enumerate(map(plain_name, index.paths)):
        row_of[path, seen[path]] = row
        seen[path] += 1
    pairs, left_out = list[tuple[int, int]](), list[str]()
    with dataset_file(file, "a CSV file of pairs", "Mend it."):
        for place, cells in csv_rows(file, ("file", "positive"), [("number", "positive_number")]):
            first = row_of.get((plain_name(cells["file"]), _whole(cells.get("number", "0"))))
            second = row_of.get((plain_name(cells["positive"]), _whole(cells.get("positive_number", "0"))))
            if first is None or second is None or first == second:
                left_out.append(f"{place}: {','.join(cells.values())[:80]!r}")
            else:
                pairs.append((first, second))
    where = f"in {file}"
    if left_out:
        where += (
            f": {len(left_out)} of {len(left_out) + len(pairs)} pairs are not of two hands that are used, with whole "
            f"numbers, the first is in {left_out[0]}"
        )
        _log.warning("Partners %s", where)
    return of_pairs(np.unique(np.array(pairs, np.int64).reshape(-1, 2), axis=0), len(index)), where


def _whole(cell: str) -> int:
    """The number in a cell; -1, which is no hand's, if it is no whole number."""
    digits = cell.strip()
    return int(digits) if digits.isascii() and digits.isdigit() else -1
