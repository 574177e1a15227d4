"""Reads boxes from a user's CSV or JSON file, as squares for the data path."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers, file_name, parse_json
from peclr_dali.pipelines.config import DataConfig, box_file
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index
from peclr_dali.pipelines.sources.label_files import (
    LEAST_FOCAL_PX,
    coco_annotations,
    csv_rows,
    dataset_file,
    plain_name,
    project_px,
    require_metres,
    require_widths,
)
from peclr_dali.skeleton import HAND

_COLUMNS: Final = ("file", "x0", "y0", "x1", "y1")
_LABELS: Final = {
    "keypoints_px": tuple(f"{name}_{axis}" for name in HAND.keypoints for axis in "xy"),
    "xyz_m": tuple(f"{name}_{axis}_m" for name in HAND.keypoints for axis in "xyz"),
    "camera_px": ("fx", "fy", "cx", "cy"),
}
"""The columns of what a CSV may say of a hand besides its box."""

_WITHOUT_BOX: Final = ("none", "unreadable")
_HANDS: Final = ("left", "right", *_WITHOUT_BOX)
_LARGEST: Final = 1e7
"""Landmarks lie in the image or near it."""

_FARTHEST_APART: Final = 0.15
"""Of most hands: largest mean distance of landmarks from projected joints, in sides of the box."""

_log = logging.getLogger(__name__)


class _Row(NamedTuple):
    """A row, not checked yet. `hand` is None in all rows of a file without hands; `labels` has those of its columns."""

    where: str
    name: str
    edges: Sequence[object]
    hand: str | None
    labels: Mapping[str, Sequence[str]] = {}


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
        labels: float32, NaN where a row has none, for those for which the file has columns: "keypoints_px" (M, 42),
            x and y of each of the 21 keypoints; "xyz_m" (M, 63), the same in metres in the camera's frame; and
            "camera_px" (M, 4), focal lengths and centre: fx, fy, cx, cy.
    """

    image: npt.NDArray[np.int64]
    box_px: npt.NDArray[np.float32]
    mirror: npt.NDArray[np.bool_] | None
    labels: Mapping[str, npt.NDArray[np.float32]] = {}


def read_boxes(file: Path, names: Sequence[str]) -> Boxes:
    """Read the boxes of a file.

    A CSV has a header with the columns file, x0, y0, x1, y1, and maybe hand, the landmarks, as tools/find_boxes.py
    writes them, 3D joints and the camera (see `_LABELS`); other columns are not read. Edges are in pixels of the image
    as displayed (EXIF orientation applied), corner-based. With "hand", each row is a hand, "left" or "right", and an
    image may have several; a row with "none" or "unreadable" has no box. The same box of the same hand counts once.

    A JSON file is in COCO's format: each annotation's `bbox` is a hand, a left one if the name of its category
    has "left" in it.

    Args:
        names: (N,) the images' names in the file: relative to the source's folder, with "/".

    Raises:
        UserError: the file is missing or unreadable or has no box of these images, a box is invalid, or it is a second
            one without "hand".
    """
    read = {".csv": _csv_rows, ".json": _coco_rows}.get(file.suffix.lower())
    if read is None:
        raise UserError(
            f"data.box = {str(file)!r}: expected a .csv or .json file of boxes, or 'center'; 'joints' is for sources "
            "with keypoints."
        )
    row_of = {plain_name(name): row for row, name in enumerate(names)}
    found: dict[object, tuple[int, bool, npt.NDArray[np.float64], dict[str, npt.NDArray[np.float32]]]] = {}
    absent, repeated, has_hands = list[str](), 0, False
    with dataset_file(file, "boxes as CSV, or in COCO's JSON format", "Mend it, or give the path of another file."):
        for row in read(file):
            has_hands, image = row.hand is not None, row_of.get(plain_name(row.name))
            if image is None:
                absent.append(f"{row.where}: there is no image {row.name[:80]!r}")
                continue
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
            numbers = {name: _numbers(row.where, name, cells) for name, cells in row.labels.items()}
            found.setdefault(key, (image, row.hand == "left", edges_px, numbers))
    if absent and not found:
        raise UserError(f"{absent[0]}; names are relative to the source's folder, such as {names[0]!r}. Mend them.")
    if absent:
        _log.warning("%d boxes of absent images are left out, the first: %s", len(absent), absent[0])
    if not found:
        raise UserError(f"{file}: holds no box. Add boxes, or leave data.box out to use whole images.")
    if repeated:
        _log.warning("%s: %d rows repeat a hand of a row before, and are left out", file, repeated)
    in_order = sorted(found.values(), key=lambda one: one[0])
    images, left, edges, labels = zip(*in_order, strict=True)
    return Boxes(
        np.array(images, np.int64),
        squares_around(np.array(edges)[:, :2], np.array(edges)[:, 2:]),
        np.array(left) if has_hands else None,
        {name: np.array([of_hand[name] for of_hand in labels]) for name in labels[0]},
    )


