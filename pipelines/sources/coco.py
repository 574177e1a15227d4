"""Keypoints of hands in COCO's JSON format."""

import logging
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers, parse_json
from peclr_dali.pipelines.arrays import DoubleArray
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.files.check import image_sizes_px, spread
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.subsets import OWN_HELD_OUT, hash_of_name, refuse_key, rows_of_split
from peclr_dali.pipelines.sources.boxes import Entries, coco_annotations, refuse_corners, squares_around
from peclr_dali.pipelines.sources.label_files.dataset_file import dataset_file
from peclr_dali.skeleton import FINGERS, HAND, THUMB_IN_ANATOMY

log = logging.getLogger(__name__)

ANNOTATIONS = "annotations.json"
"""The file to read if `data.annotations` is not set."""

_MMPOSE = {
    f"{theirs}{number}": f"{ours}_{joint}"
    for theirs, ours in zip(
        ("thumb", "forefinger", "middle_finger", "ring_finger", "pinky_finger"), FINGERS, strict=True
    )
    for number, joint in enumerate(("mcp", "pip", "dip", "tip"), start=1)
}
"""Names of keypoints in MMPose's datasets of hands, and ours."""


def load_coco(config: DataConfig) -> Index:
    """Read all hands with a labelled keypoint, in the order of the file; crowds are left out.

    Each category with keypoints is one of hands, with its own order. One with "left" in its name has left hands, which
    are mirrored. If there is one alone, annotations need not name it.

    COCO's keypoints are whole pixels, so half a pixel is added: the index is corner-based. An image's `file_name` is
    relative to `data.root`.

    Returns:
        The index; an image is a group. The box is the square around the annotation's box, or around its keypoints if it
        has none. Without a box, an annotation of a single keypoint is left out: it does not say how large a hand is.

    Raises:
        UserError: the file is missing, does not fit the format or has no hand; a part or a file of boxes is chosen.
    """
    refuse_key(config, "box", "COCO's annotations hold the boxes")
    refuse_key(config, "part", "COCO's annotations have no parts, but data.split and data.annotations")
    root = Path(config.root)
    file = root / (config.annotations or ANNOTATIONS)
    names, labels, is_left, bboxes, sizes_px, miscounted = list[str](), [], list[bool](), [], [], 0
    remedy = "Check data.root and data.annotations, or mend the file."
    with dataset_file(file, "keypoints in COCO's JSON format", remedy) as path:
        content = parse_json(path.read_bytes())
        hands = [category for category in content["categories"] if category.get("keypoints")]
        orders = _orders_of_keypoints(file, [category["keypoints"] for category in hands])
        listed = Entries([category.get("id") for category in hands], file, "categories of hands")
        for place, entry, name, size_px in coco_annotations(file, content):
            keypoints, bbox = _numbers(place, entry)
            kind = listed.row(entry.get("category_id"), place) if len(hands) > 1 or "category_id" in entry else 0
            count = int((keypoints[:, 2] > 0).sum())
            miscounted += entry.get("num_keypoints") not in (None, count)
            if count:
                names.append(name)
                labels.append(keypoints[orders[kind]])
                is_left.append("left" in str(hands[kind].get("name")).lower())
                bboxes.append(bbox)
                sizes_px.append(size_px)
    if not names:
        raise UserError(f"{file}: no annotation has a keypoint with v > 0; expected hands. Give another file.")
    log.info(
        "%s: %d hands, %d of them left, of %d annotations", file, len(names), sum(is_left), len(content["annotations"])
    )
    if miscounted:
        log.warning("%s: num_keypoints of %d annotations is not the number of keypoints with v > 0", file, miscounted)
    points, bbox, size_px = np.array(labels).reshape(-1, len(HAND), 3), np.reshape(bboxes, (-1, 4)), np.array(sizes_px)
    keypoints_px = np.where(points[..., 2:] > 0, points[..., :2] + 0.5, np.nan)
    boxed = (bbox[:, 2:] > 0).all(axis=1, keepdims=True)
    low = np.where(boxed, bbox[:, :2], np.fmin.reduce(keypoints_px, axis=1))
    high = np.where(boxed, bbox[:, :2] + bbox[:, 2:], np.fmax.reduce(keypoints_px, axis=1))
    sized = np.flatnonzero((high > low).any(axis=1))
    path_of = {name: _stored_name(root, name) for name in dict.fromkeys(names)}
    paths = [path_of[name] for name in names]
    index = Index(
        name="coco",
        root=root,
        paths=paths,
        box_px=squares_around(low, high),
        keypoints_px=keypoints_px.astype(np.float32),
        mirror=np.array(is_left, bool),
        group=np.array([hash_of_name(path) for path in paths], np.int64),
        label_file=str(file),
        labelled_size_px=size_px.astype(np.float32).reshape(-1, 2),
    )
    looked_at = spread(len(index), 8)
    refuse_corners(file, bbox[looked_at], image_sizes_px(index.read, looked_at)[:, ::-1])
    return index.select(sized[rows_of_split(index.groups[sized], config.split, least=OWN_HELD_OUT)])


def _numbers(place: str, entry: dict[str, Any]) -> tuple[DoubleArray, DoubleArray]:
    """The keypoints (21, 3) of an annotation, x, y and visibility, and its box (4,), zeros if it has none."""
    keypoints, bbox = as_numbers(entry.get("keypoints")), as_numbers(entry.get("bbox") or [0, 0, 0, 0])
    if (
        keypoints is None
        or keypoints.shape != (3 * len(HAND),)
        or not (np.abs(keypoints) < 1e7).all()
        or bbox is None
        or bbox.shape != (4,)
        or not (np.abs(bbox) < 1e7).all()
        or (bbox[2:] < 0).any()
    ):
        raise UserError(
            f"{place}: keypoints are {str(entry.get('keypoints'))[:80]}, bbox {str(entry.get('bbox'))[:80]}; expected "
            f"{3 * len(HAND)} finite numbers, and 4 in bbox: x, y, width, height. Mend it, remove it, or use a file of "
            "hands alone."
        )
    return keypoints.reshape(len(HAND), 3), bbox


def _stored_name(root: Path, name: str) -> str:
    """The name of an image as the disk has it, which may be in another form of Unicode."""
    name = name.removeprefix("./")
    if name.isascii():
        return name
    forms = [name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD"))]
    return next((form for form in forms if (root / form).exists()), name)


def _orders_of_keypoints(file: Path, categories: list[list[str]]) -> list[list[int]]:
    """The place of each of a hand's keypoints in the categories, by the names of their keypoints."""
    orders = []
    for names in [list(map(str.lower, category)) for category in categories]:
        known = dict(_MMPOSE)
        if "thumb_cmc" in names:
            known |= {anatomical: ours for ours, anatomical in THUMB_IN_ANATOMY.items()}
        ours = [known.get(name, name) for name in names]
        if sorted(ours) == sorted(HAND.keypoints):
            orders.append([ours.index(name) for name in HAND.keypoints])
    if not orders or len(orders) < len(categories):
        raise UserError(
            f"{file}: its categories have the keypoints {str(categories)[:120]}; expected those of a hand in each: "
            f"{', '.join(HAND.keypoints)}. Rename them, or use a file of hands alone."
        )
    return orders
