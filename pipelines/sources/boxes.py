"""Reads boxes of hands, as squares for the data path: of a user's CSV file, or annotations in COCO's JSON format."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers, parse_json
from peclr_dali.pipelines.arrays import BoolArray, DoubleArray, FloatArray, IntArray
from peclr_dali.pipelines.samples.index import WHOLE_IMAGE, Index, project_px, squares_around
from peclr_dali.pipelines.sources.coco import coco_annotations, refuse_corners
from peclr_dali.pipelines.sources.label_files.dataset_file import Entries, csv_rows, dataset_file, plain_name
from peclr_dali.skeleton import HAND

_COLUMNS = ("file", "x0", "y0", "x1", "y1")
# The columns of what a CSV may say of a hand besides its box.
_LABELS = {
    "keypoints_px": tuple(f"{name}_{axis}" for name in HAND.keypoints for axis in "xy"),
    "xyz_m": tuple(f"{name}_{axis}_m" for name in HAND.keypoints for axis in "xyz"),
    "camera_px": ("fx", "fy", "cx", "cy"),
}

_WITHOUT_BOX = ("none", "unreadable")
_HANDS = ("left", "right", *_WITHOUT_BOX)

_log = logging.getLogger(__name__)


class _Row(NamedTuple):
    """A row. `hand` is None in all rows of a file without hands; `labels` has those of its columns.

    Edges and labels are cells, or arrays of numbers once they are checked.

    `size_px` is the image's width and height, as far as the file says them.
    """

    place: str
    name: str
    edges: Any
    hand: str | None
    labels: Mapping[str, Any] = {}
    size_px: Any = (np.nan, np.nan)


class Boxes(NamedTuple):
    """The boxes of a file, in the order of their images; those of an image in the order of the file.

    Attributes:
        image: (M,) row of the image among the given names. With `mirror`, an image may have several boxes.
        edges_px: (M, 4), x0, y0, x1, y1.
        mirror: (M,) bool, left hands; None if the file has no column "hand".
        labels: float32, NaN where a row has none, for those for which the file has columns: "keypoints_px" (M, 42),
            x and y of each of the 21 keypoints; "xyz_m" (M, 63), the same in metres in the camera's frame; and
            "camera_px" (M, 4), focal lengths and centre: fx, fy, cx, cy.
        size_px: (M, 2) float32, width and height of the image as the file says, NaN for what it does not.
    """

    image: IntArray
    edges_px: DoubleArray
    mirror: BoolArray | None
    labels: Mapping[str, FloatArray]
    size_px: FloatArray

    @property
    def box_px(self) -> FloatArray:
        """(M, 3), centre x, centre y and side of the squares around the boxes."""
        return squares_around(self.edges_px[:, :2], self.edges_px[:, 2:])


def read_boxes(file: Path, names: Sequence[str], *, one_hand: bool = False) -> Boxes:
    """Read the boxes of a file.

    A CSV has a header with the columns file, x0, y0, x1, y1, and maybe hand, the landmarks, as tools/find_boxes.py
    writes them, 3D joints and the camera (see `_LABELS`); other columns are not read. Edges are in pixels of the image
    as displayed (EXIF orientation applied), corner-based. With "hand", each row is a hand, "left" or "right", and an
    image may have several; a row with "none" or "unreadable" has no box. The same box of the same hand counts once.

    A JSON file is in COCO's format: each annotation's `bbox` is a hand, a left one if the name of its category
    has "left" in it.

    Args:
        names: (N,) the images' names in the file: relative to the source's folder, with "/".
        one_hand: whether the source has one hand in an image.

    Raises:
        UserError: the file is missing or unreadable or has no box of these images, a box is invalid, or it is a second
            one of its image without "hand" or of a source with one hand.
    """
    read = {".csv": _csv_rows, ".json": _coco_rows}.get(file.suffix.lower())
    if read is None:
        raise UserError(
            f"data.box = {str(file)!r}: expected a .csv or .json file of boxes, or 'center'; 'joints' is for sources "
            "with keypoints."
        )
    row_of = {plain_name(name): row for row, name in enumerate(names)}
    boxes: dict[tuple[int, str | None, bytes], _Row] = {}
    absent, repeated, boxed, without, has_hands = list[str](), 0, set[int](), set[int](), False
    with dataset_file(file, "boxes as CSV, or in COCO's JSON format", "Mend it, or give the path of another file."):
        for row in read(file):
            has_hands, image = row.hand is not None, row_of.get(plain_name(row.name))
            if image is None:
                absent.append(f"{row.place}: there is no image {row.name[:80]!r}")
                continue
            if row.hand not in _HANDS and (has_hands or row.labels):
                hand = f"hand is {row.hand[:80]!r}" if row.hand is not None else "keypoints and no column 'hand'"
                raise UserError(f"{row.place}: {hand}; expected {', '.join(_HANDS)} there. Mend this row.")
            if row.hand in _WITHOUT_BOX:
                without.add(image)
                boxed |= {image} if any(row.edges) else set()
                continue
            edges_px, labels = _edges_px(row), {label: _numbers(row, label) for label in row.labels}
            key = (image, row.hand, edges_px.tobytes())
            if has_hands and key in boxes:
                if any(boxes[key].labels[label].tobytes() != numbers.tobytes() for label, numbers in labels.items()):
                    raise UserError(
                        f"{row.place}: other labels of a hand above; expected each hand once. Keep one row."
                    )
                repeated += 1
                continue
            if image in boxed and (one_hand or not has_hands):
                raise UserError(
                    f"{row.place}: a second box for {row.name!r}; expected one. Keep one of them, or if there are "
                    "several hands in an image, write left or right in a column 'hand' and set data.source = 'folder'."
                )
            boxed.add(image)
            boxes[key] = row._replace(edges=edges_px, labels=labels)
    if not boxes:
        raise UserError(
            f"{absent[0] if absent else f'{file}: holds no box'}; expected boxes of images such as {names[0]!r}, "
            "relative to the source's folder. Mend the names, or leave data.box out to use whole images."
        )
    if absent:
        _log.warning("%d boxes of absent images are left out, the first: %s", len(absent), absent[0])
    if both := len(without & boxed):
        _log.warning(
            "%s: %d images have a box and a row with %s, which is left out", file, both, " or ".join(_WITHOUT_BOX)
        )
    if repeated:
        _log.warning("%s: %d rows repeat a hand of a row before, and are left out", file, repeated)
    in_order = sorted(boxes, key=lambda key: key[0])
    rows = [boxes[key] for key in in_order]
    return Boxes(
        np.array([image for image, *_ in in_order], np.int64),
        np.array([row.edges for row in rows]),
        np.array([row.hand == "left" for row in rows]) if has_hands else None,
        {label: np.array([row.labels[label] for row in rows]) for label in rows[0].labels},
        np.array([row.size_px for row in rows], np.float32),
    )


def column_of(file: Path, column: str) -> dict[str, str] | None:
    """A column of a CSV for `read_boxes`, such as the person: image (`plain_name`) -> text; None if there is none."""
    if file.suffix.lower() != ".csv":
        return None
    found: dict[str, str] = {}
    for place, row in csv_rows(file, _COLUMNS, [[column.lower()]]):
        if column.lower() not in row:
            return None
        if found.setdefault(plain_name(row["file"]), row[column.lower()]) != row[column.lower()]:
            raise UserError(f"{place}: another {column!r} for a hand of the same image; expected one for each image.")
    return found


def _csv_rows(file: Path) -> Iterator[_Row]:
    for place, row in csv_rows(file, _COLUMNS, [*_LABELS.values(), ["hand"]]):
        labels = {
            name: [row[column].strip() for column in columns] for name, columns in _LABELS.items() if columns[0] in row
        }
        edges = [row[column] for column in _COLUMNS[1:]]
        yield _Row(place, row["file"], edges, row["hand"].strip() if "hand" in row else None, labels)


def _coco_rows(file: Path) -> Iterator[_Row]:
    content = parse_json(file.read_bytes())
    categories = content.get("categories", [])
    listed = Entries([category["id"] for category in categories], file, "categories")
    for place, entry, name, size_px in coco_annotations(file, content):
        category = categories[listed.row(entry.get("category_id"), place)]["name"] if categories else ""
        edges, bbox = entry.get("bbox"), as_numbers(entry.get("bbox"))
        if bbox is not None and bbox.shape == (4,):
            edges = [*bbox[:2].tolist(), *(bbox[:2] + bbox[2:]).tolist()]
        yield _Row(place, name, edges, "left" if "left" in str(category).lower() else "right", size_px=size_px)


def _edges_px(row: _Row) -> DoubleArray:
    """The edges x0, y0, x1, y1 of a row, (4,)."""
    edges_px = as_numbers(row.edges)
    if (
        edges_px is None
        or edges_px.shape != (4,)
        or not (np.abs(edges_px) < 1e7).all()
        or (edges_px[2:] <= edges_px[:2]).any()
    ):
        raise UserError(
            f"{row.place}: {str(row.edges)[:80]} is not a box; expected x0, y0, x1, y1 (in JSON x, y, width, height) "
            "in pixels, with x0 < x1 and y0 < y1. Mend this row."
        )
    return edges_px


def _numbers(row: _Row, label: str) -> FloatArray:
    """The numbers of a hand's labels, all NaN if it has none, as in a row that was added by hand."""
    cells, columns = row.labels[label], _LABELS[label]
    if not any(cells):
        return np.full(len(cells), np.nan, np.float32)
    values = as_numbers(cells)
    if values is None or not (np.abs(values) < 1e7).all():  # landmarks lie in the image or near it
        raise UserError(
            f"{row.place}: {str(list(cells))[:80]}; expected {len(cells)} numbers in {columns[0]} to {columns[-1]}, or "
            "none. Mend it."
        )
    return values.astype(np.float32)


