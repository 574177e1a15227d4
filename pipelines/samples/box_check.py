"""Refuses boxes that cannot contain anything of their images; reads sizes of a sample of images.

Wrong boxes cause no error later: the views have one colour, and training goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import BoolArray, IntArray
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage, upright_size_px
from peclr_dali.pipelines.samples.index import Index

_SIZES_READ: Final = 32
"""Number of images whose size is read."""


def read_upright_size_px(read: Callable[[], bytes]) -> tuple[int, int] | None:
    """Height and width of an image, EXIF orientation applied; None if it cannot be read or is not an image."""
    try:
        file = check_image(read())
    except (OSError, BadImage):
        return None
    height, width = upright_size_px(np.array([file.size_px]), np.array([file.orientation]))[0].tolist()
    return height, width


def upright_sizes_px(index: Index, rows: IntArray) -> IntArray:
    """Heights and widths (N, 2) of images of an index as in `read_upright_size_px`; 0 where one cannot be read."""
    sizes_px = [read_upright_size_px(partial(index.read, row)) or (0, 0) for row in rows.tolist()]
    return np.array(sizes_px, np.int64).reshape(-1, 2)


def spread(count: int, most: int) -> IntArray:
    """At most `most` of the numbers below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def sampled_sizes_px(index: Index) -> IntArray:
    """Heights and widths (N, 2) of a sample of the index's images, as they are stored; those that can be read."""
    sizes_px = []
    for row in spread(len(index), _SIZES_READ).tolist():
        with suppress(OSError, BadImage):
            sizes_px.append(check_image(index.read(row)).size_px)
    return np.array(sizes_px, np.int64).reshape(-1, 2)


_SAMPLED: Final = 64
"""Number of images whose size is read."""

LEAST_SIDE_PX: Final = 2.0
"""Smallest side of a box; boxes in fractions of an image have sides up to 1."""

_MOST_SIDES: Final = 20.0
"""Largest side of a box, as a multiple of the image's longer side. In a larger box the image is a dot."""

_LARGEST_PX: Final = 2.0**24
"""Largest coordinate at which float32 resolves one pixel."""

log = logging.getLogger(__name__)


def check_boxes(index: Index) -> None:
    """Check the boxes of one source, without margin. Boxes of whole images are not checked.

    A box is impossible if its side is below two pixels, if it does not meet its image, or if it is larger than 20 times
    its image. Image sizes are read for a sample of the index. A warning counts impossible boxes.

    Raises:
        UserError: a box is not finite or has a negative side, or most boxes are impossible.
    """
    x_px, y_px, side_px = np.ascontiguousarray(index.box_px.T)  # three times as fast, of millions
    sound = (np.abs(x_px) <= _LARGEST_PX) & (np.abs(y_px) <= _LARGEST_PX) & (side_px >= 0) & (side_px <= _LARGEST_PX)
    if not sound.all():  # also of NaN
        where = _in_words(index, int(sound.argmin()))
        raise UserError(
            f"{index.root}: {(~sound).sum()} of {len(index)} boxes are not valid, first that of {where}; expected "
            "finite pixels and a side of 0 or more. Mend the boxes, or the labels that they are made from."
        )
    boxed = np.flatnonzero(side_px > 0)
    small = side_px < LEAST_SIDE_PX
    before = np.minimum(x_px, y_px) + side_px / 2 <= 0  # wholly left of any image, or above it
    _warn_or_raise(index, boxed, (small | before)[boxed], "boxes")
    rows = boxed[spread(len(boxed), _SAMPLED)]
    size_px = upright_sizes_px(index, rows)[:, ::-1]  # width, height
    known = size_px[:, 0] > 0
    rows, size_px = rows[known], size_px[known]
    start_px = index.box_px[rows, :2] - side_px[rows, None] / 2
    far = (start_px >= size_px).any(axis=1) | (side_px[rows] > _MOST_SIDES * size_px.max(axis=1, initial=0))
    _warn_or_raise(index, rows, far, "boxes that were compared with the size of their images")


def _warn_or_raise(index: Index, rows: IntArray, impossible: BoolArray, what: str) -> None:
    """Raise or warn. `rows` (N,) of the index were checked; `impossible` (N,) marks their boxes."""
    count = int(impossible.sum())
    if not count:
        return
    where = _in_words(index, int(rows[impossible.argmax()]))
    found = f"{index.root}: {count} of {len(rows)} {what} show nothing of their images, first that of {where}"
    if 2 * count <= len(rows):
        log.warning("%s; their views are of one colour. Mend or remove these boxes", found)
        return
    raise UserError(
        f"{found}. Expected pixels of the image as displayed. Are these fractions of the image, or do they belong to "
        "images of another size?"
    )


def _in_words(index: Index, row: int) -> str:
    x_px, y_px, side_px = index.box_px[row].tolist()
    return f"{index.paths[row]}: centre {x_px:g}, {y_px:g} and side {side_px:g}"
