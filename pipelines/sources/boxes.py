"""Reads boxes from a user's CSV or JSON file, as squares for the data path."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers, parse_json
from peclr_dali.pipelines.config import DataConfig, box_file
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index
from peclr_dali.pipelines.sources.annotations.dataset_file import dataset_file
from peclr_dali.skeleton import HAND

_COLUMNS: Final = ("file", "x0", "y0", "x1", "y1")
_WITH_CONFIDENCE: Final = (*_COLUMNS, "hand", "confidence")
_LANDMARKS: Final = tuple(f"{name}_{axis}" for name in HAND.keypoints for axis in "xy")
_HEADERS: Final = (_COLUMNS, _WITH_CONFIDENCE[:-1], _WITH_CONFIDENCE, (*_WITH_CONFIDENCE, *_LANDMARKS))
_WITHOUT_BOX: Final = ("none", "unreadable")
_HANDS: Final = ("left", "right", *_WITHOUT_BOX)
_LARGEST_PX: Final = 1e7
"""Landmarks lie in the image or near it."""

_log = logging.getLogger(__name__)


class _Row(NamedTuple):
    """A row, not checked yet. `hand` is None in all rows of a file without hands, likewise `landmarks`."""

    where: str
    name: object
    edges: Sequence[object]
    hand: object
    landmarks: Sequence[str] | None = None

    def wrong(self, found: str, expected: str) -> UserError:
        """The error about this row."""
        return UserError(f"{self.where}: {found}; expected {expected}. Mend this row.")


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


class Boxes(NamedTuple):
    """The boxes of a file, in the order of their images; those of an image in the order of the file.

    Attributes:
        image: (M,) row of the image among the given names. With `mirror`, an image may have several boxes.
        box_px: (M, 3) float32, centre x, centre y and side of the square around the box.
        mirror: (M,) bool, left hands; None if the file has no column "hand".
        keypoints_px: (M, 21, 2) float32, the landmarks of a hand, NaN where a row has none; None if the file has no
            columns for them.
    """

    image: npt.NDArray[np.int64]
    box_px: npt.NDArray[np.float32]
    mirror: npt.NDArray[np.bool_] | None
    keypoints_px: npt.NDArray[np.float32] | None = None


def read_boxes(file: Path, names: Sequence[str]) -> Boxes:
    """Read the boxes of a file.

    A CSV has the header `file,x0,y0,x1,y1`, with or without `hand`, after it `confidence`, and after that the
    landmarks, as tools/find_boxes.py writes them; a JSON is `{"hand.jpg": [x0, y0, x1, y1]}` or a list of objects with
    the CSV's columns as keys, without landmarks. Edges are in pixels of the
    image as displayed (EXIF orientation applied), corner-based. With "hand", each row is a hand, "left" or "right", and
    an image may have several; a row with "none" or "unreadable" has no box. The same box of the same hand counts once.
    The confidence is not read.

    Args:
        names: (N,) the images' names in the file: relative to the source's folder, with "/".

    Raises:
        UserError: the file is missing or unreadable or has no box, a box is invalid, its image is unknown, or it is
            a second one without "hand".
    """
    row_of = {name: row for row, name in enumerate(names)}
    seen, repeated, left = set[object](), list[str](), list[bool]()
    images, edges_px, landmarks_px = list[int](), list[npt.NDArray[np.float64]](), list[npt.NDArray[np.float32]]()
    for row in _rows(file):  # not kept: millions of rows are read
        has_hands = row.hand is not None
        image = row_of.get(row.name.removeprefix("./")) if isinstance(row.name, str) else None
        if image is None:
            raise UserError(
                f"{row.where}: there is no image {_text(row.name)}; names are relative to the source's folder, such as "
                f"{names[0]!r}. Mend the name or remove the box."
            )
        if row.hand is None and image in seen:
            raise row.wrong(f"a second box for {row.name!r}", "one, unless the file has a column 'hand'")
        if row.hand is not None and row.hand not in _HANDS:
            raise row.wrong(f"hand is {_text(row.hand)}", ", ".join(_HANDS))
        if row.hand in _WITHOUT_BOX:
            if any(edge not in ("", None) for edge in row.edges):
                raise row.wrong(f"hand is {row.hand!r}, and the box is {_text(list(row.edges))}", "no box there")
            continue
        box_px = as_numbers(row.edges)
        if box_px is None or box_px.shape != (4,) or not np.isfinite(box_px).all() or (box_px[2:] <= box_px[:2]).any():
            expected = "x0, y0, x1, y1 in pixels with x0 < x1 and y0 < y1"
            raise row.wrong(f"{_text(list(row.edges))} is not a box", expected)
        key = image if row.hand is None else (image, row.hand, box_px.tobytes())
        if key in seen:
            repeated.append(row.where)
            continue
        seen.add(key)
        left.append(row.hand == "left")
        if row.landmarks is not None:
            landmarks_px.append(_landmarks_px(row, row.landmarks))
        images.append(image)
        edges_px.append(box_px)
    if not seen:
        raise UserError(f"{file}: holds no box. Add boxes, or leave data.box out to use whole images.")
    if repeated:
        _log.warning("%s: the same hand as in a row before; %d such rows are left out", repeated[0], len(repeated))
    order = np.argsort(images, kind="stable")
    edges = np.array(edges_px)[order]
    return Boxes(
        np.array(images, np.int64)[order],
        squares_around(edges[:, :2], edges[:, 2:]),
        np.array(left)[order] if has_hands else None,
        np.array(landmarks_px)[order] if landmarks_px else None,
    )


def boxes_of_images(file: Path, names: Sequence[str]) -> npt.NDArray[np.float32]:
    """Read one square for each image (N, 3) of a source that shows one known hand in each.

    It is `WHOLE_IMAGE` for an image without a box; one warning counts these.

    Raises:
        UserError: as for `read_boxes`, or an image has several boxes.
    """
    boxes = read_boxes(file, names)
    if (again := np.flatnonzero(np.diff(boxes.image) == 0)).size:
        raise UserError(
            f"{file}: several boxes for {names[boxes.image[again[0]]]!r}; this source has one hand in an image. "
            "Keep one of them, or read the images with data.source = 'folder'."
        )
    return _with_whole_images(boxes, file, names)


def with_boxes(index: Index, file: Path) -> Index:
    """An index of whole images with the boxes of a file.

    If the file says which hand a box shows, each of its hands is a sample, left ones are mirrored, images without a
    hand are left out, and landmarks become keypoints. Otherwise an image without a box is used whole.

    Raises:
        UserError: as for `read_boxes`.
    """
    boxes = read_boxes(file, index.paths)
    if boxes.mirror is None:
        return replace(index, box_px=_with_whole_images(boxes, file, index.paths))
    images = len(np.unique(boxes.image))
    if images < len(index):
        found = f"{len(boxes.image)} hands in {images} of {len(index)} images"
        _log.info("%s: %s; images without a hand are left out", file, found)
    hands = index.select(boxes.image)
    return replace(hands, box_px=boxes.box_px, mirror=boxes.mirror, group=boxes.image, keypoints_px=boxes.keypoints_px)


def _with_whole_images(boxes: Boxes, file: Path, names: Sequence[str]) -> npt.NDArray[np.float32]:
    boxes_px = np.tile(np.array(WHOLE_IMAGE, np.float32), (len(names), 1))
    boxes_px[boxes.image] = boxes.box_px
    without = np.setdiff1d(np.arange(len(names)), boxes.image)
    if len(without):
        counts = f"{len(without)} of {len(names)} images ({names[without[0]]} the first)"
        _log.warning("%s: no box for %s; for these, the whole image is used", file, counts)
    return boxes_px


def _rows(file: Path) -> Iterator[_Row]:
    read = {".csv": _csv_rows, ".json": _json_rows}.get(file.suffix.lower())
    if read is None:
        raise UserError(
            f"data.box = {str(file)!r}: expected a .csv or .json file of boxes, or 'center'; 'joints' is for sources "
            "with keypoints."
        )
    remedy = "Mend it, or give the path of another .csv or .json file."
    with dataset_file(file, "a file of boxes in UTF-8", remedy) as path:
        yield from read(file, path.read_bytes().decode("utf-8-sig", errors="surrogateescape"))


def _csv_rows(file: Path, text: str) -> Iterator[_Row]:
    lines = csv.reader(io.StringIO(text, newline=""))
    header = tuple(cell.strip() for cell in next(lines, []))
    if header not in _HEADERS:
        raise UserError(
            f"{file}: line 1 is {','.join(header)[:80]!r}; expected the header {','.join(_COLUMNS)!r}, with or without "
            "hand, confidence and all columns of landmarks. Columns are separated by commas, edges are in pixels. "
            "Write this header, and the boxes below it."
        )
    for cells in filter(None, lines):
        name, *others = cells[0], *(cell.strip() for cell in cells[1:])  # a name may begin with a space
        surplus = others[len(header) - 1 :]
        hand = "".join(others[4:5]) if "hand" in header else None
        landmarks = others[6 : len(header) - 1] if header[-1] in _LANDMARKS else None
        yield _Row(f"{file}, line {lines.line_num}", name, [*others[:4], *surplus], hand, landmarks)


def _json_rows(file: Path, text: str) -> Iterator[_Row]:
    content = parse_json(text, unique_keys=True)
    if isinstance(content, dict):
        for name, edges in content.items():
            yield _Row(f"{file}, {_text(name)}", name, edges if isinstance(edges, list) else [edges], None)
        return
    if not isinstance(content, list):
        forms = '{"hand.jpg": [x0, y0, x1, y1], ...} or a list of objects'
        raise UserError(f"{file}: expected {forms}, found {text[:40]!r}. Write the boxes in one of these forms.")
    hands = any(isinstance(entry, dict) and "hand" in entry for entry in content)
    for number, entry in enumerate(content, start=1):
        where = f"{file}, entry {number}"
        if not isinstance(entry, dict) or not entry.keys() >= set(_COLUMNS):
            keys = ", ".join(_COLUMNS)
            raise UserError(f"{where}: found {_text(entry)}; expected an object with the keys {keys}. Mend this entry.")
        hand = (entry.get("hand") or "") if hands else None
        yield _Row(where, entry["file"], [entry[key] for key in _COLUMNS[1:]], hand)


def _landmarks_px(row: _Row, cells: Sequence[str]) -> npt.NDArray[np.float32]:
    """The landmarks of a hand, (21, 2); NaN if there are none, as in a row that was added by hand."""
    if not any(cells):
        return np.full((len(HAND), 2), np.nan, np.float32)
    values = as_numbers(cells)
    if values is None or values.shape != (len(_LANDMARKS),) or not (np.abs(values) < _LARGEST_PX).all():
        raise row.wrong(
            f"{len(cells)} cells for landmarks, {_text(list(cells))}", f"{len(_LANDMARKS)} numbers below 1e7"
        )
    return values.reshape(-1, 2).astype(np.float32)


def _text(value: object) -> str:
    """A value as text for messages."""
    try:
        text = repr(value)
    except RecursionError:
        text = "lists in lists"
    return text if len(text) <= 80 else f"{text[:80]}..."
