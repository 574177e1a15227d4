"""Reads boxes from a user's CSV or JSON file, as squares for the data path."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from errors import UserError
from parsing import as_numbers, parse_json, regular
from pipelines.config import DataConfig, box_file
from pipelines.samples.index import WHOLE_IMAGE

_COLUMNS = ("file", "x0", "y0", "x1", "y1")
_log = logging.getLogger(__name__)

_Row = tuple[str, object, Sequence[object]]
"""Position of a row (for messages), its file name, and its four edges; not checked yet."""


def squares_around(low_px: npt.NDArray[np.float64], high_px: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Squares (N, 3), centre x, centre y and side, around rectangles given by two corners (N, 2).

    A square has the rectangle's centre and its longer side; pixels, corner-based.
    """
    side_px = (high_px - low_px).max(axis=1, keepdims=True)
    return np.concatenate([(low_px + high_px) / 2, side_px], axis=1).astype(np.float32)


def refuse_boxes(config: DataConfig, reason: str) -> None:
    """Raise a `UserError` with the reason if `data.box` is set for a source that has its own boxes."""
    if box_file(config) is not None:
        raise UserError(f"data.box = {config.box!r}: {reason}. Leave it out.")


def read_boxes(file: Path, names: Sequence[str]) -> npt.NDArray[np.float32]:
    """Read squares around the boxes of a file, in the order of `names`.

    A CSV has the header `file,x0,y0,x1,y1`; a JSON is `{"hand.jpg": [x0, y0, x1, y1]}` or a list of objects with the
    CSV's columns as keys. Edges are in pixels of the image as displayed (EXIF orientation applied), corner-based.

    Args:
        names: (N,) the images' names in the file: relative to the source's folder, with "/".

    Returns:
        (N, 3) centre x, centre y, side; `WHOLE_IMAGE` for an image without a box. One line is logged about these.

    Raises:
        UserError: the file is missing or unreadable or has no box, a box is invalid, or its image is unknown or has a
            second box.
    """
    row_of = {name: row for row, name in enumerate(names)}
    edges_px = np.full((len(names), 4), np.nan)
    for where, name, edges in _rows(file):
        row = row_of.get(name.removeprefix("./")) if isinstance(name, str) else None
        if row is None:
            raise UserError(
                f"{file}, {where}: there is no image {_text(name)}; names are relative to the source's folder, "
                f"such as {names[0]!r}. Mend the name or remove the box."
            )
        if not np.isnan(edges_px[row, 0]):
            raise UserError(f"{file}, {where}: a second box for {name!r}; an image has one hand. Remove one of them.")
        box_px = as_numbers(edges)
        if box_px is None or box_px.shape != (4,) or not np.isfinite(box_px).all() or (box_px[2:] <= box_px[:2]).any():
            raise UserError(
                f"{file}, {where}: {_text(list(edges))} is not a box; expected four numbers x0, y0, x1, y1 in pixels "
                "with x0 < x1 and y0 < y1. Mend this box."
            )
        edges_px[row] = box_px
    boxes_px = squares_around(edges_px[:, :2], edges_px[:, 2:])
    without = np.isnan(edges_px[:, 0])
    if without.all():
        raise UserError(f"{file}: holds no box. Add boxes, or leave data.box out to use whole images.")
    boxes_px[without] = WHOLE_IMAGE
    if without.any():
        told = f"{without.sum()} of {len(names)} images ({names[int(without.argmax())]} the first)"
        _log.warning("%s: no box for %s; for these, the whole image is used", file, told)
    return boxes_px


def _rows(file: Path) -> Iterator[_Row]:
    if file.suffix.lower() not in (".csv", ".json"):
        raise UserError(
            f"data.box = {str(file)!r}: expected a .csv or .json file of boxes, or 'center'; 'joints' is for sources "
            "with keypoints."
        )
    try:
        text = regular(file).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{file}: no such file of boxes. Give the path of a .csv or .json file.") from None
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; expected a file of boxes. Check the path.") from error
    except ValueError as error:
        raise UserError(f"{file}: not UTF-8 text ({error}). Save the boxes as UTF-8.") from error
    return _csv_rows(file, text) if file.suffix.lower() == ".csv" else _json_rows(file, text)


def _csv_rows(file: Path, text: str) -> Iterator[_Row]:
    lines = csv.reader(text.splitlines(), skipinitialspace=True)
    try:
        header = tuple(cell.strip() for cell in next(lines, []))
        if header != _COLUMNS:
            found = ",".join(header)[:80]
            raise UserError(
                f"{file}: line 1 is {found!r}; expected the header {','.join(_COLUMNS)!r}. "
                "Columns are separated by commas, edges are in pixels. Write this header, and the boxes below it."
            )
        for cells in lines:
            if cells:
                yield f"line {lines.line_num}", cells[0], cells[1:]
    except csv.Error as error:
        raise UserError(f"{file}, line {lines.line_num}: not CSV ({error}). Mend this line.") from error


def _json_rows(file: Path, text: str) -> Iterator[_Row]:
    try:
        content = parse_json(text, unique_keys=True)
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error}). Mend the file of boxes.") from error
    if isinstance(content, dict):
        for number, (name, edges) in enumerate(content.items(), start=1):
            yield f"entry {number} ({_text(name)})", name, edges if isinstance(edges, list) else [edges]
    elif isinstance(content, list):
        for number, entry in enumerate(content, start=1):
            if not isinstance(entry, dict) or not entry.keys() >= set(_COLUMNS):
                raise UserError(
                    f"{file}, entry {number}: expected an object with the keys {', '.join(_COLUMNS)}, "
                    f"found {_text(entry)}. Mend this entry."
                )
            yield f"entry {number}", entry["file"], [entry[key] for key in _COLUMNS[1:]]
    else:
        raise UserError(
            f'{file}: expected {{"hand.jpg": [x0, y0, x1, y1], ...}} or a list of objects, found {text[:40]!r}. '
            "Write the boxes in one of these forms."
        )


def _text(value: object) -> str:
    """A value as text for messages."""
    try:
        text = repr(value)
    except RecursionError:
        text = "lists in lists"
    return text if len(text) <= 80 else f"{text[:80]}..."
