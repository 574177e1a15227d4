"""Finds the part of each large image that its views show.

For a region, the decoder still reads the entropy-coded data before the region. It skips the transform and colour
conversion outside the region, and all data behind the region's last row. The pixels are bit-equal to a decoded whole
image. Views may differ by some levels before the colour jitter, since the warp computes in float32 from another origin.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from peclr_dali.pipelines.arrays import BoolArray, IntArray

LEAST_PIXELS: Final = 2**18
"""Images with fewer pixels are decoded whole: a region would save little."""

LARGEST_SHARE: Final = 0.8
"""Largest share of the image's area; decoding a larger region takes as long as the whole image."""

_MARGIN_PX: Final = 2
"""Pixels added around a region: decoders that interpolate chroma may differ at its border."""


def find_regions(
    size_px: IntArray,
    image: IntArray,
    stored_to_view_px: Sequence[npt.NDArray[np.float64]],
    halvings: IntArray,
    sides_px: Sequence[int],
    croppable: BoolArray | None,
) -> tuple[IntArray, IntArray]:
    """The region of each of M images that V views of N rows show, or the whole image if a region saves no time.

    Args:
        size_px: (M, 2) heights and widths of the images as stored.
        image: (V, N) the image that each view shows.
        stored_to_view_px: per view, (N, 2, 3) from stored pixels to view pixels.
        halvings: (V, N) number of halvings of the image for each view.
        sides_px: per view, its side.
        croppable: (M,) whether a region of the image can be decoded faster than the whole; None: decode whole images.

    Returns:
        First row and column of each region, and its height and width, (M, 2) each.
    """
    if croppable is None or not croppable.any():
        return np.zeros_like(size_px), size_px
    most_halvings = np.zeros(len(size_px), np.int64)
    for shown, halved in zip(image, halvings, strict=True):
        most_halvings[shown] = np.maximum(most_halvings[shown], halved)
    start_px, stop_px = region_around(size_px, image, stored_to_view_px, 2 ** most_halvings[:, None], sides_px)
    shape_px = stop_px - start_px
    pixels = size_px.prod(axis=1)
    pays = croppable & (pixels >= LEAST_PIXELS) & (shape_px.prod(axis=1) < LARGEST_SHARE * pixels)
    return np.where(pays[:, None], start_px, 0), np.where(pays[:, None], shape_px, size_px)


def region_around(
    size_px: IntArray,
    image: IntArray,
    stored_to_view_px: Sequence[npt.NDArray[np.float64]],
    block_px: IntArray,
    sides_px: Sequence[int],
) -> tuple[IntArray, IntArray]:
    """Start and stop (M, 2), row and column, of the smallest region with all pixels that the views sample.

    It starts and ends at multiples of `block_px` (M, 1), 2^halvings pixels, so that halving combines the same pixels as
    in the whole image.
    """
    corners = np.array([[0, 0], [1, 0], [0, 1], [1, 1]], np.float64)
    low, high = np.full(size_px.shape, np.inf), np.full(size_px.shape, -np.inf)
    with np.errstate(all="ignore"):  # views that reach too far are refused when they are made
        for shown, matrices, side_px in zip(image, stored_to_view_px, sides_px, strict=True):
            (a, b, u), (c, d, v) = matrices.transpose(1, 2, 0)[..., None]
            x, y = side_px * corners[:, 0] - u, side_px * corners[:, 1] - v  # (N, 4)
            determinant = a * d - b * c
            reached = np.stack([a * y - c * x, d * x - b * y], axis=1) / determinant[:, None]  # (N, 2, 4): y, x
            low[shown] = np.minimum(low[shown], reached.min(axis=2))
            high[shown] = np.maximum(high[shown], reached.max(axis=2))
        margin = 2 * block_px + _MARGIN_PX  # two pixels for the warp's interpolation
        bounded = np.isfinite(low) & np.isfinite(high)
        low = np.where(bounded, np.clip(low - margin, 0, size_px), 0)
        high = np.where(bounded, np.clip(high + margin, 0, size_px), size_px)
    least = 4 * block_px
    start = np.minimum(np.floor(low).astype(np.int64), np.maximum(size_px - least, 0)) // block_px * block_px
    stop = -(-np.maximum(np.ceil(high).astype(np.int64), start + least) // block_px) * block_px
    return start, np.minimum(stop, size_px)
