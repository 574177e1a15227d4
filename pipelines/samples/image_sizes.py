"""Reads sizes of images from their headers, to estimate the size of a dataset's images from a sample."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

import numpy as np

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.exif import upright_size_px
from peclr_dali.pipelines.files.image_file import BadImage
from peclr_dali.pipelines.samples.index import Index

_SAMPLED: Final = 32
"""Number of images whose size is read."""


def read_upright_size_px(read: Callable[[], bytes]) -> tuple[int, int] | None:
    """Height and width of an image, EXIF orientation applied; None if it cannot be read or is not an image."""
    try:
        file = check_image(read())
    except (OSError, BadImage):
        return None
    height, width = upright_size_px(np.array([file.size_px]), np.array([file.orientation]))[0].tolist()
    return height, width


def upright_sizes_px(index: Index, rows: IntArray) -> IntArray:
    """Heights and widths (N, 2) of images of an index as in `read_upright_size_px`; 0 where one cannot be read."""
    sizes_px = [read_upright_size_px(partial(index.read, row)) or (0, 0) for row in rows.tolist()]
    return np.array(sizes_px, np.int64).reshape(-1, 2)


def spread(count: int, most: int) -> IntArray:
    """At most `most` of the numbers below `count`, evenly spread."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def sampled_sizes_px(index: Index) -> IntArray:
    """Heights and widths (N, 2) of a sample of the index's images, as they are stored; those that can be read."""
    sizes_px = []
    for row in spread(len(index), _SAMPLED).tolist():
        with suppress(OSError, BadImage):
            sizes_px.append(check_image(index.read(row)).size_px)
    return np.array(sizes_px, np.int64).reshape(-1, 2)
