"""A file that the decoder can take, and the limits of what it takes."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

MAX_PIXELS: Final = 100_000_000
"""Most pixels of an image that is decoded: 300 MB of RGB. A larger header is damage or an attack."""

MAX_FILE_BYTES: Final = 2**28
"""Largest file that is read; so many pixels are seldom coded in more."""

MIN_PIXELS: Final = 4
"""Fewest; smaller ones show nothing, and the CPU's kernel reads eight bytes at once."""


class BadImage(ValueError):  # noqa: N818 - it is the file that is bad, and messages read that way
    """The bytes of a file must not reach the decoder; the message is the reason, without the file's name."""


class ImageFile(NamedTuple):
    """A file that the decoder can take."""

    encoded: npt.NDArray[np.uint8]
    """(bytes,) what the decoder gets: the file, a PNG or a WebP without its metadata."""

    size_px: tuple[int, int]
    """Height and width as stored; the decoder turns nothing."""

    orientation: int = 1
    """Exif's: 1 is upright, 2 to 8 are turned or mirrored."""

    @property
    def displayed_size_px(self) -> tuple[int, int]:
        """Width and height of the upright image."""
        height, width = self.size_px
        return (height, width) if self.orientation > 4 else (width, height)

    @property
    def is_jpeg(self) -> bool:
        """Whether a region of it can be decoded for less than the whole."""
        return bool(self.encoded[0] == 0xFF)


def require_pixels(kind: str, width: int, height: int) -> int:
    """Pixels of an image.

    Raises:
        BadImage: they are too few or too many.
    """
    pixels = width * height
    if not MIN_PIXELS <= pixels <= MAX_PIXELS:
        raise BadImage(size_reason(kind, width, height))
    return pixels


def size_reason(kind: str, width: int, height: int) -> str:
    """Why an image of that size is not read."""
    return f"{kind} header says {width} x {height} pixels; {MIN_PIXELS} to {MAX_PIXELS} in all are read"
