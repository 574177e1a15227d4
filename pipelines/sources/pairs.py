"""Finds the partners of a source's images: other versions, neighbours in time, or the pairs of a file."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.partners import Partners, frames_of, near_in_time, of_pairs, of_same_group, tracks_of
from peclr_dali.pipelines.sources.annotations.dataset_file import dataset_file

COLUMNS: Final = ("file", "number", "positive", "positive_number", "distance")
"""The header of a file of pairs. A hand's number counts the hands of its image, from 0, in the index's order."""

_SHORT: Final = ("file", "positive")

_log = logging.getLogger(__name__)


def partners_of(index: Index, config: DataConfig) -> Partners | None:
    """The partners that `config.positive` asks for; None for "self".

    With "file" and no file, these are the partners that the index has from its dataset. One line of the log counts the
    images without any.

    Raises:
        UserError: the source has no versions, a frame no number, the file of pairs cannot be used, or no image of the
            index has a partner, or a key is set that this kind does not read.
    """
    kind = config.positive
    partners = index.partners if config.pairs is None else None
    if (config.pairs is not None or partners is not None) != (kind == "file"):
        raise UserError(
            f"data.positive = {kind!r} and data.pairs = {config.pairs!r}: data.pairs names the file of pairs of "
            "data.positive = 'file', and is unset otherwise"
        )
    if kind != "time" and config.positive_frames != DataConfig.positive_frames:
        raise UserError(
            f"data.positive_frames = {config.positive_frames} and data.positive = {kind!r}: frames count for 'time' "
            "only. Leave data.positive_frames out, or set data.positive = 'time'"
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
    elif kind == "time":
        if config.source in ("freihand", "shards"):  # whose folders and files are no films
            raise UserError(
                f"data.positive = 'time': {index.root} ({config.source}) has no folder for each sequence; expected "
                "frames such as VIDEO/frame_000030.jpg. Choose another source or another data.positive"
            )
        sequence, frame = frames_of(index.paths, index.mirrored)
        track = tracks_of(sequence, frame, index.box_px, config.positive_frames)
        partners = near_in_time(track, frame, config.positive_frames)
    elif partners is None:
        partners = of_pairs(_read_pairs(Path(str(config.pairs)), index), len(index))
    without = int((partners.count == 0).sum())
    if without == len(index):
        wider = f"no two frames of a sequence are {config.positive_frames} or less apart: set data.positive_frames"
        raise UserError(
            f"data.positive = {kind!r}: no image of {index.root} has a partner. "
            f"{wider if kind == 'time' else 'Choose another data.positive'}"
        )
    if without:
        _log.warning("%s: %d of %d images have no partner, and pair with themselves", index.root, without, len(index))
    return partners


def _read_pairs(file: Path, index: Index) -> IntArray:
    """The pairs (P, 2) of rows of the index. Pairs of images that the index leaves out are left out."""
    row_of = _rows_by_name(index)
    with dataset_file(file, "a file of pairs in UTF-8", "Mend it, or make it with the command 'mine'.") as path:
        lines = csv.reader(path.read_text(encoding="utf-8-sig").splitlines())
        header = tuple(cell.strip() for cell in next(lines, []))
        if header not in (_SHORT, COLUMNS, COLUMNS[:-1]):
            raise UserError(
                f"{file}: line 1 is {','.join(header)[:80]!r}; expected the header {','.join(_SHORT)!r} or "
                f"{','.join(COLUMNS)!r}. Write this header, and the pairs below it."
            )
        pairs, unknown = list[list[int]](), None
        for cells in filter(None, lines):
            if len(cells) != len(header):
                raise UserError(f"{file}, line {lines.line_num}: {len(cells)} cells; expected {len(header)}. Mend it.")
            of = dict(zip(header, cells, strict=True))
            rows = []
            for name, key in (("file", "number"), ("positive", "positive_number")):
                number = of.get(key, "0").strip()
                if not (number.isascii() and number.isdigit()):
                    raise UserError(
                        f"{file}, line {lines.line_num}: {key} is {number[:80]!r}; expected a whole number. Mend it."
                    )
                rows.append(row_of.get((of[name].removeprefix("./"), number.lstrip("0") or "0"), -1))
                if rows[-1] < 0 and unknown is None:
                    unknown = f"hand {number} of {of[name][:80]!r} in line {lines.line_num}"
            pairs.append(rows)
    if not pairs:
        raise UserError(f"{file}: has a header and no pair. Write the pairs below it, or make the file again.")
    found = np.array(pairs, np.int64)
    known = found[(found >= 0).all(axis=1)]
    if not len(known):
        raise UserError(
            f"{file}: none of its {len(found)} pairs is of images in {index.root}, such as {index.paths[0]!r}: not "
            f"{unknown}. Names are relative to data.root. Mend the names, or make the file again."
        )
    if unknown is not None:
        few = (len(found) - len(known), len(found), unknown)
        _log.warning("%s: %d of %d pairs are of images that are not used, the first is %s", file, *few)
    if (itself := np.flatnonzero(known[:, 0] == known[:, 1])).size:
        raise UserError(f"{file}: {index.paths[known[itself[0], 0]]!r} is its own partner. Remove this pair.")
    return np.unique(known, axis=0)


def _rows_by_name(index: Index) -> dict[tuple[str, str], int]:
    """The row of each hand, by the name of its image and its number there."""
    return {key: row for row, key in enumerate(numbered(index))}


def numbered(index: Index) -> Iterator[tuple[str, str]]:
    """The name of each sample's image, and its number among the samples of this image."""
    seen: dict[str, int] = {}
    for path in index.paths:
        seen[path] = seen.get(path, -1) + 1
        yield path, str(seen[path])
