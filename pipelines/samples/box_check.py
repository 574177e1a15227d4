"""Refuses boxes that cannot contain anything of their images; reads the sizes of images.

Wrong boxes cause no error later: the views have one colour, and training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import BoolArray, IntArray
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage
from peclr_dali.pipelines.samples.index import Index

_SAMPLED: Final = 64
"""Largest number of boxes that are compared with the size of their images; of others, it is not known."""

LEAST_SIDE_PX: Final = 2.0
"""Smallest side of a box; boxes in fractions of an image have sides up to 1."""

_MOST_SIDES: Final = 20.0
"""Largest side of a box, as a multiple of the image's longer side. In a larger box the image is a dot."""

_FARTHEST_SIDES: Final = 5.0
"""Largest distance of a keypoint from its box's centre, as a multiple of the box's side."""

_OUTSIDE_SIDES: Final = 1.5
"""Distance from a box's centre, in its sides, at which a keypoint is outside of it, with room for tight boxes."""

_OFF_CENTRE: Final = 0.2
"""Largest usual distance of a camera's or a hand's centre from the image's, over half the image's sides."""

_LARGEST_PX: Final = 2.0**24
"""Largest coordinate at which float32 resolves one pixel."""

T = TypeVar("T")

log = logging.getLogger(__name__)


def image_sizes_px(read: Callable[[T], bytes], images: Iterable[T], *, stored: bool = False) -> IntArray:
    """Heights and widths (N, 2) of images as displayed (EXIF orientation applied), or as they are `stored`.

    They are 0 for what cannot be read or is no image. `read` gives the bytes of an image, as `Index.read` of a row does
    and `read_file` of a path.
    """
    sizes_px = []
    for image in images:
        try:
            file = check_image(read(image))
        except (OSError, BadImage):
            sizes_px.append((0, 0))
        else:
            sizes_px.append(file.size_px[::-1] if file.orientation > 4 and not stored else file.size_px)
    return np.array(sizes_px, np.int64).reshape(-1, 2)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).astype(int).tolist()))


def check_boxes(index: Index) -> tuple[IntArray, IntArray]:
    """Check the boxes of one source, without margin. Boxes of whole images are not checked.

    A box is impossible if its side is below two pixels, if it does not meet its image, or if it is larger than 20 times
    its image. Image sizes are read for a sample of the index. A warning counts impossible boxes.

    Returns:
        The rows (M,) of this sample whose images can be read, and their widths and heights (M, 2), as displayed.

    Raises:
        UserError: a box is not finite or has a negative side, or most boxes are impossible.
    """
    x_px, y_px, side_px = np.ascontiguousarray(index.box_px.T)  # three times as fast, of millions
    sound = (np.abs(x_px) <= _LARGEST_PX) & (np.abs(y_px) <= _LARGEST_PX) & (side_px >= 0) & (side_px <= _LARGEST_PX)
    if not sound.all():  # also of NaN
        raise UserError(
            f"{_found(index, np.arange(len(index)), ~sound, 'boxes are not valid')}; expected finite pixels and a side "
            "of 0 or more. Mend the boxes, or the labels that they are made from."
        )
    boxed = np.flatnonzero(side_px > 0)
    impossible = side_px < LEAST_SIDE_PX
    impossible |= np.minimum(x_px, y_px) + side_px / 2 <= 0  # wholly left of any image, or above it
    rows = boxed[spread(len(boxed), _SAMPLED)]
    size_px = image_sizes_px(index.read, rows.tolist())[:, ::-1]  # width, height
    rows, size_px = rows[size_px[:, 0] > 0], size_px[size_px[:, 0] > 0]
    beyond = (index.box_px[rows, :2] - side_px[rows, None] / 2 >= size_px).any(axis=1)
    impossible[rows] |= beyond | (side_px[rows] > _MOST_SIDES * size_px.max(axis=1, initial=0))
    if impossible[boxed].any():
        found = _found(index, boxed, impossible, "boxes show nothing of their images")
        if any(2 * impossible[some].sum() > len(some) for some in (boxed, rows)):
            raise UserError(
                f"{found}. Expected pixels of the image as displayed. Are these fractions of the image, or do they "
                "belong to images of another size?"
            )
        log.warning("%s; their views are of one colour. Mend or remove these boxes", found)
    return rows, size_px


