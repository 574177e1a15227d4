"""Reads boxes from a user's CSV or JSON file, as squares for the data path."""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from errors import UserError
from parsing import as_numbers, parse_json, regular
from pipelines.config import DataConfig, box_file
from pipelines.samples.index import WHOLE_IMAGE, Index
from skeleton import HAND

_COLUMNS: Final = ("file", "x0", "y0", "x1", "y1")
_WITH_CONFIDENCE: Final = (*_COLUMNS, "hand", "confidence")
_LANDMARKS: Final = tuple(f"{name}_{axis}" for name in HAND.keypoints for axis in "xy")
_HEADERS: Final = (_COLUMNS, _WITH_CONFIDENCE[:-1], _WITH_CONFIDENCE, (*_WITH_CONFIDENCE, *_LANDMARKS))
_WITHOUT_A_BOX: Final = ("none", "unreadable")
_LARGEST_PX: Final = 1e7
"""Landmarks lie in the image or near it."""
_HANDS: Final = ("left", "right", *_WITHOUT_A_BOX)

_log = logging.getLogger(__name__)


class _Row(NamedTuple):
    """A row, not checked yet. `where`: its position, for messages. `hand` is None in all rows of a file without hands,
    `landmarks` in all rows of a file without landmarks."""

    where: str
    name: object
    edges: Sequence[object]
    hand: object
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
    images, edges_px, left = list[int](), list[npt.NDArray[np.float64]](), list[bool]()
    landmarks_px = list[npt.NDArray[np.float32]]()
    seen, hands_seen, again = set[int](), set[tuple[object, ...]](), list[str]()
    with_hands = False
    for where, name, edges, hand, landmarks in _rows(file):
        with_hands = hand is not None
        row = row_of.get(name.removeprefix("./")) if isinstance(name, str) else None
        if row is None:
            raise UserError(
                f"{file}, {where}: there is no image {_text(name)}; names are relative to the source's folder, "
                f"such as {names[0]!r}. Mend the name or remove the box."
            )
        if row in seen and not with_hands:
            raise UserError(
                f"{file}, {where}: a second box for {name!r}; an image has one hand, unless the file has a column "
                "'hand'. Remove one of them."
            )
        seen.add(row)
        if with_hands and hand not in _HANDS:
            raise UserError(f"{file}, {where}: hand is {_text(hand)}; expected {', '.join(_HANDS)}. Mend this row.")
        if hand in _WITHOUT_A_BOX:
            if any(edge not in ("", None) for edge in edges):
                raise UserError(
                    f"{file}, {where}: hand is {hand!r}, and the box is {_text(list(edges))}; expected no box there. "
                    "Remove the box, or write left or right."
                )
            continue
        box_px = as_numbers(edges)
        if box_px is None or box_px.shape != (4,) or not np.isfinite(box_px).all() or (box_px[2:] <= box_px[:2]).any():
            raise UserError(
                f"{file}, {where}: {_text(list(edges))} is not a box; expected four numbers x0, y0, x1, y1 in pixels "
                "with x0 < x1 and y0 < y1. Mend this box."
            )
        one_hand = row, hand, *box_px.tolist()
        if one_hand in hands_seen:
            again.append(where)
            continue
        hands_seen.add(one_hand)
        if landmarks is not None:
            landmarks_px.append(_landmarks_px(landmarks, f"{file}, {where}"))
        images.append(row)
        edges_px.append(box_px)
        left.append(hand == "left")
    if not images:
        raise UserError(f"{file}: holds no box. Add boxes, or leave data.box out to use whole images.")
    if again:
        _log.warning("%s, %s: the same hand as in a row before; %d such rows are left out", file, again[0], len(again))
    image, edges_of = np.array(images, np.int64), np.array(edges_px)
    order = np.argsort(image, kind="stable")
    boxes_px = squares_around(edges_of[:, :2], edges_of[:, 2:])[order]
    return Boxes(
        image[order],
        boxes_px,
        np.array(left)[order] if with_hands else None,
        np.array(landmarks_px)[order] if landmarks_px else None,
    )


def boxes_of_images(file: Path, names: Sequence[str]) -> npt.NDArray[np.float32]:
    """Read one square for each image of a source that shows one known hand in each; see `with_whole_images`.

    Raises:
        UserError: as for `read_boxes`, or an image has several boxes.
    """
    boxes = read_boxes(file, names)
    if (again := np.flatnonzero(np.diff(boxes.image) == 0)).size:
        raise UserError(
            f"{file}: several boxes for {names[boxes.image[again[0]]]!r}; this source has one hand in an image. "
            "Keep one of them, or read the images with data.source = 'folder'."
        )
    return with_whole_images(boxes, file, names)