def with_one_box_each(index: Index, file: Path, names: Sequence[str], rows: IntArray) -> Index:
    """The index of a source that shows one known hand in each image, with the boxes of a file.

    The box is `WHOLE_IMAGE` for an image without one; one warning counts these.

    Args:
        names: (M,) the images that may be in the file.
        rows: (N,) the image of each sample among them.

    Raises:
        UserError: as for `read_boxes`, or an image has several boxes.
    """
    boxes = read_boxes(file, names, one_hand=True)
    size_px, edges_px = np.full((len(names), 2), np.nan, np.float32), np.full((len(names), 4), np.nan)
    size_px[boxes.image], edges_px[boxes.image] = boxes.size_px, boxes.edges_px
    refuse_corners(file, edges_px[rows], replace(index, labelled_size_px=size_px[rows]))
    return replace(
        index,
        box_px=_with_whole_images(boxes, file, names)[rows],
        label_file=f"{index.label_file} {file}".strip(),
        labelled_size_px=size_px[rows],
    )


def with_boxes(index: Index, file: Path) -> Index:
    """An index of whole images with the boxes of a file.

    If the file says which hand a box shows, each of its hands is a sample, left ones are mirrored, images without a
    hand are left out, and landmarks become keypoints. Otherwise an image without a box is used whole. 3D joints become
    the targets "xyz_m" and "K", and their projections the keypoints of hands without landmarks.

    Raises:
        UserError: as for `read_boxes`.
    """
    boxes = read_boxes(file, index.paths)
    if boxes.mirror is None:
        _log.info("%s: no column 'hand', so no hand is taken for a left one", file)
        return replace(index, box_px=_with_whole_images(boxes, file, index.paths), label_file=str(file))
    images = len(np.unique(boxes.image))
    _log.info(
        "%s: %d hands, %d of them left, in %d of %d images%s",
        *(file, len(boxes.image), np.count_nonzero(boxes.mirror), images, len(index)),
        "; images without a hand are left out" if images < len(index) else "",
    )
    # The hands of an image stay together.
    hands = replace(replace(index, group=index.groups).select(boxes.image), labelled_size_px=boxes.size_px)
    refuse_corners(file, boxes.edges_px, hands)
    keypoints_px, targets = boxes.labels.get("keypoints_px"), {}
    if "xyz_m" in boxes.labels:
        xyz_m = boxes.labels["xyz_m"].reshape(-1, len(HAND), 3)
        cameras = np.zeros((len(xyz_m), 3, 3), np.float32)
        cameras[:, 2, 2] = 1
        cameras[:, [0, 1, 0, 1], [0, 1, 2, 2]] = boxes.labels.get("camera_px", np.nan)  # NaN where a hand has none
        targets = {"K": cameras, "xyz_m": xyz_m}
        given_px = np.nan if keypoints_px is None else keypoints_px.reshape(-1, len(HAND), 2)
        projected_px = project_px(cameras.astype(np.float64), xyz_m.astype(np.float64))
        keypoints_px = np.where(np.isnan(given_px), projected_px, given_px).astype(np.float32)
    return replace(
        hands,
        box_px=boxes.box_px,
        mirror=boxes.mirror,
        keypoints_px=None if keypoints_px is None else keypoints_px.reshape(-1, len(HAND), 2),
        targets=targets,
        label_file=str(file),
    )


def _with_whole_images(boxes: Boxes, file: Path, names: Sequence[str]) -> FloatArray:
    boxes_px = np.tile(np.array(WHOLE_IMAGE, np.float32), (len(names), 1))
    boxes_px[boxes.image] = boxes.box_px
    without = np.setdiff1d(np.arange(len(names)), boxes.image)
    if len(without):
        _log.warning(
            "%s: no box for %d of %d images (%s the first); for these, the whole image is used",
            *(file, len(without), len(names), names[without[0]]),
        )
    return boxes_px