def check_keypoints(index: Index) -> None:
    """Check the keypoints of one source against its boxes. A warning counts the hands that are wrong.

    Raises:
        UserError: of most hands, a keypoint is `_FARTHEST_SIDES` sides from its box's centre, all lie in the first
            pixel, or most lie outside of the box, even if that were three times as large.
    """
    if index.keypoints_px is None:
        return
    boxed = np.flatnonzero(index.box_px[:, 2] > 0)
    side_px, known = index.box_px[:, 2:], ~np.isnan(index.keypoints_px.sum(axis=2))
    from_center_px = np.nan_to_num(np.abs(index.keypoints_px - index.box_px[:, None, :2]), nan=0.0, posinf=np.inf)
    far = from_center_px.max(axis=(1, 2)) > _FARTHEST_SIDES * index.box_px[:, 2]
    # Up to 1, and 1.5 where COCO's source has added half a pixel.
    are_fractions = np.nan_to_num(np.abs(index.keypoints_px), nan=0.0, posinf=np.inf).max(axis=(1, 2)) <= 1.5
    far |= are_fractions & known.any(axis=1)
    if far[boxed].any():
        found = _found(index, boxed, far, "hands have keypoints far from their boxes")
        if 2 * far[boxed].sum() > len(boxed):
            raise UserError(f"{found}. Expected pixels of the image as displayed, not fractions. Mend them.")
        log.warning("%s; they are trained on as they are. Mend or remove them", found)
    elsewhere = 2 * ((from_center_px.max(axis=2) > _OUTSIDE_SIDES * side_px) & known).sum(axis=1) > known.sum(axis=1)
    if 2 * elsewhere[boxed].sum() > len(boxed):
        found = _found(index, boxed, elsewhere, "hands lie outside of their boxes")
        raise UserError(f"{found}. Expected boxes and keypoints, x before y, in pixels of one image. Mend them.")


def check_cameras(index: Index, rows: IntArray, size_px: IntArray) -> None:
    """Raise a `UserError` if images differ in size, or are of another size than their labels.

    The image of a whole camera has the camera's centre in its middle, and a cropped one the hand's. Here neither is.

    Args:
        index: of one source, whose images have one size.
        rows, size_px: some rows (M,) and the widths and heights of their images (M, 2).
    """
    if not len(rows):
        return
    first, (width, height) = index.location(int(rows[0])), size_px[0].tolist()
    if len(others := np.flatnonzero((size_px != size_px[0]).any(axis=1))):
        found = f"{index.location(int(rows[others[0]]))} has {' x '.join(map(str, size_px[others[0]]))} pixels"
        raise UserError(f"{found}, and {first} {width} x {height}; expected one size. Unpack the dataset again.")
    cameras, points_px = index.targets.get("K"), index.keypoints_px
    if cameras is None or points_px is None or np.isnan(cameras).all() or np.isnan(points_px).all():
        return
    camera, hand = np.nanmedian(cameras[:, :2, 2], axis=0), np.nanmedian(points_px, axis=(0, 1))
    if all(max(abs(2 * x / width - 1), abs(2 * y / height - 1)) > _OFF_CENTRE for x, y in (camera, hand)):
        raise UserError(
            f"{first} has {width} x {height} pixels, but its labels are of images of about "
            f"{2 * camera[0]:.0f} x {2 * camera[1]:.0f}. Use images and labels of one size."
        )


def _found(index: Index, rows: IntArray, wrong: BoolArray, what: str) -> str:
    """The number of wrong boxes among those of `rows`, and the first one. `wrong` (N,) is of the whole index."""
    row = int(rows[wrong[rows].argmax()])
    x_px, y_px, side_px = index.box_px[row].tolist()
    first = f"{index.paths[row]}: centre {x_px:g}, {y_px:g} and side {side_px:g}"
    return f"{index.root}: {wrong[rows].sum()} of {len(rows)} {what}, first that of {first}"
