"""Plans the views of a chunk before its images are decoded: which image each view shows, matrices, halvings, regions.

The plan follows from the files' headers, the boxes and the draws. The matrix that warps the pixels, transforms the
keypoints and is undone in the embeddings comes from this plan; no other code composes matrices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from peclr_dali.pipelines.arrays import BoolArray, DoubleArray, FloatArray, IntArray
from peclr_dali.pipelines.files.image_file import stored_to_upright_px, upright_size_px
from peclr_dali.pipelines.views.augmentation import GeometryConfig
from peclr_dali.pipelines.views.draws import Draw
from peclr_dali.pipelines.views.regions import find_regions

HALVE_BELOW: Final = math.sqrt(0.5)
"""Magnification below which a view samples a halved source; the same limit holds for each further halving."""

MAX_HALVINGS: Final = 6
"""Largest number of halvings: enough for an image of 64 times the view's side."""

_ROUNDED: Final = 1 + 1e-6
"""Largest factor by which a view exceeds its ranges, since draws and boxes are float32."""


@dataclass(frozen=True)
class Plan:
    """V views of N rows, which image each of them shows, and the regions of the M images to decode.

    Attributes:
        image: (V, N) int64, the image that each view shows, in [0, M). No view shows an image twice.
        start_px: (M, 2) int64, row and column in the stored image where the region begins.
        shape_px: (M, 2) int64, height and width of the region.
        draws: (V, N, COLUMNS) float32, the tables of draws.
        matrix: (V, N, 2, 3) float32, the augmentation u -> A u + v in units of the output side, origin at the centre.
        source_to_view_px: (V, N, 2, 3) float32, pixels of the upright source -> view pixels, corner-based.
        decoded_to_view_px: (V, N, 2, 3) float32, pixels of the decoded and halved image -> view pixels, corner-based.
        halvings: (V, N) int64, number of halvings of the decoded image before the warp samples it.
    """

    image: IntArray
    start_px: IntArray
    shape_px: IntArray
    draws: FloatArray
    matrix: FloatArray
    source_to_view_px: FloatArray
    decoded_to_view_px: FloatArray
    halvings: IntArray


def plan_views(
    size_px: IntArray,
    orientation: IntArray,
    box_px: FloatArray,
    draws: Sequence[FloatArray],
    geometries: Sequence[GeometryConfig],
    *,
    image: IntArray | None = None,
    mirror: BoolArray | None = None,
    croppable: BoolArray | None = None,
) -> Plan:
    """Plan V views of N rows, which show M images.

    Args:
        size_px: (M, 2) heights and widths of the images as stored.
        orientation: (M,) Exif orientation, 1 to 8.
        box_px: (M, 3) centre x, centre y and side of the canonical box in the upright source; side 0 means the whole
            image.
        draws: per view, the (N, COLUMNS) table of draws.
        geometries: per view, the side of the output, and whether to halve.
        image: (V, N) the image that each view shows, see `Plan`; None: row n shows image n in all views.
        mirror: (M,) whether the canonical view is the box seen in a mirror, left for right; None mirrors none. The
            augmentation acts on that view and does not contain the mirror, so the loss never undoes it.
        croppable: see `find_regions`.
    """
    if image is None:
        image = np.tile(np.arange(len(size_px)), (len(draws), 1))
    box = _boxes(size_px, orientation, box_px)
    mirrored = np.zeros(len(box), bool) if mirror is None else mirror
    to_upright = stored_to_upright_px(size_px, orientation)
    views, stored_to_view = [], []
    halvings = np.zeros(image.shape, np.int64)
    for shown, table, geometry, halved in zip(image, draws, geometries, halvings, strict=True):
        view = _compose(box[shown], table.astype(np.float64), geometry.side_px, mirrored[shown])
        if geometry.antialias:
            halved[:] = count_halvings(size_px[shown], view.magnification)
        views.append(view)
        stored_to_view.append(_after(view.source_to_view_px, to_upright[shown]))
    sides_px = [geometry.side_px for geometry in geometries]
    start_px, shape_px = find_regions(size_px, image, stored_to_view, halvings, sides_px, croppable)
    decoded_to_view = [
        _from_decoded(matrix, start_px[shown], halved)
        for shown, matrix, halved in zip(image, stored_to_view, halvings, strict=True)
    ]
    return Plan(
        image,
        start_px,
        shape_px,
        np.stack(draws),
        np.stack([view.matrix for view in views]).astype(np.float32),
        np.stack([view.source_to_view_px for view in views]).astype(np.float32),
        np.stack(decoded_to_view).astype(np.float32),
        halvings,
    )


def _boxes(size_px: IntArray, orientation: IntArray, box_px: FloatArray | DoubleArray) -> DoubleArray:
    """Boxes (N, 3) without sides of 0: those become the square around the whole image."""
    upright_px = upright_size_px(size_px, orientation)
    whole_px = np.column_stack([upright_px[:, ::-1] / 2, upright_px.max(axis=1)])
    return np.where(box_px[:, 2:] > 0, box_px, whole_px)


