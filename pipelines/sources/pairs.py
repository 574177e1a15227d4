"""Finds the partners of a source's images: other versions, or the pairs of a file."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.partners import Partners, of_pairs, of_same_group
from peclr_dali.pipelines.sources.label_files import csv_rows, dataset_file, plain_name

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
        partners = of_same_group(index.group)
    else:
        partners = of_pairs(_read_pairs(Path(str(config.pairs)), index), len(index))
    without = int((partners.count == 0).sum())
    if without == len(index):
        raise UserError(
            f"data.positive = {kind!r}: no image of {index.root} has a partner. Choose another data.positive"
        )
    if without:
        _log.warning("%s: %d of %d images have no partner, and pair with themselves", index.root, without, len(index))
    return partners


def _read_pairs(file: Path, index: Index) -> IntArray:
    """The pairs (P, 2) of rows of the index. Pairs of images that the index leaves out are left out.

    A hand's number counts the hands of its image, from 0, in the index's order.
    """
    row_of = _rows_by_name(index)
    pairs, unknown = list[list[int]](), None
    with dataset_file(file, "a CSV file of pairs", "Mend it."):
        for where, cells in csv_rows(file, ("file", "positive")):
            pairs.append([])
            for name, key in (("file", "number"), ("positive", "positive_number")):
                number = cells.get(key, "0").strip()
                if not (number.isascii() and number.isdigit()):
                    raise UserError(f"{where}: {key} is {number[:80]!r}; expected a whole number. Mend it.")
                pairs[-1].append(row_of.get((plain_name(cells[name]), int(number)), -1))
                if pairs[-1][-1] < 0:
                    unknown = unknown or f"hand {number} of {cells.get(name, '')[:80]!r} in {where}"
    found = np.array(pairs, np.int64).reshape(-1, 2)
    known = found[(found >= 0).all(axis=1)]
    if not len(known):
        raise UserError(
            f"{file}: none of its {len(found)} pairs is of images in {index.root}, such as {index.paths[0]!r}"
            f"{f': not {unknown}' if unknown else ''}. Names are relative to data.root. Mend the names, or add pairs."
        )
    if unknown is not None:
        few = (len(found) - len(known), len(found), unknown)
        _log.warning("%s: %d of %d pairs are of images that are not used, the first is %s", file, *few)
    if (itself := np.flatnonzero(known[:, 0] == known[:, 1])).size:
        raise UserError(f"{file}: {index.paths[known[itself[0], 0]]!r} is its own partner. Remove this pair.")
    return np.unique(known, axis=0)


def _rows_by_name(index: Index) -> dict[tuple[str, int], int]:
    """The row of each hand, by the name of its image and its number there."""
    seen = Counter[str]()
    row_of = {}
    for row, path in enumerate(map(plain_name, index.paths)):
        row_of[path, seen[path]] = row
        seen[path] += 1
    return row_of
