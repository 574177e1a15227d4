"""Reads boxes from a user's CSV or JSON file, as squares for the data path."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers, file_name, parse_json
from peclr_dali.pipelines.config import DataConfig, box_file
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index
from peclr_dali.pipelines.sources.label_files import coco_annotations, csv_rows, dataset_file, plain_name
from peclr_dali.skeleton import HAND

_COLUMNS: Final = ("file", "x0", "y0", "x1", "y1")
_LANDMARKS: Final = tuple(f"{name}_{axis}" for name in HAND.keypoints for axis in "xy")
_WITHOUT_BOX: Final = ("none", "unreadable")
_HANDS: Final = ("left", "right", *_WITHOUT_BOX)
_LARGEST_PX: Final = 1e7
"""Landmarks lie in the image or near it."""

_log = logging.getLogger(__name__)


class _Row(NamedTuple):
    """A row, not checked yet. `hand` is None in all rows of a file without hands, likewise `landmarks`."""

    where: str
    name: str
    edges: Sequence[object]
    hand: str | None
    landmarks: Sequence[str] | None = None


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

    A CSV has a header with the columns file, x0, y0, x1, y1, and maybe hand and the landmarks, as tools/find_boxes.py
    writes them; other columns are not read. Edges are in pixels of the image as displayed (EXIF orientation applied),
    corner-based. With "hand", each row is a hand, "left" or "right", and an image may have several; a row with "none"
    or "unreadable" has no box. The same box of the same hand counts once.

    A JSON file is in COCO's format: each annotation's `bbox` is a hand, a left one if the name of its category begins
    with "left".

    Args:
        names: (N,) the images' names in the file: relative to the source's folder, with "/".

    Raises:
        UserError: the file is missing or unreadable or has no box, a box is invalid, its image is unknown, or it is
            a second one without "hand".
    """
    read = {".csv": _csv_rows, ".json": _coco_rows}.get(file.suffix.lower())
    if read is None:
        raise UserError(
            f"data.box = {str(file)!r}: expected a .csv or .json file of boxes, or 'center'; 'joints' is for sources "
            "with keypoints."
        )
    row_of = {plain_name(name): row for row, name in enumerate(names)}
    found: dict[object, tuple[int, bool, npt.NDArray[np.float64], npt.NDArray[np.float32] | None]] = {}
    repeated, has_hands = 0, False
    with dataset_file(
        file, "boxes as CSV in UTF-8, or in COCO's JSON format", "Mend it, or give the path of another file."
    ) as path:
        for row in read(file, path.read_bytes().decode("utf-8-sig", errors="surrogateescape")):
            has_hands, image = row.hand is not None, row_of.get(plain_name(row.name))
            if image is None:
                raise UserError(
                    f"{row.where}: there is no image {row.name[:80]!r}; names are relative to the source's folder, "
                    f"such as {names[0]!r}. Mend the name or remove the box."
                )
            if row.hand is not None and row.hand not in _HANDS:
                raise UserError(f"{row.where}: hand is {row.hand[:80]!r}; expected {', '.join(_HANDS)}. Mend this row.")
            if row.hand in _WITHOUT_BOX:
                continue
            edges_px = _box_px(row)
            key = image if row.hand is None else (image, row.hand, edges_px.tobytes())
            if key in found and row.hand is None:
                expected = "one, unless the file has a column 'hand'"
                raise UserError(f"{row.where}: a second box for {row.name!r}; expected {expected}. Mend this row.")
            repeated += key in found
            found.setdefault(key, (image, row.hand == "left", edges_px, _landmarks_px(row)))
    if not found:
        raise UserError(f"{file}: holds no box. Add boxes, or leave data.box out to use whole images.")
    if repeated:
        _log.warning("%s: %d rows repeat a hand of a row before, and are left out", file, repeated)
    in_order = sorted(found.values(), key=lambda one: one[0])
    images, left, edges, landmarks = zip(*in_order, strict=True)
    return Boxes(
        np.array(images, np.int64),
        squares_around(np.array(edges)[:, :2], np.array(edges)[:, 2:]),
        np.array(left) if has_hands else None,
        None if landmarks[0] is None else np.array(landmarks),
    )


def _csv_rows(file: Path, text: str) -> Iterator[_Row]:
    for where, row in csv_rows(file, text, _COLUMNS):
        edges = [row[column] for column in _COLUMNS[1:]]
        landmarks = [row[column].strip() for column in _LANDMARKS] if row.keys() >= {*_LANDMARKS} else None
        yield _Row(where, row["file"], edges, row["hand"].strip() if "hand" in row else None, landmarks)


def _coco_rows(file: Path, text: str) -> Iterator[_Row]:
    content = parse_json(text)
    category_of = {one["id"]: str(one["name"]) for one in content.get("categories", [])}
    for where, one, image in coco_annotations(file, content):
        x, y, width, height = one["bbox"]
        hand = "left" if category_of.get(one.get("category_id"), "").lower().startswith("left") else "right"
        yield _Row(where, file_name(image["file_name"]), (x, y, x + width, y + height), hand)


def _box_px(row: _Row) -> npt.NDArray[np.float64]:
    """The edges x0, y0, x1, y1 of a row, (4,)."""
    box_px = as_numbers(row.edges)
    if box_px is None or not np.isfinite(box_px).all() or (box_px[2:] <= box_px[:2]).any():
        raise UserError(
            f"{row.where}: {str(list(row.edges))[:80]} is not a box; expected x0, y0, x1, y1 in pixels with x0 < x1 "
            "and y0 < y1. Mend this row."
        )
    return box_px


def _landmarks_px(row: _Row) -> npt.NDArray[np.float32] | None:
    """The landmarks of a hand, (21, 2); NaN if it has none, as in a row that was added by hand."""
    if row.landmarks is None:
        return None
    if not any(row.landmarks):
        return np.full((len(HAND), 2), np.nan, np.float32)
    values = as_numbers(row.landmarks)
    if values is None or not (np.abs(values) < _LARGEST_PX).all():
        expected = f"expected {len(_LANDMARKS)} numbers"
        raise UserError(f"{row.where}: {str(list(row.landmarks))[:80]} are no landmarks; {expected}. Mend it.")
    return values.reshape(-1, 2).astype(np.float32)


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
