"""Hands in COCO's JSON format: its entries, and its keypoints as a source.

Lin et al., "Microsoft COCO: Common Objects in Context", 2014; the format is that of cocodataset.org, "Data format".
"""

import logging
import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers, file_name, parse_json
from peclr_dali.pipelines.arrays import DoubleArray
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.files.check import image_sizes_px, spread
from peclr_dali.pipelines.samples.index import Index, squares_around
from peclr_dali.pipelines.samples.subsets import OWN_HELD_OUT, hash_of_name, refuse_key, rows_of_split
from peclr_dali.pipelines.sources.label_files.dataset_file import Entries, dataset_file, plain_id, plain_name
from peclr_dali.skeleton import FINGERS, HAND, THUMB_IN_ANATOMY

log = logging.getLogger(__name__)

ANNOTATIONS = "annotations.json"
"""The file to read if `data.annotations` is not set."""

# Names of keypoints in MMPose's datasets of hands, and ours.
_MMPOSE = {
    f"{theirs}{number}": f"{ours}_{joint}"
    for theirs, ours in zip(
        ("thumb", "forefinger", "middle_finger", "ring_finger", "pinky_finger"), FINGERS, strict=True
    )
    for number, joint in enumerate(("mcp", "pip", "dip", "tip"), start=1)
}

_OF_A_HAND = ("image_id", "category_id", "bbox", "keypoints", "iscrowd")
_HAND = re.compile("hand|left|right", re.IGNORECASE)
_BOTH = re.compile("left.*(?<!up)right|(?<!up)right.*left", re.IGNORECASE)


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
    names, labels, is_left, bboxes, sizes_px = list[str](), [], list[bool](), [], []
    remedy = "Check data.root and data.annotations, or mend the file."
    with dataset_file(file, "keypoints in COCO's JSON format", remedy) as path:
        content = parse_json(path.read_bytes())
        hands = [category for category in content["categories"] if category.get("keypoints")]
        orders = _orders_of_keypoints(file, [category["keypoints"] for category in hands])
        listed = Entries([category.get("id") for category in hands], file, "categories of hands")
        for place, entry, name, size_px in coco_annotations(file, content):
            keypoints, bbox = _numbers(place, entry)
            kind = listed.row(entry.get("category_id"), place) if len(hands) > 1 or "category_id" in entry else 0
            if (keypoints[:, 2] > 0).any():
                names.append(name)
                labels.append(keypoints[orders[kind]])
                is_left.append("left" in str(hands[kind].get("name")).lower())
                bboxes.append(bbox)
                sizes_px.append(size_px)
    if not names:
        raise UserError(f"{file}: no annotation has a keypoint with v > 0; expected hands. Give another file.")
    log.info(
        "%s: %d hands, %d of them left, in %d of %d images; %d annotations",
        *(file, len(names), sum(is_left), len({*names}), len(content["images"]), len(content["annotations"])),
    )
    points, bbox, size_px = np.array(labels).reshape(-1, len(HAND), 3), np.reshape(bboxes, (-1, 4)), np.array(sizes_px)
    if odd := np.count_nonzero(~np.isin(points[..., 2], (1, 2)) & points.any(axis=2)):
        log.warning(
            "%s: of the labelled hands, %d keypoints have v = 0 and a place, or v that is not 0, 1 or 2 (a depth?); "
            "those with v > 0 are read, others are not",
            *(file, odd),
        )
    keypoints_px = np.where(points[..., 2:] > 0, points[..., :2] + 0.5, np.nan)
    boxed = (bbox[:, 2:] > 0).all(axis=1, keepdims=True)
    low = np.where(boxed, bbox[:, :2], np.fmin.reduce(keypoints_px, axis=1))
    high = np.where(boxed, bbox[:, :2] + bbox[:, 2:], np.fmax.reduce(keypoints_px, axis=1))
    sized = np.flatnonzero((high > low).any(axis=1))
    path_of = {name: _stored_name(root, name) for name in dict.fromkeys(names)}
    paths = [path_of[name] for name in names]
    if not any((root / path).exists() for path in paths):
        raise UserError(
            f"{file}: there is no image {paths[0][:80]!r} in {root}, nor another; expected names relative to it. Set "
            "data.root and data.annotations, or mend the names."
        )
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
    refuse_corners(file, np.where(boxed, np.concatenate([low, high], axis=1), np.nan), index)
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


