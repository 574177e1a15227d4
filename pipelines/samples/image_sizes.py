"""Reads sizes of images from their headers, to estimate the size of a dataset's images from a sample."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

import numpy as np

from pipelines.files.check import check_image
from pipelines.files.exif import upright_size_px
from pipelines.files.image_file import BadImage
from pipelines.samples.index import Index

_LOOKED_AT: Final = 32

_CHUNK_BYTES: Final = 2**28
"""Largest size of a DALI batch's decoded images, in bytes. A few batches are in memory at once."""

_MOST: Final = 256
"""Largest number of samples in a DALI batch; more are not faster."""


def read_upright_size_px(read: Callable[[], bytes]) -> tuple[int, int] | None:
    """Height and width of an image, EXIF orientation applied; None if it cannot be read or is not an image."""
    try:
        file = check_image(read())
    except (OSError, BadImage):
        return None
    height, width = upright_size_px(np.array([file.size_px]), np.array([file.orientation]))[0].tolist()
    return height, width


def largest_pixels(index: Index) -> int:
    """Number of pixels of the largest image in a sample of the index; 0 if none can be read."""
    looked_at = np.linspace(0, len(index) - 1, min(len(index), _LOOKED_AT)).astype(int).tolist()
    sizes_px = (read_upright_size_px(partial(index.read, sample)) or (0, 0) for sample in looked_at)
    return max((height * width for height, width in sizes_px), default=0)


def samples_at_once(pixels: int) -> int:
    """Number of images of this many pixels for a DALI batch; a few such batches fit into memory."""
    return int(np.clip(_CHUNK_BYTES // (3 * max(pixels, 1)), 1, _MOST))