class _Composed(NamedTuple):
    """Matrices of one view of N rows, (N, 2, 3) float64, and its magnification of the source, (N,)."""

    matrix: DoubleArray
    source_to_view_px: DoubleArray
    magnification: DoubleArray


def _compose(box: DoubleArray, table: DoubleArray, side_px: int, mirror: BoolArray) -> _Composed:
    """Compose the matrices of one view of N rows, from boxes (N, 3) whose side is not 0."""
    angle, magnification = np.deg2rad(table[:, Draw.ANGLE_DEG]), table[:, Draw.MAGNIFICATION]
    matrix = np.empty((len(box), 2, 3))
    matrix[:, 0, 0] = matrix[:, 1, 1] = magnification * np.cos(angle)
    matrix[:, 1, 0] = magnification * np.sin(angle)  # y points down: positive turns clockwise on the screen
    matrix[:, 0, 1] = -matrix[:, 1, 0]
    matrix[table[:, Draw.FLIP] > 0, :, 0] *= -1
    # Another linear map is multiplied here; if it changes areas, `magnification` has to know.
    matrix[:, :, 2] = table[:, [Draw.SHIFT_X_FRAC, Draw.SHIFT_Y_FRAC]]
    if table[:, Draw.CROP].any():
        magnification = _crop_first(matrix, magnification, table)

    scale = side_px / box[:, 2]  # output pixels per source pixel before the augmentation
    to_view = np.empty_like(matrix)
    to_view[:, :, :2] = matrix[:, :, :2] * scale[:, None, None]
    to_view[mirror, :, 0] *= -1
    center = np.einsum("nij,nj->ni", to_view[:, :, :2], box[:, :2])
    to_view[:, :, 2] = side_px * (matrix[:, :, 2] + 0.5) - center
    return _Composed(matrix, to_view, scale * magnification)


def _crop_first(matrix: DoubleArray, magnification: DoubleArray, table: DoubleArray) -> DoubleArray:
    """Put the crop of the canonical view, u -> (u - k) / c, before `matrix` (N, 2, 3), which is changed in place.

    k is the crop's centre and c its side. Returns the new magnification (N,).
    """
    cropped = table[:, Draw.CROP] > 0
    side = np.where(cropped, table[:, Draw.CROP_SIDE_FRAC], 1)
    center = np.where(cropped[:, None], table[:, [Draw.CROP_X_FRAC, Draw.CROP_Y_FRAC]], 0)
    matrix[:, :, :2] /= side[:, None, None]
    matrix[:, :, 2] -= np.einsum("nij,nj->ni", matrix[:, :, :2], center)
    return magnification / side


def count_halvings(size_px: IntArray, magnification: DoubleArray) -> IntArray:
    """Number of halvings (N,) of images of sizes (N, 2) for views with this magnification (N,)."""
    halvings = np.zeros(len(size_px), np.int64)
    for level in range(MAX_HALVINGS):
        two_pixels_remain = size_px.min(axis=1) >= 4 * 2**level
        halvings += (magnification < HALVE_BELOW * 0.5**level) & two_pixels_remain
    return halvings


def most_halvings(box_px: FloatArray, geometry: GeometryConfig) -> int:
    """Largest number of halvings of all views that can be drawn from boxes (N, 3).

    It is `MAX_HALVINGS` if a box is a whole image, whose size is not known before its file is read.
    """
    if not geometry.antialias:
        return 0
    sides = box_px[:, 2]
    if sides.min(initial=1) <= 0:
        return MAX_HALVINGS
    magnification = np.array([_least_magnification_px(geometry) / sides.max(initial=0)], np.float64)
    return int(count_halvings(np.full((1, 2), 2**MAX_HALVINGS * 4), magnification)[0])


def _after(outer: DoubleArray, inner: npt.NDArray[np.number]) -> DoubleArray:
    """Compose maps (N, 2, 3); `inner` is applied first."""
    composed: DoubleArray = outer[:, :, :2] @ inner.astype(np.float64)
    composed[:, :, 2] += outer[:, :, 2]
    return composed


def _from_decoded(stored_to_view: DoubleArray, start_px: IntArray, halvings: IntArray) -> DoubleArray:
    """Turn maps (N, 2, 3) from stored pixels into maps from pixels of the decoded and halved region."""
    matrix = stored_to_view.copy()
    matrix[:, :, :2] *= 2.0 ** halvings[:, None, None]
    matrix[:, :, 2] += np.einsum("nij,nj->ni", stored_to_view[:, :, :2], start_px[:, ::-1])
    return matrix


def _least_magnification_px(geometry: GeometryConfig) -> float:
    """The smallest magnification over all draws, in pixels of a view per side of the box with its margin."""
    least = 1 / geometry.scale[1] if geometry.scale_is == "margin" else geometry.scale[0]
    if geometry.crop_probability == 1:
        least /= geometry.crop_side_frac[1]
    return geometry.side_px * least / _ROUNDED