def with_boxes(index: Index, file: Path) -> Index:
    """An index of whole images with the boxes of a file.

    If the file says which hand a box shows, each of its hands is a sample, left ones are mirrored, images without a
    hand are left out, and landmarks become keypoints. Otherwise an image without a box is used whole.

    Raises:
        UserError: as for `read_boxes`.
    """
    boxes = read_boxes(file, index.paths)
    if boxes.mirror is None:
        return replace(index, box_px=with_whole_images(boxes, file, index.paths))
    shown = len(np.unique(boxes.image))
    if shown < len(index):
        _log.info(
            "%s: %d hands in %d of %d images; images without a hand are left out",
            file, len(boxes.image), shown, len(index),
        )  # fmt: skip
    hands = index.select(boxes.image)
    return replace(hands, box_px=boxes.box_px, mirror=boxes.mirror, group=boxes.image, keypoints_px=boxes.keypoints_px)


def with_whole_images(boxes: Boxes, file: Path, names: Sequence[str]) -> npt.NDArray[np.float32]:
    """One square for each image, (N, 3), in the order of `names`; `WHOLE_IMAGE` for an image without a box.

    One line is logged about images without a box.
    """
    boxes_px = np.tile(np.array(WHOLE_IMAGE, np.float32), (len(names), 1))
    boxes_px[boxes.image] = boxes.box_px
    without = np.setdiff1d(np.arange(len(names)), boxes.image)
    if len(without):
        told = f"{len(without)} of {len(names)} images ({names[without[0]]} the first)"
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
    lines = csv.reader(text.splitlines())
    try:
        header = tuple(cell.strip() for cell in next(lines, []))
        if header not in _HEADERS:
            place = next((n for n, pair in enumerate(zip(header, _HEADERS[-1], strict=False)) if pair[0] != pair[1]), 0)
            wrong = f"; column {place + 1} is {header[place][:40]!r}" if place else ""
            raise UserError(
                f"{file}: line 1 is {','.join(header)[:80]!r}{wrong}; expected the header {','.join(_COLUMNS)!r}, with "
                "or without hand, confidence and all columns of landmarks. Columns are separated by commas, edges are "
                "in pixels. Write this header, and the boxes below it."
            )
        for cells in lines:
            if cells:
                name, *others = cells[0], *(cell.strip() for cell in cells[1:])  # a name may begin with a space
                surplus = others[len(header) - 1 :]
                hand = "".join(others[4:5]) if "hand" in header else None
                landmarks = others[6 : len(header) - 1] if header[-1] in _LANDMARKS else None
                yield _Row(f"line {lines.line_num}", name, [*others[:4], *surplus], hand, landmarks)
    except csv.Error as error:
        raise UserError(f"{file}, line {lines.line_num}: not CSV ({error}). Mend this line.") from error


def _json_rows(file: Path, text: str) -> Iterator[_Row]:
    try:
        content = parse_json(text, unique_keys=True)
    except ValueError as error:
        raise UserError(f"{file}: not JSON ({error}). Mend the file of boxes.") from error
    if isinstance(content, dict):
        for number, (name, edges) in enumerate(content.items(), start=1):
            yield _Row(f"entry {number} ({_text(name)})", name, edges if isinstance(edges, list) else [edges], None)
    elif isinstance(content, list):
        hands = any(isinstance(entry, dict) and "hand" in entry for entry in content)
        for number, entry in enumerate(content, start=1):
            if not isinstance(entry, dict) or not entry.keys() >= set(_COLUMNS):
                raise UserError(
                    f"{file}, entry {number}: expected an object with the keys {', '.join(_COLUMNS)}, "
                    f"found {_text(entry)}. Mend this entry."
                )
            hand = (entry.get("hand") or "") if hands else None
            yield _Row(f"entry {number}", entry["file"], [entry[key] for key in _COLUMNS[1:]], hand)
    else:
        raise UserError(
            f'{file}: expected {{"hand.jpg": [x0, y0, x1, y1], ...}} or a list of objects, found {text[:40]!r}. '
            "Write the boxes in one of these forms."
        )


def _landmarks_px(cells: Sequence[str], where: str) -> npt.NDArray[np.float32]:
    """The landmarks of a hand, (21, 2); NaN if there are none, as in a row that was added by hand."""
    values = as_numbers(cells) if any(cells) else np.full(len(_LANDMARKS), np.nan)
    if values is None or values.shape != (len(_LANDMARKS),) or (any(cells) and not _are_pixels(values)):
        raise UserError(
            f"{where}: {len(cells)} cells for landmarks, {_text(list(cells))}; expected {len(_LANDMARKS)} numbers. "
            "Mend this row, or find the boxes again."
        )
    return values.reshape(-1, 2).astype(np.float32)


def _are_pixels(values: npt.NDArray[np.float64]) -> bool:
    return bool((np.abs(values) < _LARGEST_PX).all())


def _text(value: object) -> str:
    """A value as text for messages."""
    try:
        text = repr(value)
    except RecursionError:
        text = "lists in lists"
    return text if len(text) <= 80 else f"{text[:80]}..."
