"""The one composition of a view's matrices, from the draws and the boxes to what warps the pixels.

The fast path calls it between decoding and warping; in the DALI graph it is a node on the CPU, also when the pixels are
on a GPU. So what warps the pixels, what carries the keypoints and what the loss undoes is one draw on every backend.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelines.draws import BoolArray, Draw, FloatArray, GeometryConfig
from pipelines.reference import HALVE_BELOW, MAX_HALVINGS


@dataclass(frozen=True)
class ViewMatrices:
    """Matrices of one view of each of N samples, float32.

    Attributes:
        augmentation: (N, 2, 3) u -> A u + v in units of the output side, origin at the centre.
        source_to_view_px: (N, 2, 3) source pixels -> view pixels, corner-based.
        halvings: (N,) int64, how often the source is halved before the warp samples it.
        minified_to_view_px: (N, 2, 3) pixels of what is decoded, halved -> view pixels.
    """

    augmentation: FloatArray
    source_to_view_px: FloatArray
    halvings: npt.NDArray[np.int64]
    minified_to_view_px: FloatArray


def compose(
    box_px: FloatArray,
    size_px: npt.NDArray[np.integer],
    draws: FloatArray,
    geometry: GeometryConfig,
    mirror: BoolArray | None = None,
    start_px: npt.NDArray[np.integer] | None = None,
) -> ViewMatrices:
    """Matrices of one view of N samples.

    Args:
        box_px: (N, 3) centre x, centre y and side of the canonical box in the source; side 0 means the whole image.
        size_px: (N, 2) height and width of the source as decoded.
        draws: (N, len(Draw)) the view's table of draws.
        geometry: side of the output, and whether to halve what is minified.
        mirror: (N,) whether the canonical view is the box seen in a mirror, left for right; None mirrors none. The
            augmentation acts on that view and does not contain the mirror, so the loss never undoes it.
        start_px: (N, 2) row and column of the source where what is decoded begins; None where all of it is decoded.
    """
    side_px = geometry.side_px
    size = size_px.astype(np.float64)
    box = np.where(box_px[:, 2:] > 0, box_px, np.column_stack([size[:, ::-1] / 2, size.max(axis=1)]))  # (N, 3)
    table = draws.astype(np.float64)
    angle, magnification = np.deg2rad(table[:, Draw.ANGLE_DEG]), table[:, Draw.MAGNIFICATION]

    augmentation = np.empty((len(box), 2, 3))
    augmentation[:, 0, 0] = augmentation[:, 1, 1] = magnification * np.cos(angle)
    augmentation[:, 1, 0] = magnification * np.sin(angle)  # y points down: positive turns clockwise on the screen
    augmentation[:, 0, 1] = -augmentation[:, 1, 0]
    augmentation[:, :, 2] = table[:, [Draw.SHIFT_X_FRAC, Draw.SHIFT_Y_FRAC]]
    if table[:, Draw.CROP].any():
        magnification = _crop_first(augmentation, magnification, table)

    scale = side_px / box[:, 2]  # output pixels per source pixel, before the augmentation
    to_view = np.empty_like(augmentation)
    to_view[:, :, :2] = augmentation[:, :, :2] * scale[:, None, None]
    if mirror is not None:
        to_view[mirror, :, 0] *= -1
    center = np.einsum("nij,nj->ni", to_view[:, :, :2], box[:, :2])
    to_view[:, :, 2] = side_px * (augmentation[:, :, 2] + 0.5) - center

    halvings = np.zeros(len(box), np.int64)
    if geometry.antialias:
        for level in range(MAX_HALVINGS):
            minified = scale * magnification < HALVE_BELOW * 0.5**level
            halvings += minified & (size.min(axis=1) >= 4 * 2**level)  # two pixels remain
    minified_to_view = to_view.copy()
    minified_to_view[:, :, :2] *= 2.0 ** halvings[:, None, None]
    if start_px is not None:
        minified_to_view[:, :, 2] += np.einsum("nij,nj->ni", to_view[:, :, :2], start_px[:, ::-1])
    return ViewMatrices(
        augmentation.astype(np.float32),
        to_view.astype(np.float32),
        halvings,
        minified_to_view.astype(np.float32),
    )


def _crop_first(
    augmentation: npt.NDArray[np.float64], magnification: npt.NDArray[np.float64], table: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Let `augmentation` (N, 2, 3), changed in place, act on the crop of the canonical view: u -> (u - k) / c.

    k is the crop's centre and c its side. Returns the new magnification (N,).
    """
    cropped = table[:, Draw.CROP] > 0
    side = np.where(cropped, table[:, Draw.CROP_SIDE_FRAC], 1)
    center = np.where(cropped[:, None], table[:, [Draw.CROP_X_FRAC, Draw.CROP_Y_FRAC]], 0)
    augmentation[:, :, :2] /= side[:, None, None]
    augmentation[:, :, 2] -= np.einsum("nij,nj->ni", augmentation[:, :, :2], center)
    return magnification / side
