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

_PLACES: Final = 4
"""Number of places in data at an address where images are read."""


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


def spread(index: Index, count: int, most: int) -> IntArray:
    """At most `most` of the numbers below `count`, evenly spread.

    Of data at an address, a shard is downloaded for each image that is read. There they are runs at a few places.
    """
    runs = min(count, most)
    if index.store is not None and index.store.is_remote:
        runs = min(runs, _PLACES)
    length = min(count, most) // max(runs, 1)
    starts = np.linspace(0, count - length, runs).astype(np.int64)
    return np.unique(starts[:, None] + np.arange(length))


def sampled_sizes_px(index: Index) -> IntArray:
    """Heights and widths (N, 2) of a sample of the index's images, as they are stored; those that can be read."""
    sizes_px = []
    for row in spread(index, len(index), _SAMPLED).tolist():
        with suppress(OSError, BadImage):
            sizes_px.append(check_image(index.read(row)).size_px)
    return np.array(sizes_px, np.int64).reshape(-1, 2)
