"""Plans the views of a `Chunk` before its images are decoded: the image of each view, matrices, halvings, regions.

The plan follows from the files' headers, the boxes and the draws. The matrix that warps the pixels, transforms the
keypoints and is undone in the embeddings comes from this plan; no other code composes matrices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from peclr_dali.pipelines.arrays import BoolArray, DoubleArray, FloatArray, IntArray
from peclr_dali.pipelines.files.image_file import ImageFile, stored_to_upright_px, upright_size_px
from peclr_dali.pipelines.views.augmentation import GeometryConfig
from peclr_dali.pipelines.views.columns import Draw

HALVE_BELOW: Final = math.sqrt(0.5)
"""Magnification below which a view samples a halved source; the same limit holds for each further halving."""

MAX_HALVINGS: Final = 6
"""Largest number of halvings: enough for an image of 64 times the view's side."""

LEAST_PIXELS: Final = 2**18
"""Images with fewer pixels are decoded whole: a region would save little."""

LARGEST_SHARE: Final = 0.8
"""Largest share of the image's area; decoding a larger region takes as long as the whole image."""


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


_NO_PX, _NO_VIEWS = np.empty((0, 2), np.int64), np.empty((0, 0), np.float32)
_NO_PLAN = Plan(_NO_PX, _NO_PX, _NO_PX, _NO_VIEWS, _NO_VIEWS, _NO_VIEWS, _NO_VIEWS, _NO_PX)


@dataclass(frozen=True)
class Chunk:
    """N consecutive rows of a step, whose M images are read and decoded together: one batch of DALI.

    Every stage takes a chunk and returns it with more of its fields.

    Attributes:
        positions: (N,) int64, global positions in the run.
        samples: (M,) int64, the rows of the index that are used, substitutes included.
        bad: (K,) int64, rows of the index that could not be used; a row appears as often as it was tried.
        files: the M files, checked.
        plan: the views, which image each of them shows, and the regions of the images to decode.
    """

    positions: IntArray
    samples: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    bad: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    files: Sequence[ImageFile] = ()
    plan: Plan = _NO_PLAN

    def only(self, image: int) -> "Chunk":
        """The file and the region of one image, to decode it by itself."""
        region = replace(_NO_PLAN, start_px=self.plan.start_px[[image]], shape_px=self.plan.shape_px[[image]])
        return Chunk(self.positions[:1], files=[self.files[image]], plan=region)


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
    upright_px = upright_size_px(size_px, orientation)
    box = np.where(box_px[:, 2:] > 0, box_px, np.column_stack([upright_px[:, ::-1] / 2, upright_px.max(axis=1)]))
    mirrored = np.zeros(len(box), bool) if mirror is None else mirror
    to_upright = stored_to_upright_px(size_px, orientation).astype(np.float64)
    matrices, source_to_view, stored_to_view = [], [], []
    halvings = np.zeros(image.shape, np.int64)
    for shown, table, geometry, halved in zip(image, draws, geometries, halvings, strict=True):
        matrix, to_view, magnification = _compose(
            box[shown], table.astype(np.float64), geometry.side_px, mirrored[shown]
        )
        if geometry.antialias:
            halved[:] = count_halvings(size_px[shown], magnification)
        matrices.append(matrix)
        source_to_view.append(to_view)
        composed = to_view[:, :, :2] @ to_upright[shown]
        composed[:, :, 2] += to_view[:, :, 2]
        stored_to_view.append(composed)
    sides_px = [geometry.side_px for geometry in geometries]
    start_px, shape_px = find_regions(size_px, image, stored_to_view, halvings, sides_px, croppable)
    decoded_to_view = np.stack(stored_to_view)  # (V, N, 2, 3)
    decoded_to_view[..., 2] += np.einsum("vnij,vnj->vni", decoded_to_view[..., :2], start_px[image][..., ::-1])
    decoded_to_view[..., :2] *= 2.0 ** halvings[..., None, None]
    return Plan(
        image,
        start_px,
        shape_px,
        np.stack(draws),
        np.stack(matrices).astype(np.float32),
        np.stack(source_to_view).astype(np.float32),
        decoded_to_view.astype(np.float32),
        halvings,
    )


