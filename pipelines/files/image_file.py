"""A file for the decoder: its orientation from Exif data, the map to upright pixels, and the limits of size.

The decoder does not apply the orientation (`decode` in render/dali_graph.py): two readers of Exif data in DALI 2.4
disagree about damaged data, and one then writes a 72 x 56 image into a buffer of 56 x 72, beyond its end. Instead, the
orientation is part of the map from stored pixels to the view.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from peclr_dali.numba_cache import cached
from peclr_dali.pipelines.arrays import AnyArray, IntArray, PixelArray

MAX_PIXELS = 100_000_000
"""Largest number of pixels of an image: 300 MB of RGB. A header with more is damaged or an attack."""

MAX_FILE_BYTES = 2**28
"""Largest file that is read. A file with `MAX_PIXELS` pixels is rarely larger."""

MIN_PIXELS = 4
"""Smallest number of pixels of an image, since the CPU's kernel reads eight bytes at once."""


class BadImage(ValueError):  # noqa: N818 - it is the file that is bad, and messages read that way
    """A file that must not reach the decoder. The message is the reason, without the file's name."""


class ImageFile(NamedTuple):
    """A checked file for the decoder.

    Attributes:
        encoded: (bytes,) of the file; of a PNG or WebP, without metadata.
        size_px: height and width as stored.
        orientation: Exif's; 1 is upright, 2 to 8 are rotated or mirrored.
    """

    encoded: PixelArray
    size_px: tuple[int, int]
    orientation: int = 1

    @property
    def displayed_size_px(self) -> tuple[int, int]:
        """Height and width as displayed, with the orientation applied."""
        height, width = self.size_px
        return (width, height) if self.orientation > 4 else (height, width)

    @property
    def is_jpeg(self) -> bool:
        """Whether it is a JPEG, of which a region can be decoded faster than the whole."""
        return bool(self.encoded[0] == 0xFF)


def require_pixels(kind: str, width: int, height: int) -> int:
    """Number of pixels of an image.

    Raises:
        BadImage: there are too few or too many.
    """
    pixels = width * height
    if not MIN_PIXELS <= pixels <= MAX_PIXELS:
        raise BadImage(size_reason(kind, width, height))
    return pixels


def size_reason(kind: str, width: object, height: object) -> str:
    """The reason why an image of this size is not read."""
    return f"{kind} header says {width} x {height} pixels; only images of {MIN_PIXELS} to {MAX_PIXELS} pixels are read"


# For orientations 1 to 8: matrix that turns directions (x, y) of the stored image into those of the upright image.
_UPRIGHT = np.array([
    [[1, 0], [0, 1]], [[-1, 0], [0, 1]], [[-1, 0], [0, -1]], [[1, 0], [0, -1]],
    [[0, 1], [1, 0]], [[0, -1], [1, 0]], [[0, -1], [-1, 0]], [[0, 1], [-1, 0]],
])  # fmt: skip


@cached(numba.njit, nogil=True)
def read_orientation(exif: Any) -> int:
    """Read the orientation from a block of Exif data (Exif 2.3, tag 0x0112): 1 to 8, where 1 is upright.

    The block is (bytes,) uint8, from the byte order mark on.

    The first entry of this tag in the first directory counts. The result is 1 if there is none, if it is not a single
    SHORT of 1 to 8, or if the block is damaged before it.
    """
    if len(exif) < 8:
        return 1
    little = exif[0] == 0x49 and exif[1] == 0x49 and exif[2] == 0x2A and exif[3] == 0
    big = exif[0] == 0x4D and exif[1] == 0x4D and exif[2] == 0 and exif[3] == 0x2A
    if not little and not big:
        return 1
    directory = _number(exif, 4, 4, little)
    if directory + 2 > len(exif):
        return 1
    at = directory + 2
    for _ in range(_number(exif, directory, 2, little)):
        if at + 12 > len(exif):  # bytes of an entry
            return 1
        if _number(exif, at, 2, little) == 0x0112:
            kind, count = _number(exif, at + 2, 2, little), _number(exif, at + 4, 4, little)
            value: Any = _number(exif, at + 8, 2, little)
            return value if kind == 3 and count == 1 and 1 <= value <= 8 else 1
        at += 12
    return 1


@cached(numba.njit, nogil=True)
def _number(data: Any, at: int, count: int, little: bool) -> Any:
    """The unsigned number in `count` bytes."""
    number: Any = np.int64(0)
    for place in range(count):
        number |= np.int64(data[at + (place if little else count - 1 - place)]) << (8 * place)
    return number


def upright_size_px(size_px: IntArray, orientation: IntArray) -> IntArray:
    """(N, 2) heights and widths of upright images, from (N, 2) of the stored images and their orientations (N,)."""
    return np.asarray(np.where(orientation[:, None] > 4, size_px[:, ::-1], size_px))


def stored_to_upright_px(size_px: IntArray, orientation: IntArray) -> AnyArray:
    """(N, 2, 3) maps from stored pixels (x, y) to upright ones, both corner-based; arguments as `upright_size_px`."""
    linear = _UPRIGHT[orientation - 1]
    # A reversed axis starts at the opposite border.
    offset = -np.einsum("nij,nj->ni", np.minimum(linear, 0), size_px[:, ::-1])
    return np.concatenate([linear, offset[..., None]], axis=-1)