def column_of(file: Path, column: str) -> dict[str, str] | None:
    """A column of a CSV for `read_boxes`, such as the person: image (`plain_name`) -> text; None if there is none."""
    if file.suffix.lower() != ".csv":
        return None
    found: dict[str, str] = {}
    for where, row in csv_rows(file, _COLUMNS):
        if column.lower() not in row:
            return None
        if found.setdefault(plain_name(row["file"]), row[column.lower()]) != row[column.lower()]:
            raise UserError(f"{where}: another {column!r} for a hand of the same image; expected one for each image.")
    return found


def _csv_rows(file: Path) -> Iterator[_Row]:
    kinds: list[str] | None = None
    for where, row in csv_rows(file, _COLUMNS):
        kinds = _kinds_of_labels(file, row) if kinds is None else kinds
        edges = [row[column] for column in _COLUMNS[1:]]
        labels = {name: [row[column].strip() for column in _LABELS[name]] for name in kinds}
        yield _Row(where, row["file"], edges, row["hand"].strip() if "hand" in row else None, labels)


def _kinds_of_labels(file: Path, columns: Collection[str]) -> list[str]:
    for labels in _LABELS.values():
        missing = [column for column in labels if column not in columns]
        if 0 < len(missing) < len(labels):
            found = f"{file}: line 1 lacks the column {missing[0]!r}"
            raise UserError(f"{found}; expected all from {labels[0]} to {labels[-1]}, or none. Mend it.")
    return [name for name, labels in _LABELS.items() if labels[0] in columns]


def _coco_rows(file: Path) -> Iterator[_Row]:
    content = parse_json(file.read_bytes())
    boxes, sizes_px = [], []
    categories = content.get("categories", [])
    category_of = {str(one["id"]).removesuffix(".0"): str(one["name"]) for one in categories}
    if len(category_of) < len(categories):
        raise UserError(f"{file}: several categories have the same id; expected each once. Give them ids of their own.")
    for where, one, image in coco_annotations(file, content):
        if int(one.get("iscrowd") or 0):
            continue
        box = as_numbers(one["bbox"])
        if box is None or box.shape != (4,):
            raise UserError(f"{where}: bbox is {str(one['bbox'])[:80]}; expected the numbers x, y, width, height.")
        x, y, width, height = box.tolist()
        boxes.append(box)
        size_px = as_numbers([image.get("width"), image.get("height")])  # NaN for what is not said
        sizes_px.append([math.nan, math.nan] if size_px is None else size_px)
        category = str(one.get("category_id")).removesuffix(".0")
        if category_of and category not in category_of:
            raise UserError(f"{where}: no category has the id {category[:80]!r}, so left or right is unknown. Mend it.")
        hand = "left" if "left" in category_of.get(category, "").lower() else "right"
        yield _Row(where, file_name(image["file_name"]), (x, y, x + width, y + height), hand)
    if boxes:
        require_widths(file, np.array(boxes), np.array(sizes_px))


def _box_px(row: _Row) -> npt.NDArray[np.float64]:
    """The edges x0, y0, x1, y1 of a row, (4,)."""
    box_px = as_numbers(row.edges)
    if box_px is None or not np.isfinite(box_px).all() or (box_px[2:] <= box_px[:2]).any():
        raise UserError(
            f"{row.where}: {str(list(row.edges))[:80]} is not a box; expected x0, y0, x1, y1 in pixels with x0 < x1 "
            "and y0 < y1. Mend this row."
        )
    return box_px