def coco_annotations(file: Path, content: Any) -> Iterator[tuple[str, dict[str, Any], str, DoubleArray]]:
    """The annotations of a file but those of crowds and of repeated hands, in its order.

    Yields:
        Where it is, for messages; the annotation itself; the image's file name; and (2,) width and height of the image
        as the file says, NaN for what it does not.

    Raises:
        UserError: an annotation is of an image that the file does not list, several images have the same id, or a
            category is of left and right hands.
        Exception: the content has another form.
    """
    images, annotations = content["images"], content["annotations"]
    listed = Entries([image["id"] for image in images], file, "images")
    if len({plain_name(str(image.get("file_name"))) for image in images}) < len(images):
        log.warning("%s: several of its %d images have the same file_name; they are taken for one", file, len(images))
    categories = [str(category.get("name")) for category in content.get("categories", [])]
    used = {plain_id(entry.get("category_id")) for entry in annotations}
    kinds = [str(one.get("name")) for one in content.get("categories", []) if plain_id(one.get("id")) in used]
    if both := [name for name in kinds or categories if _BOTH.search(name)]:
        raise UserError(
            f"{file}: the name of a category is {both[0][:80]!r}, with left and right; expected one of "
            "them, or neither for right hands. Make two categories of it, or rename it."
        )
    if 0 < len(others := [name for name in kinds if not _HAND.search(name)]) < len(kinds):
        raise UserError(
            f"{file}: the name of a category is {others[0][:80]!r}, others say hand, left or right; expected hands "
            "alone. Remove its annotations, or rename it."
        )
    if not any("left" in name.lower() for name in categories) and (
        len(used) > 1 or any("left" in repr(entry).lower() for entry in [*annotations, *content.get("categories", [])])
    ):
        log.warning(
            "%s: no category is named left, so all hands are right ones; but there are several categories, or 'left' "
            "stands elsewhere in the file",
            file,
        )
    first = np.unique([hash(repr(list(map(entry.get, _OF_A_HAND)))) for entry in annotations], return_index=True)[1]
    if len(first) < len(annotations):
        log.warning("%s: %d annotations repeat others, and are left out", file, len(annotations) - len(first))
    for number in np.sort(first).tolist():
        entry = annotations[number]
        place = f"{file}, annotation {number}"
        row = listed.row(entry["image_id"], place)
        said = [images[row].get("width"), images[row].get("height")]
        size_px = as_numbers(said)  # NaN for None
        if size_px is None:
            raise ValueError(f"width and height of an image are {str(said)[:80]}")
        if bool in map(type, [*(entry.get("bbox") or []), *(entry.get("keypoints") or [])]):
            raise ValueError(f"annotation {number} has true or false in place of a number")
        if not int(entry.get("iscrowd") or 0):
            yield (place, entry, file_name(images[row]["file_name"]), size_px)


def refuse_corners(file: Path, edges_px: DoubleArray, index: Index) -> None:
    """Raise a `UserError` if most boxes x, y, width, height of a JSON file are rather the corners x0, y0, x1, y1.

    Then they end outside of their images, and could be corners. The sizes of a few images are read.

    Args:
        edges_px: (N, 4), x, y, x + width and y + height of the boxes of an index; NaN for the whole image.
        index: of N hands, with the sizes that their labels are made for.
    """
    rows = spread(len(index), 0 if file.suffix.lower() == ".csv" else 32)
    size_px, low, high = image_sizes_px(index.read_many(rows))[:, ::-1], edges_px[rows, :2], edges_px[rows, 2:]
    other = np.abs(index.tables["labelled_size_px"][rows] - size_px) > 0  # another fault
    known = ((size_px > 0) & np.isfinite(low) & ~other).all(axis=1)
    outside = (high > size_px + 1).any(axis=1)  # of a whole image that is counted from 1, by one
    corners = ((high > 2 * low) & (high - low <= size_px)).all(axis=1)
    if 2 * (outside & corners & known).sum() > max(1, known.sum()):
        raise UserError(
            f"{file}: most boxes end outside of their images; expected bbox as x, y, width, height in pixels of the "
            "image as displayed. Are these the corners x0, y0, x1, y1? Then subtract x0, y0. Or were they made before "
            "EXIF turned the images? Then turn them."
        )
