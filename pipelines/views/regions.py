"""Finds which part of a large image its views reach, so that nothing else is decoded.

A decoder that is given a region still reads the code before it, but spares the transform and the colours of what lies
outside, and all that comes after. It gives the same pixels as a whole image, bit by bit. Views of them may differ by
two levels before the colour jitter: the warp computes in float32, from another origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from pipelines.arrays import BoolArray, IntArray

LEAST_PIXELS: Final = 2**18
"""A smaller image is decoded whole: there is little to spare."""

LARGEST_SHARE: Final = 0.8
"""Of the image's area; a larger region costs as much as the whole."""

_MARGIN_PX: Final = 2
"""Decoders that interpolate chroma may see its neighbours differently at a region's border."""


def find_regions(
    size_px: IntArray,
    stored_to_view_px: Sequence[npt.NDArray[np.float64]],
    halvings: IntArray,
    side_px: int,
    croppable: BoolArray,
) -> tuple[IntArray, IntArray]:
    """What the views of N images reach, where decoding only that pays; elsewhere the whole image.

    Args:
        size_px: (N, 2) heights and widths of the images as stored.
        stored_to_view_px: per view, (N, 2, 3) from stored pixels to view pixels.
        halvings: (N,) the largest number of halvings among an image's views.
        side_px: side of a view.
        croppable: (N,) of which images a region may be decoded.

    Returns:
        Row and column where each region begins, and its height and width, (N, 2) each.
    """
    start_px, stop_px = _reach_px(size_px, stored_to_view_px, 2 ** halvings[:, None], side_px)
    shape_px = stop_px - start_px
    pixels = size_px.prod(axis=1)
    pays = croppable & (pixels >= LEAST_PIXELS) & (shape_px.prod(axis=1) < LARGEST_SHARE * pixels)
    return np.where(pays[:, None], start_px, 0), np.where(pays[:, None], shape_px, size_px)


def _reach_px(
    size_px: IntArray, stored_to_view_px: Sequence[npt.NDArray[np.float64]], block_px: IntArray, side_px: int
) -> tuple[IntArray, IntArray]:
    """Start and stop (N, 2), row and column, of the least region that holds every pixel that the views sample.

    It starts and ends at whole blocks of as many pixels as the views halve, so that halving pairs the same pixels as
    in the whole image.
    """
    corners_px = np.array([[0, 0], [side_px, 0], [0, side_px], [side_px, side_px]], np.float64)
    low, high = np.full(size_px.shape, np.inf), np.full(size_px.shape, -np.inf)
    with np.errstate(all="ignore"):  # views out of all bounds are refused where they are made
        for matrices in stored_to_view_px:
            (a, b, u), (c, d, v) = matrices.transpose(1, 2, 0)[..., None]
            x, y = corners_px[:, 0] - u, corners_px[:, 1] - v  # (N, 4)
            determinant = a * d - b * c
            reached = np.stack([a * y - c * x, d * x - b * y], axis=1) / determinant[:, None]  # (N, 2, 4): y, x
            low, high = np.minimum(low, reached.min(axis=2)), np.maximum(high, reached.max(axis=2))
        margin = 2 * block_px + _MARGIN_PX  # two pixels as the warp sees them
        bounded = np.isfinite(low) & np.isfinite(high)
        low = np.where(bounded, np.clip(low - margin, 0, size_px), 0)
        high = np.where(bounded, np.clip(high + margin, 0, size_px), size_px)
    least = 4 * block_px
    start = np.minimum(np.floor(low).astype(np.int64), np.maximum(size_px - least, 0)) // block_px * block_px
    stop = -(-np.maximum(np.ceil(high).astype(np.int64), start + least) // block_px) * block_px
    return start, np.minimum(stop, size_px)