def _numbers(where: str, name: str, cells: Sequence[str]) -> npt.NDArray[np.float32]:
    """The numbers of a hand's labels, all NaN if it has none, as in a row that was added by hand."""
    if not any(cells):
        return np.full(len(cells), np.nan, np.float32)
    values = as_numbers(cells)
    if values is None or not (np.abs(values) < _LARGEST).all():
        columns = f"{_LABELS[name][0]} to {_LABELS[name][-1]}"
        raise UserError(f"{where}: {str(list(cells))[:80]}; expected {len(cells)} numbers in {columns}. Mend it.")
    return values.astype(np.float32)


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
    hand are left out, and landmarks become keypoints. Otherwise an image without a box is used whole. 3D joints become
    the targets "xyz_m" and "K"; without landmarks, their projections are the keypoints.

    Raises:
        UserError: as for `read_boxes`; keypoints without hands, 3D joints without a camera, behind it or not in metres.
    """
    boxes = read_boxes(file, index.paths)
    if boxes.mirror is None and boxes.labels:
        raise UserError(f"{file}: has keypoints and no column 'hand'; expected left or right there. Add the column.")
    if boxes.mirror is None:
        return replace(index, box_px=_with_whole_images(boxes, file, index.paths))
    images, left = len(np.unique(boxes.image)), np.count_nonzero(boxes.mirror)
    found = f"{len(boxes.image)} hands, {left} of them left, in {images} of {len(index)} images"
    _log.info("%s: %s%s", file, found, "; images without a hand are left out" if images < len(index) else "")
    hands = replace(index, group=index.groups).select(boxes.image)  # those of an image stay together
    hands = replace(hands, box_px=boxes.box_px, mirror=boxes.mirror)
    keypoints_px, xyz_m = boxes.labels.get("keypoints_px"), boxes.labels.get("xyz_m")
    if keypoints_px is not None:
        hands = replace(hands, keypoints_px=keypoints_px.reshape(-1, len(HAND), 2))
    if xyz_m is None:
        return hands
    xyz_m, cameras = xyz_m.reshape(-1, len(HAND), 3), _cameras(boxes.labels.get("camera_px"), len(hands))
    _require_joints(file, xyz_m, cameras)
    projected_px = project_px(cameras.astype(np.float64), xyz_m.astype(np.float64)).astype(np.float32)
    if keypoints_px is None:
        hands = replace(hands, keypoints_px=projected_px)
    else:
        _require_agreement(file, hands, projected_px)
    return replace(hands, targets={"K": cameras, "xyz_m": xyz_m})


def _cameras(camera_px: npt.NDArray[np.float32] | None, hands: int) -> npt.NDArray[np.float32]:
    """Camera matrices (M, 3, 3) from fx, fy, cx, cy (M, 4); NaN where a hand has none."""
    cameras = np.zeros((hands, 3, 3), np.float32)
    cameras[:, 2, 2] = 1
    cameras[:, [0, 1, 0, 1], [0, 1, 2, 2]] = np.nan if camera_px is None else camera_px
    return cameras


def _require_joints(file: Path, xyz_m: npt.NDArray[np.float32], cameras: npt.NDArray[np.float32]) -> None:
    known = ~np.isnan(xyz_m[:, 0, 0])
    if not (cameras[known][:, [0, 1], [0, 1]] >= LEAST_FOCAL_PX).all() or np.isnan(cameras[known]).any():
        found = f"{file}: 3D joints without a camera, or with a focal length below {LEAST_FOCAL_PX:g} px"
        raise UserError(f"{found}; expected fx, fy, cx, cy in pixels in the same row. Add or mend them.")
    if (xyz_m[known, :, 2] <= 0).any():
        raise UserError(f"{file}: 3D joints behind the camera; expected x right, y down, z forward. Mend the labels.")
    require_metres(file, xyz_m[known].astype(np.float64))


def _require_agreement(file: Path, hands: Index, projected_px: npt.NDArray[np.float32]) -> None:
    """Refuse joints whose projections (M, K, 2) are further from the landmarks than half of the box, in the mean."""
    assert hands.keypoints_px is not None
    apart_px = np.linalg.norm(hands.keypoints_px - projected_px, axis=2).mean(axis=1)  # NaN where one is unknown
    if (far := np.flatnonzero(apart_px > hands.box_px[:, 2] / 2)).size:
        found = f"{file}: the 3D joints of {hands.paths[far[0]]!r} are {apart_px[far[0]]:.0f} px from its landmarks"
        raise UserError(f"{found} in the picture; expected the same points. Mend the joints, fx, fy, cx and cy.")
    usual = float(np.nanmedian(apart_px / hands.box_px[:, 2])) if np.isfinite(apart_px).any() else 0.0
    if usual > _FARTHEST_APART:
        found = f"{file}: of half of the hands, 3D joints and landmarks are {usual:.2f} of the box's side apart or more"
        raise UserError(f"{found}; expected the same points in the same order, from the wrist on. Mend the columns.")


def _with_whole_images(boxes: Boxes, file: Path, names: Sequence[str]) -> npt.NDArray[np.float32]:
    boxes_px = np.tile(np.array(WHOLE_IMAGE, np.float32), (len(names), 1))
    boxes_px[boxes.image] = boxes.box_px
    without = np.setdiff1d(np.arange(len(names)), boxes.image)
    if len(without):
        counts = f"{len(without)} of {len(names)} images ({names[without[0]]} the first)"
        _log.warning("%s: no box for %s; for these, the whole image is used", file, counts)
    return boxes_px
