"""Which part of a large image its views reach, so that nothing else is decoded.

A decoder that is told a region still reads the code before it, but spares the transform and the colours of what lies
outside, and all that comes after. The pixels inside are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numba
import numpy as np
import numpy.typing as npt

from pipelines.draws import BoolArray, FloatArray, GeometryConfig, IntArray
from pipelines.matrices import ViewMatrices, compose

LEAST_PIXELS: Final = 2**18
"""A smaller image is decoded whole: there is little to spare."""

LARGEST_SHARE: Final = 0.8
"""Of the image's area; a larger region costs as much as the whole."""

_MARGIN_PX: Final = 2
"""Decoders that interpolate chroma may see its neighbours differently at a region's border."""

_ORIENTATION: Final = 0x0112


@dataclass(frozen=True)
class Regions:
    """The parts of N images that are decoded.

    Attributes:
        size_px: (N, 2) height and width of the image; 0 where all of it is decoded, whatever its size.
        start_px: (N, 2) top and left of the region.
        shape_px: (N, 2) height and width of the region.
    """

    size_px: IntArray
    start_px: IntArray
    shape_px: IntArray

    @property
    def partial(self) -> BoolArray:
        """(N,) whether only a region is decoded."""
        return self.size_px[:, 0] > 0

    def fractions(self) -> tuple[FloatArray, FloatArray]:
        """Start and shape of each region as fractions of its image, (N, 2) each; a whole image is 0, 0 and 1, 1."""
        size = np.maximum(self.size_px, 1)
        shape = np.where(self.partial[:, None], self.shape_px / size, 1)
        return (self.start_px / size).astype(np.float32), shape.astype(np.float32)


def whole_images(count: int) -> Regions:
    """Nothing is spared."""
    zeros = np.zeros((count, 2), np.int64)
    return Regions(zeros, zeros, zeros)


def find_regions(
    encoded: Sequence[npt.NDArray[np.uint8]],
    box_px: FloatArray,
    draws: Sequence[FloatArray],
    geometry: GeometryConfig,
    mirror: BoolArray | None = None,
) -> Regions | None:
    """What the views of N images reach, where decoding only that pays; None where it pays for none of them.

    Args:
        encoded: N files that have passed `pipelines.files.check_image`.
        box_px: (N, 3) canonical boxes.
        draws: per view, the (N, len(Draw)) table of draws.
        geometry: of the views.
        mirror: as in `pipelines.matrices.compose`.
    """
    size_px = np.array([jpeg_size_px(data) for data in encoded], np.int64)
    size_px *= size_px.prod(axis=1, keepdims=True) >= LEAST_PIXELS
    if not size_px.any():
        return None
    matrices = [compose(box_px, np.maximum(size_px, 1), table, geometry, mirror) for table in draws]
    start_px, stop_px = _reach_px(size_px, matrices, geometry.side_px)
    shape_px = stop_px - start_px
    worthwhile = (shape_px.prod(axis=1) < LARGEST_SHARE * size_px.prod(axis=1))[:, None]
    if not worthwhile.any():
        return None
    return Regions(*(np.where(worthwhile, array, 0) for array in (size_px, start_px, shape_px)))


def _reach_px(size_px: IntArray, matrices: Sequence[ViewMatrices], side_px: int) -> tuple[IntArray, IntArray]:
    """Start and stop (N, 2), row and column, of the least region that holds every pixel that the views sample.

    It starts and ends at whole blocks of as many pixels as the views halve, so that halving pairs the same pixels as
    in the whole image.
    """
    corners_px = np.array([[0, 0], [side_px, 0], [0, side_px], [side_px, side_px]], np.float64)
    low, high = np.full(size_px.shape, np.inf), np.full(size_px.shape, -np.inf)
    with np.errstate(all="ignore"):  # views out of all bounds are refused where they are made
        for view in matrices:
            (a, b, u), (c, d, v) = view.source_to_view_px.astype(np.float64).transpose(1, 2, 0)[..., None]
            x, y = corners_px[:, 0] - u, corners_px[:, 1] - v  # (N, 4)
            determinant = a * d - b * c
            reached = np.stack([a * y - c * x, d * x - b * y], axis=1) / determinant[:, None]  # (N, 2, 4): y, x
            low, high = np.minimum(low, reached.min(axis=2)), np.maximum(high, reached.max(axis=2))
        block = 2 ** np.max([view.halvings for view in matrices], axis=0)[:, None]
        margin = 2 * block + _MARGIN_PX  # two pixels as the warp sees them
        bounded = np.isfinite(low) & np.isfinite(high)
        low = np.where(bounded, np.clip(low - margin, 0, size_px), 0)
        high = np.where(bounded, np.clip(high + margin, 0, size_px), size_px)
    least = 4 * block
    start = np.minimum(np.floor(low).astype(np.int64), np.maximum(size_px - least, 0)) // block * block
    stop = -(-np.maximum(np.ceil(high).astype(np.int64), start + least) // block) * block
    return start, np.minimum(stop, size_px)


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def jpeg_size_px(data: Any) -> tuple[int, int]:
    """Height and width of a JPEG that is decoded as it is stored, from its header.

    0, 0 for every other kind of file, and where EXIF says, or may say, that the image is to be turned.

    Args:
        data: (bytes,) uint8, the whole file, which has passed `pipelines.files.check_image`.
    """
    if data[0] != 0xFF:
        return 0, 0
    at = 2
    while True:
        marker = data[at + 1]
        if marker == 0xFF:  # markers may be preceded by any number of fill bytes
            at += 1
            continue
        if marker in (0xC0, 0xC1, 0xC2, 0xC9, 0xCA):
            return _number(data, at + 5, 2, False), _number(data, at + 7, 2, False)
        stop = at + 2 + _number(data, at + 2, 2, False)
        if marker == 0xE1 and not _is_upright(data[at + 4 : stop]):
            return 0, 0
        at = stop


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _is_upright(app1: Any) -> bool:
    """Whether an APP1 segment is no EXIF, or one that leaves the image as it is stored."""
    if len(app1) < 6 or app1[0] != 0x45 or app1[1] != 0x78 or app1[2] != 0x69 or app1[3] != 0x66:  # Exif
        return True
    tiff = app1[6:]
    if len(tiff) < 8 or tiff[0] != tiff[1] or tiff[0] not in (0x49, 0x4D):
        return False
    little = tiff[0] == 0x49
    at = _number(tiff, 4, 4, little)
    if at + 2 > len(tiff):
        return False
    entries = _number(tiff, at, 2, little)
    for entry in range(at + 2, at + 2 + 12 * entries, 12):
        if entry + 12 > len(tiff):
            return False
        if _number(tiff, entry, 2, little) == _ORIENTATION:
            return bool(_number(tiff, entry + 8, 2, little) == 1)
    return True


@numba.njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
def _number(data: Any, at: int, count: int, little: bool) -> Any:
    """The unsigned number in `count` bytes."""
    number: Any = np.int64(0)
    for place in range(count):
        number |= np.int64(data[at + (place if little else count - 1 - place)]) << (8 * place)
    return number
