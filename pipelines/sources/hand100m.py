"""Hand100M: hands in frames of Ego4D and 100DOH, each with the most similar hand of another video.

Lin et al., "SiMHand: Mining Similar Hands for Large-Scale 3D Hand Pose Pre-training", ICLR 2025. The layout and the
crop are those of the authors' public loader.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from pydantic import AfterValidator, Field, Json, PlainValidator, TypeAdapter
from pydantic.dataclasses import dataclass

from peclr_dali.errors import UserError
from peclr_dali.parsing import as_numbers
from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.config import DataConfig
from peclr_dali.pipelines.samples.image_sizes import read_upright_size_px
from peclr_dali.pipelines.samples.index import Index, read_file
from peclr_dali.pipelines.samples.partners import of_pairs
from peclr_dali.pipelines.sources.annotations.cache import Tables, remembered
from peclr_dali.pipelines.sources.annotations.json_stream import checked, elements, rows_of_images
from peclr_dali.pipelines.sources.annotations.stored_images import image_name, remembered_images
from peclr_dali.pipelines.sources.boxes import refuse_boxes, squares_around
from peclr_dali.pipelines.sources.subsets import hash_of_name, refuse_part, rows_of_split
from peclr_dali.skeleton import HAND

ANNOTATIONS: Final = "annotations/Ego4D/Hand100M_Ego4D_1m_v1-1.json"
"""The file to read if `data.annotations` is not set."""

CROP: Final = 1.3
"""Side of the authors' crop over the longer side of the box. The keypoints are fractions of this crop."""

_LARGEST: Final = 1e6
"""Fractions are near 0 to 1; with these, keypoints in pixels stay finite in float32."""

_UNKNOWN: Final = (2**31, 2**31)
"""The size of an image that cannot be read, so that it cuts no crop."""

log = logging.getLogger(__name__)


def load_hand100m(config: DataConfig) -> Index:
    """Read the hands of one file of annotations whose frames exist, in its order.

    A frame's `file_name` is relative to `data.root`; the frame may also be stored with another ending. Frames that are
    missing, as videos go offline, are left out with empty boxes and counted in one warning. A frame is a group; its
    folder is the video, by which splits divide.

    The box is the square around the annotated one, so `data.box_margin = 1.3` makes the authors' crop. Left hands are
    mirrored. The keypoints are taken from fractions of the authors' crop, which ends at the image's border; the image's
    size is that of its video's first frame. With `data.positive = "file"` and without `data.pairs`, the index has
    partners: the first positive of each hand, as in the authors' loader.

    Raises:
        UserError: the file is missing or does not fit the layout, no frame exists, or a part is chosen.
    """
    refuse_boxes(config, "Hand100M's annotations hold the boxes")
    refuse_part(config, "Hand100M's annotations")
    root = Path(config.root)
    file = root / (config.annotations or ANNOTATIONS)
    hands = remembered("hand100m-1", [file], lambda: _read_hands(file))
    image, box_px = hands["image"], hands["box_px"].astype(np.int64)
    stems = hands["stems"].tobytes().decode(errors="surrogateescape").split("\0")
    stored = remembered_images(root, stems)
    there = np.array([path is not None for path in stored])[image]
    if not there.any():
        raise UserError(
            f"{root}: no frame of {len(image)} hands exists; the first would be {stems[image[0]]}.jpg. Extract the "
            "frames from the videos, or check data.root."
        )
    empty = (box_px[:, 2:] <= box_px[:, :2]).any(axis=1)
    kept = np.flatnonzero(there & ~empty)
    if len(kept) < len(image):
        left_out = f"{(~there).sum()} without a frame, and {(there & empty).sum()} with an empty box"
        log.warning("%s: %d of %d hands are used. Left out are %s", file, len(kept), len(image), left_out)
    chosen = kept[rows_of_split(hands["video"][image[kept]], config.split)]
    image, box_px = image[chosen], box_px[chosen]
    paths = [stored[row] or "" for row in image.tolist()]  # all of them are there
    low_px, high_px = _crops(box_px, _sizes_px(root, paths, hands["video"][image]))
    keypoints_px = hands["keypoints_frac"][chosen]
    for axis in (0, 1):  # not both at once: NumPy's loops over two numbers take three times as long
        keypoints_px[..., axis] *= (high_px - low_px)[axis, :, None].astype(np.float32)
        keypoints_px[..., axis] += low_px[axis, :, None].astype(np.float32)
    partners = None
    if config.positive == "file" and config.pairs is None:
        row_of = np.full(len(there) + 1, -1)  # the last for -1: a hand without a positive
        row_of[chosen] = np.arange(len(chosen))
        pairs = np.stack([np.arange(len(chosen)), row_of[hands["positive"][chosen]]], axis=1)
        partners = of_pairs(pairs[(pairs[:, 1] >= 0) & (pairs[:, 0] != pairs[:, 1])], len(chosen))
    return Index(
        name="hand100m",
        root=root,
        paths=paths,
        box_px=squares_around(box_px[:, :2].astype(np.float64), box_px[:, 2:].astype(np.float64)),
        keypoints_px=keypoints_px,
        mirror=hands["is_left"][chosen],
        group=image,
        partners=partners,
    )


