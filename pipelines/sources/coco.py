"""Keypoints of hands in COCO's JSON format.

Lin et al., "Microsoft COCO: Common Objects in Context", 2014; the format is that of cocodataset.org, "Data format".
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers, file_name, parse_json
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.box_check import image_sizes_px, spread
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.subsets import hash_of_name, refuse_key, rows_of_split
from peclr_dali.pipelines.sources.boxes import refuse_boxes, squares_around
from peclr_dali.pipelines.sources.label_files import coco_annotations, dataset_file, require_widths
from peclr_dali.skeleton import FINGERS, HAND, THUMB_IN_ANATOMY

ANNOTATIONS: Final = "annotations.json"
"""The file to read if `data.annotations` is not set."""

_MMPOSE_FINGERS: Final = ("thumb", "forefinger", "middle_finger", "ring_finger", "pinky_finger")
_MMPOSE: Final = {
    f"{theirs}{number}": f"{ours}_{joint}"
    for theirs, ours in zip(_MMPOSE_FINGERS, FINGERS, strict=True)
    for number, joint in enumerate(("mcp", "pip", "dip", "tip"), start=1)
}
"""Names of keypoints in MMPose's datasets of hands, and ours."""

_LARGEST_PX: Final = 1e7
"""Keypoints lie in the image or near it."""

_LOOKED_AT: Final = 8
"""Number of images whose size is read."""


def load_coco(config: DataConfig) -> Index:
    """Read all hands with a labelled keypoint, in the order of the file; crowds are left out.

    COCO's keypoints are whole pixels, so half a pixel is added: the index is corner-based. An image's `file_name` is
    relative to `data.root`.

    Returns:
        The index; an image is a group. The box is the square around the annotation's box, or around its keypoints if it
        has none. Without a box, an annotation of a single keypoint is left out: it does not say how large a hand is.

    Raises:
        UserError: the file is missing or does not fit the format, or has no labelled keypoint; a part is chosen.
    """
    refuse_boxes(config, "COCO's annotations hold the boxes")
    refuse_key(config, "part", "COCO's annotations have no parts, but data.split and data.annotations")
    root = Path(config.root)
    file = root / (config.annotations or ANNOTATIONS)
    expected = "keypoints in COCO's JSON format"
    with dataset_file(file, expected, "Check data.root and data.annotations, or mend the file.") as path:
        content = parse_json(path.read_bytes())
        order = _order_of_keypoints(file, content["categories"])
        hands = [
            (image, one["keypoints"], one.get("bbox") or [0, 0, 0, 0])
            for where, one, image in coco_annotations(file, content)
            if not int(one.get("iscrowd") or 0) and any(float(v) > 0 for v in _keypoints(where, one)[2::3])
        ]
        path_of = {image["id"]: _stored_name(root, image["file_name"].removeprefix("./")) for image, *_ in hands}
    if not hands:
        raise UserError(f"{file}: no annotation has a labelled keypoint. Set data.annotations to another file.")
    images, labels, boxes = zip(*hands, strict=True)
    values, box = as_numbers(labels), as_numbers(boxes)
    if values is None or values.shape[1:] != (3 * len(HAND),) or box is None or box.shape[1:] != (4,):
        numbers = f"{3 * len(HAND)} numbers in keypoints and 4 in bbox"
        raise UserError(f"{file}: expected {numbers} of each annotation. Mend the file.")
    if not (np.abs(values) < _LARGEST_PX).all():
        raise UserError(f"{file}: has keypoints that are not finite or farther than {_LARGEST_PX:g} px. Mend them.")
    points = values.reshape(len(hands), len(HAND), 3)[:, order]
    keypoints_px = np.where(points[..., 2:] > 0, points[..., :2] + 0.5, np.nan)
    boxed = (box[:, 2:] > 0).all(axis=1, keepdims=True)
    low = np.where(boxed, box[:, :2], np.nanmin(keypoints_px, axis=1))
    high = np.where(boxed, box[:, :2] + box[:, 2:], np.nanmax(keypoints_px, axis=1))
    sized = np.flatnonzero((high > low).any(axis=1))
    index = Index(
        name="coco",
        root=root,
        paths=[path_of[image["id"]] for image in images],
        box_px=squares_around(low, high),
        keypoints_px=keypoints_px.astype(np.float32),
        group=np.array([hash_of_name(path_of[image["id"]]) for image in images]),
    )
    _require_sizes(file, index, images, box)
    return index.select(sized[rows_of_split(index.groups[sized], config.split)])


def _keypoints(where: str, annotation: dict[str, Any]) -> list[Any]:
    """The keypoints of an annotation; a `UserError` if it has none, as one of another category may not."""
    if not isinstance(annotation.get("keypoints"), list):
        raise UserError(f"{where}: has no list of keypoints. Remove it, or use a file with keypoints of hands alone.")
    return list(annotation["keypoints"])


def _stored_name(root: Path, name: str) -> str:
    """The name of an image as the disk has it, which may be in another form of Unicode."""
    forms = [file_name(name)]
    if not name.isascii():
        forms += [unicodedata.normalize("NFC", name), unicodedata.normalize("NFD", name)]
        forms = [form for form in forms if (root / form).exists()] or forms
    return forms[0]


def _require_sizes(file: Path, index: Index, images: Sequence[dict[str, Any]], box: npt.NDArray[np.float64]) -> None:
    """Raise a `UserError` if a few images have other sizes than the file says, or boxes that are no x, y, w, h.

    Args:
        box: (N, 4), `bbox` of each annotation.
    """
    rows = spread(len(index), _LOOKED_AT)
    sizes_px = image_sizes_px(index.read, rows)
    require_widths(file, box[rows], sizes_px[:, ::-1])
    for row, (height, width) in zip(rows, sizes_px.tolist(), strict=True):
        said = [images[row].get(name) for name in ("width", "height")]
        numbers = as_numbers(said)  # NaN for what is not said
        if height and (numbers is None or ((numbers > 0).all() and {*numbers} != {width, height})):
            raise UserError(
                f"{index.path(row)} has {width} x {height} pixels, and {said[0]} x {said[1]} in {file}. Use images and "
                "annotations of one size."
            )


def _order_of_keypoints(file: Path, categories: list[dict[str, Any]]) -> list[int]:
    """The place in the file of each of a hand's keypoints, by their names in the file's one category with keypoints."""
    found = [list(map(str.lower, category["keypoints"])) for category in categories if category.get("keypoints")]
    for names in found if len(found) == 1 else []:
        known = dict(_MMPOSE)
        if "thumb_cmc" in names:
            known |= {anatomical: ours for ours, anatomical in THUMB_IN_ANATOMY.items()}
        ours = [known.get(name, name) for name in names]
        if sorted(ours) == sorted(HAND.keypoints):
            return [ours.index(name) for name in HAND.keypoints]
    raise UserError(
        f"{file}: its categories have the keypoints {str(found)[:120]}; expected one category, with those of a hand: "
        f"{', '.join(HAND.keypoints)}. Rename them."
    )
