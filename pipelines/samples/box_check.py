"""Refuses boxes that cannot contain anything of their images.

Wrong boxes cause no error later: the views have one colour, and training goes on.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.pipelines.samples.image_sizes import spread, upright_sizes_px
from peclr_dali.pipelines.samples.index import Index

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
    box_px = index.box_px
    x_px, y_px, side_px = np.ascontiguousarray(box_px.T)  # three times as fast, of millions
    sound = (np.abs(x_px) <= _LARGEST_PX) & (np.abs(y_px) <= _LARGEST_PX) & (side_px >= 0) & (side_px <= _LARGEST_PX)
    if not sound.all():
        broken = ~sound  # also true for NaN
        row = int(broken.argmax())
        raise UserError(
            f"{index.root}: {broken.sum()} of {len(index)} boxes are not valid, first that of {index.paths[row]}: "
            f"centre {box_px[row, 0]:g}, {box_px[row, 1]:g} and side {box_px[row, 2]:g}; expected finite pixels and a "
            "side of 0 or more. Mend the boxes, or the labels that they are made from."
        )
    boxed = np.flatnonzero(side_px > 0)
    if not len(boxed):
        return
    small = side_px < LEAST_SIDE_PX
    before = np.minimum(x_px, y_px) + side_px / 2 <= 0  # wholly left of any image, or above it
    _warn_or_raise(index, boxed, (small | before)[boxed], small[boxed], "boxes")
    rows = boxed[spread(index, len(boxed), _SAMPLED)]
    size_px = upright_sizes_px(index, rows)[:, ::-1]  # width, height
    known = size_px[:, 0] > 0
    rows, size_px = rows[known], size_px[known]
    start_px = box_px[rows, :2] - box_px[rows, 2:] / 2
    far = (start_px >= size_px).any(axis=1) | (box_px[rows, 2] > _MOST_SIDES * size_px.max(axis=1, initial=0))
    _warn_or_raise(
        index, rows, far, np.zeros(len(rows), bool), "boxes that were compared with the size of their images"
    )


def _warn_or_raise(
    index: Index,
    rows: npt.NDArray[np.int64],
    impossible: npt.NDArray[np.bool_],
    small: npt.NDArray[np.bool_],
    what: str,
) -> None:
    """Raise or warn. `rows` (N,) of the index were checked; `impossible` and `small` (N,) mark their boxes."""
    count = int(impossible.sum())
    if not count:
        return
    row = int(rows[impossible.argmax()])
    x_px, y_px, side_px = index.box_px[row].tolist()
    found = (
        f"{index.root}: {count} of {len(rows)} {what} show nothing of their images, that of {index.paths[row]} the "
        f"first: x {x_px - side_px / 2:g} to {x_px + side_px / 2:g}, y {y_px - side_px / 2:g} to {y_px + side_px / 2:g}"
    )
    if 2 * count <= len(rows):
        log.warning("%s; their views are of one colour. Mend or remove these boxes", found)
        return
    cause = "Expected pixels of the image as displayed. Do they belong to images of another size, or to other images?"
    if 2 * int(small.sum()) > count:
        cause = (
            "They look like fractions of the image, expected are pixels: multiply x by the width and y by the height."
        )
    raise UserError(f"{found}. {cause}")