def _sizes_px(root: Path, paths: list[str], video: IntArray) -> IntArray:
    """Width and height (N, 2) of the images, which are those of the first readable one of each video."""
    numbers, first, of_video = np.unique(video, return_index=True, return_inverse=True)
    sizes_px = np.zeros((len(numbers), 2), np.int64)
    for number, row in enumerate(first.tolist()):
        same = (other for other in range(row, len(paths)) if video[other] == video[row])
        found = (read_upright_size_px(partial(read_file, f"{root}/{paths[other]}")) for other in same)
        sizes_px[number] = next((size for size in found if size is not None), _UNKNOWN)[::-1]
    return sizes_px[of_video]


def _crops(box_px: IntArray, size_px: IntArray) -> tuple[IntArray, IntArray]:
    """Two corners (2, N) of the authors' crops, in whole pixels as their code rounds them.

    The square of the longer side of 1.3 boxes ends at the image's border, so a crop need not be a square.
    """
    low_px, high_px = box_px.T[:2].copy(), box_px.T[2:].copy()
    widened_px = ((high_px - low_px) * CROP).astype(np.int64) - (high_px - low_px)
    low_px, high_px = low_px - widened_px // 2, high_px + widened_px // 2
    half_px = (high_px - low_px).max(axis=0) // 2
    doubled_px = low_px + high_px
    return np.maximum((doubled_px - 2 * half_px) // 2, 0), np.minimum((doubled_px + 2 * half_px) // 2, size_px.T)


def _fractions(value: object) -> bytes:
    """The x and y of 21 keypoints as float32."""
    numbers = as_numbers(value)
    if numbers is None or numbers.size != 3 * len(HAND) or not (np.abs(numbers) < _LARGEST).all():
        found = "no numbers" if numbers is None else " x ".join(map(str, numbers.shape))
        raise ValueError(f"found {found}, expected {len(HAND)} x 3 finite numbers below {_LARGEST:.0e}")
    return numbers.reshape(-1, 3)[:, :2].astype(np.float32).tobytes()


_Id = int | str


@dataclass(frozen=True)
class _Frame:
    """An entry of the file's list "images"."""

    id: _Id
    file_name: Annotated[str, AfterValidator(image_name)]


@dataclass(frozen=True)
class _Hand:
    """An entry of the file's list "annotations".

    Attributes:
        boxes: x0, y0, x1, y1 in pixels.
        keypoint_25d: (21, 3), x and y as fractions of the crop; as bytes of x and y.
        positive_sample: ids of similar hands, the most similar one first.
    """

    hand_id: int
    image_id: _Id
    boxes: Json[Annotated[list[Annotated[float, Field(gt=-1e9, lt=1e9)]], Field(min_length=4)]]
    keypoint_25d: Annotated[Any, PlainValidator(_fractions)]
    left_right: Literal["Left", "Right"]
    positive_sample: list[int]


_FRAME: Final = TypeAdapter(_Frame)
_HAND: Final = TypeAdapter(_Hand)


def _read_hands(file: Path) -> Tables:
    """Read the annotations of a file.

    Returns:
        Per image: stems (M,), the names without endings, joined by zero bytes, and video (M,), a hash of the image's
        folder. Per hand: image (N,) its row among the images, box_px (N, 4) x0, y0, x1, y1, keypoints_frac (N, 21, 2),
        is_left (N,), and positive (N,), the row of the hand that is its positive, or -1.
    """
    names, ids = list[str](), list[_Id]()
    image_ids, hand_ids, positive_ids = list[_Id](), list[int](), list[int]()
    boxes_px, is_left, fractions = list[list[int]](), list[bool](), bytearray()
    for key, entry in elements(file):
        if key == "images":
            frame = checked(_FRAME, entry, f"{file}, image {len(names)}")
            names.append(frame.file_name)
            ids.append(frame.id)
        elif key == "annotations":
            hand = checked(_HAND, entry, f"{file}, annotation {len(hand_ids)}")
            hand_ids.append(hand.hand_id)
            image_ids.append(hand.image_id)
            positive_ids.append(hand.positive_sample[0] if hand.positive_sample else -1)
            boxes_px.append([int(edge) for edge in hand.boxes[:4]])
            is_left.append(hand.left_right == "Left")
            fractions += hand.keypoint_25d
    image = rows_of_images(file, ids, image_ids)
    row_of = dict[int, int]()
    for row, hand_id in enumerate(hand_ids):
        if row_of.setdefault(hand_id, row) != row:
            raise UserError(
                f"{file}, annotation {row}: hand_id {hand_id} is that of annotation {row_of[hand_id]} too; expected "
                "each id once, since positives name hands by it. Unpack the dataset again."
            )
    stems = "\0".join(name.rpartition(".")[0] for name in names)
    hashes = {folder: hash_of_name(folder) for folder in {name.rpartition("/")[0] for name in names}}
    return {
        "stems": np.frombuffer(stems.encode(errors="surrogateescape"), np.uint8),
        "video": np.array([hashes[name.rpartition("/")[0]] for name in names]),
        "image": image,
        "box_px": np.array(boxes_px, np.int32),
        "keypoints_frac": np.frombuffer(fractions, np.float32).reshape(-1, len(HAND), 2),
        "is_left": np.array(is_left),
        "positive": np.array([row_of.get(positive, -1) for positive in positive_ids]),
    }
