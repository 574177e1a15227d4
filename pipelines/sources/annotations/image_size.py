"""The size of an image file, for sources that need it before a decoder does."""

from __future__ import annotations

from pathlib import Path

from pipelines.files.check import check_image
from pipelines.files.image_file import BadImage
from pipelines.samples.index import read_file


def displayed_size_px(file: Path) -> tuple[int, int] | None:
    """Width and height of an image, EXIF orientation applied; None if the file is no image that can be read."""
    try:
        return check_image(read_file(str(file))).displayed_size_px
    except (OSError, BadImage):
        return None