def _compose(
    box: DoubleArray, table: DoubleArray, side_px: int, mirror: BoolArray
) -> tuple[DoubleArray, DoubleArray, DoubleArray]:
    """Compose the matrices of one view of N rows, from boxes (N, 3) whose side is not 0.

    Returns:
        The augmentation and the map from source to view pixels, (N, 2, 3), and the magnification of the source, (N,).
    """
    angle, magnification = np.deg2rad(table[:, Draw.ANGLE_DEG]), table[:, Draw.MAGNIFICATION]
    matrix = np.empty((len(box), 2, 3))
    matrix[:, 0, 0] = matrix[:, 1, 1] = magnification * np.cos(angle)
    matrix[:, 1, 0] = magnification * np.sin(angle)  # y points down: positive turns clockwise on the screen
    matrix[:, 0, 1] = -matrix[:, 1, 0]
    matrix[table[:, Draw.FLIP] > 0, :, 0] *= -1
    # Another linear map is multiplied here; if it changes areas, `magnification` has to know.
    matrix[:, :, 2] = table[:, [Draw.SHIFT_X_FRAC, Draw.SHIFT_Y_FRAC]]
    if table[:, Draw.CROP].any():
        cropped = table[:, Draw.CROP] > 0  # u -> (u - k) / c comes before the matrix: k is the centre, c the side
        side = np.where(cropped, table[:, Draw.CROP_SIDE_FRAC], 1)
        centre = np.where(cropped[:, None], table[:, [Draw.CROP_X_FRAC, Draw.CROP_Y_FRAC]], 0)
        matrix[:, :, :2] /= side[:, None, None]
        matrix[:, :, 2] -= np.einsum("nij,nj->ni", matrix[:, :, :2], centre)
        magnification = magnification / side

    scale = side_px / box[:, 2]  # output pixels per source pixel before the augmentation
    to_view = np.empty_like(matrix)
    to_view[:, :, :2] = matrix[:, :, :2] * scale[:, None, None]
    to_view[mirror, :, 0] *= -1
    to_view[:, :, 2] = side_px * (matrix[:, :, 2] + 0.5) - np.einsum("nij,nj->ni", to_view[:, :, :2], box[:, :2])
    return matrix, to_view, scale * magnification


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


def _least_magnification_px(geometry: GeometryConfig) -> float:
    """The smallest magnification over all draws, in pixels of a view per side of the box with its margin."""
    least = 1 / geometry.scale[1] if geometry.scale_is == "margin" else geometry.scale[0]
    if geometry.crop_probability == 1:
        least /= geometry.crop_side_frac[1]
    return geometry.side_px * least / (1 + 1e-6)  # draws and boxes are float32


def find_regions(
    size_px: IntArray,
    image: IntArray,
    stored_to_view_px: Sequence[DoubleArray],
    halvings: IntArray,
    sides_px: Sequence[int],
    croppable: BoolArray | None,
) -> tuple[IntArray, IntArray]:
    """The region of each of M images that V views of N rows show, or the whole image if a region saves no time.

    A region is the smallest with all pixels that the views sample, in blocks of 2^halvings pixels. The decoder still
    reads the entropy-coded data before it. It skips the transform and colour conversion outside the region, and all
    data behind the region's last row. The pixels are bit-equal to a decoded whole image. Views may differ by some
    levels before the colour jitter, since the warp computes in float32 from another origin.

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
    block_px = 2 ** most_halvings[:, None]  # so that halving combines the same pixels as in the whole image
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
        # Two pixels for the warp's interpolation; two more, since decoders that interpolate chroma may differ there.
        margin = 2 * block_px + 2
        bounded = np.isfinite(low) & np.isfinite(high)
        low = np.where(bounded, np.clip(low - margin, 0, size_px), 0)
        high = np.where(bounded, np.clip(high + margin, 0, size_px), size_px)
    least = 4 * block_px
    start_px = np.minimum(np.floor(low).astype(np.int64), np.maximum(size_px - least, 0)) // block_px * block_px
    stop_px = -(-np.maximum(np.ceil(high).astype(np.int64), start_px + least) // block_px) * block_px
    shape_px = np.minimum(stop_px, size_px) - start_px
    pixels = size_px.prod(axis=1)
    pays = croppable & (pixels >= LEAST_PIXELS) & (shape_px.prod(axis=1) < LARGEST_SHARE * pixels)
    return np.where(pays[:, None], start_px, 0), np.where(pays[:, None], shape_px, size_px)
