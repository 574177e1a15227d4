"""The fast path for CPUs: DALI has read, decoded and composed; OpenCV halves, and a Numba kernel makes the views.

On a CPU one warp takes DALI three times as long as OpenCV, and the exact jitter ten times as long as the kernel.
Everything here releases Python's lock, so plain threads scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import cv2
import numpy as np

from errors import UserError
from pipelines.draws import ColourConfig, Draw, FloatArray, GeometryConfig
from pipelines.kernels import Image, make_view, pixel_pairs
from pipelines.matrices import ViewMatrices
from pipelines.reference import linear_colour_matrix

_REACH_PX = 2**24
"""Up to here float32 tells neighbouring pixels apart."""


def configure_threads() -> None:
    """Leave all parallelism to the loader's own threads."""
    cv2.setNumThreads(1)


def view_to_source(minified_to_view_px: FloatArray) -> FloatArray:
    """Matrices as the kernel takes them, (N, 6).

    Args:
        minified_to_view_px: (N, 2, 3) from source to view, corner-based in both.

    Raises:
        UserError: a view shows next to nothing of its source, or is out of all bounds.
    """
    try:
        with np.errstate(all="ignore"):  # what overflows is refused below
            linear = np.linalg.inv(minified_to_view_px[:, :, :2].astype(np.float64))
            offset = -np.einsum("nij,nj->ni", linear, minified_to_view_px[:, :, 2])
            # Corner-based to centre-based: half a pixel in the view; in the source it cancels against the border of one
            # pixel, which leaves the other half.
            offset += linear.sum(axis=2) / 2 + 0.5
        matrices = np.concatenate([linear, offset[:, :, None]], axis=2).reshape(-1, 6)
        bounded = bool((np.abs(matrices) < _REACH_PX).all())
    except np.linalg.LinAlgError:  # one is singular
        bounded = False
    if not bounded:  # with a NaN the kernel would read anywhere in memory
        raise UserError(
            f"a view reaches further than {_REACH_PX} pixels from its image, or is a single point: "
            "geometry.scale, data.box_margin or a box is out of all bounds; choose others"
        )
    return matrices.astype(np.float32)


def linear_matrices(draws: FloatArray) -> FloatArray:
    """Affine colour maps (N, 3, 4) of the linear jitter."""
    out = np.empty((len(draws), 3, 4), np.float32)
    for row, draw in zip(out, draws, strict=True):
        row[:, :3] = linear_colour_matrix(draw[Draw.HUE], draw[Draw.SATURATION]) * draw[Draw.VALUE_SCALE]
        row[:, 3] = draw[Draw.VALUE_SHIFT]
    return out


class ViewTable:
    """What one view is made with, for all N samples of a DALI batch.

    Args:
        colour: which jitter.
        draws: (N, len(Draw)) the view's table of draws.
        matrices: of the view.
    """

    def __init__(self, colour: ColourConfig, draws: FloatArray, matrices: ViewMatrices) -> None:
        self.jitter = colour.jitter
        self.sizes_px = [(height, width) for height, width in matrices.sizes_px[:, -1].astype(int).tolist()]
        self.view_to_source = view_to_source(matrices.minified_to_view_px)
        self.colours = np.ascontiguousarray(draws[:, [Draw.HUE, Draw.SATURATION, Draw.VALUE_SCALE, Draw.VALUE_SHIFT]])
        self.linear_colours = linear_matrices(draws) if self.jitter == "linear" else None


class ViewMaker:
    """Makes views of one image after another; each thread has its own.

    Args:
        geometry: size of a view, and what fills the outside.
        tables: one per view.
    """

    def __init__(self, geometry: GeometryConfig, tables: Sequence[ViewTable]) -> None:
        self._fill = geometry.fill
        self._tables = tables
        self._padded = np.empty((0, 0, 4), np.uint8)
        self._made = np.empty((geometry.side_px, geometry.side_px), np.int32)

    def write(self, sample: int, image: Image, outs: Sequence[Image]) -> None:
        """Make all views of `image` (H, W, 3), the batch's row `sample`.

        Args:
            sample: row of the batch.
            image: decoded RGB.
            outs: per view (N, S, S, 3), of which that row is written.
        """
        by_size = sorted(zip(self._tables, outs, strict=True), key=lambda pair: pair[0].sizes_px[sample], reverse=True)
        pairs = None
        for table, out in by_size:
            size_px = table.sizes_px[sample]
            if pairs is None or size_px != image.shape[:2]:
                image = halve_to(image, size_px)
                pairs = pixel_pairs(self._pad(image))
            height, width = size_px
            matrix, colour = table.view_to_source[sample], table.colours[sample]
            make_view(pairs, width, height, matrix, table.jitter == "hsv", colour, self._made)
            made = self._made.view(np.uint8).reshape(*self._made.shape, 4)
            cv2.cvtColor(made, cv2.COLOR_RGBA2RGB, dst=out[sample])
            if table.linear_colours is not None:
                cv2.transform(out[sample], table.linear_colours[sample], dst=out[sample])

    def _pad(self, image: Image) -> Image:
        """The image (H, W, 3) as RGBA with a border of one pixel of fill: (H + 2, W + 2, 4), valid until the next."""
        height, width, _ = image.shape
        if self._padded.shape[:2] != (height + 2, width + 2):
            grey = 0 if self._fill == "edge" else self._fill
            self._padded = np.full((height + 2, width + 2, 4), grey, np.uint8)
        padded = self._padded
        cv2.cvtColor(image, cv2.COLOR_RGB2RGBA, dst=padded[1:-1, 1:-1])
        if self._fill == "edge":
            padded[0], padded[-1] = padded[1], padded[-2]
            padded[:, 0], padded[:, -1] = padded[:, 1], padded[:, -2]
        return padded


def halve_to(image: Image, size_px: tuple[int, int]) -> Image:
    """Halve (H, W, 3) until it has `size_px`, rounding odd sizes up: each step the mean of 2 x 2 pixels."""
    while image.shape[:2] != size_px:
        height, width = image.shape[:2]
        half = ((width + 1) // 2, (height + 1) // 2)
        image = np.asarray(cv2.resize(image, half, interpolation=cv2.INTER_LINEAR), dtype=np.uint8)
    return image
