"""A file for the decoder, and the limits of size."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_PIXELS: Final = 100_000_000
"""Largest number of pixels of an image: 300 MB of RGB. A header with more is damaged or an attack."""

MAX_FILE_BYTES: Final = 2**28
"""Largest file that is read. A file with `MAX_PIXELS` pixels is rarely larger."""

MIN_PIXELS: Final = 4
"""Smallest number of pixels of an image, since the CPU's kernel reads eight bytes at once."""


class BadImage(ValueError):  # noqa: N818 - it is the file that is bad, and messages read that way
    """A file that must not reach the decoder. The message is the reason, without the file's name."""


class ImageFile(NamedTuple):
    """A checked file for the decoder."""

    encoded: npt.NDArray[np.uint8]
    """(bytes,) of the file; of a PNG or WebP, without metadata."""

    size_px: tuple[int, int]
    """Height and width as stored. `exif.upright_size_px` computes the size of the upright image."""

    orientation: int = 1
    """Exif's orientation: 1 is upright, 2 to 8 are rotated or mirrored."""

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
