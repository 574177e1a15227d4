"""Reads the sizes of images from their headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.files.image_file import BadImage, ImageFile

T = TypeVar("T")


def displayed_size_px(file: ImageFile) -> tuple[int, int]:
    """Height and width of an image as displayed, with its EXIF orientation applied."""
    height, width = file.size_px
    return (width, height) if file.orientation > 4 else (height, width)


def image_sizes_px(read: Callable[[T], bytes], images: Iterable[T], *, stored: bool = False) -> IntArray:
    """Heights and widths (N, 2) of images as displayed (EXIF orientation applied), or as they are `stored`.

    They are 0 for what cannot be read or is no image. `read` gives the bytes of an image, as `Index.read` of a row does
    and `read_file` of a path.
    """
    sizes_px = []
    for image in images:
        try:
            file = check_image(read(image))
        except (OSError, BadImage):
            sizes_px.append((0, 0))
        else:
            sizes_px.append(file.size_px if stored else displayed_size_px(file))
    return np.array(sizes_px, np.int64).reshape(-1, 2)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).astype(int).tolist()))
