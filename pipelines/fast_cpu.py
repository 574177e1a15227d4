"""The fast path for CPUs: DALI has read, decoded and composed; OpenCV and torch make the pixels of the views.

On a CPU one warp takes DALI three times as long as OpenCV. The functions below release Python's lock, so plain
threads scale. They work on 8-bit pixels throughout; `pipelines.reference` says what they approximate and the tests say
how well.
"""

from __future__ import annotations

import cv2
import numpy as np
import numpy.typing as npt
import torch

from pipelines.draws import ColourConfig, Draw, FloatArray, GeometryConfig
from pipelines.kernels import hsv_jitter
from pipelines.reference import linear_colour_matrix

Image = npt.NDArray[np.uint8]


def configure_threads() -> None:
    """Leave all parallelism to the loader's own threads."""
    cv2.setNumThreads(1)


def opencv_matrices(minified_to_view_px: FloatArray) -> FloatArray:
    """Corner-based (N, 2, 3) matrices in OpenCV's frame, where the centre of the first pixel is 0, 0."""
    out = minified_to_view_px.copy()
    out[:, :, 2] += minified_to_view_px[:, :, :2].sum(axis=2) / 2 - 0.5
    return out


def linear_matrices(draws: FloatArray) -> FloatArray:
    """Affine colour maps (N, 3, 4) of the linear jitter."""
    out = np.empty((len(draws), 3, 4), np.float32)
    for row, draw in zip(out, draws, strict=True):
        row[:, :3] = linear_colour_matrix(draw[Draw.HUE], draw[Draw.SATURATION]) * draw[Draw.VALUE_SCALE]
        row[:, 3] = draw[Draw.VALUE_SHIFT]
    return out


class ViewMaker:
    """Makes one view of each image of a DALI batch.

    Args:
        geometry: size, fill and whether to antialias.
        colour: which jitter.
        draws: (N, len(Draw)) the view's table of draws.
        minified_size_px: (N, 2) height and width of the low-passed source.
        minified_to_view_px: (N, 2, 3) from its pixels to the view's, corner-based.
    """

    def __init__(
        self,
        geometry: GeometryConfig,
        colour: ColourConfig,
        *,
        draws: FloatArray,
        minified_size_px: FloatArray,
        minified_to_view_px: FloatArray,
    ) -> None:
        self._jitter = colour.jitter
        self._sizes_px = minified_size_px.astype(int).tolist()
        self._matrices = opencv_matrices(minified_to_view_px)
        self._draws = draws
        if self._jitter == "linear":
            self._colours = linear_matrices(draws)
        self._side = (geometry.side_px, geometry.side_px)
        edge = geometry.fill == "edge"
        self._border = cv2.BORDER_REPLICATE if edge else cv2.BORDER_CONSTANT
        self._fill = (0.0,) * 3 if edge else (float(geometry.fill),) * 3

    def write(self, sample: int, image: Image, out: Image) -> None:
        """Make the view of `image` (H, W, 3), the batch's row `sample`, and write it to `out` (side, side, 3)."""
        height, width = self._sizes_px[sample]
        if (height, width) != image.shape[:2]:
            image = _minify(image, height, width)
        warped = cv2.warpAffine(
            image, self._matrices[sample], self._side, borderMode=self._border, borderValue=self._fill
        )
        if self._jitter == "hsv":
            hue, saturation, scale, shift = self._draws[sample, Draw.HUE : Draw.VALUE_SHIFT + 1]
            hsv_jitter(np.asarray(warped, dtype=np.uint8), hue, saturation, scale, shift, out)
        elif self._jitter == "linear":
            cv2.transform(warped, self._colours[sample], dst=out)
        else:
            out[:] = warped


def _minify(image: Image, height: int, width: int) -> Image:
    """Triangle-filtered resize of (H, W, 3) to a smaller size."""
    planes = torch.from_numpy(image).permute(2, 0, 1)[None]  # channels-last in memory: torch's vectorised path
    small = torch.nn.functional.interpolate(planes, (height, width), mode="bilinear", antialias=True)
    return small[0].permute(1, 2, 0).numpy()
