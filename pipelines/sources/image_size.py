"""The size of an image file, for sources that need it before a decoder does."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from pipelines.files import BadImage, check_image
from pipelines.index import read_file


def displayed_size_px(file: Path) -> tuple[int, int] | None:
    """Width and height of an image, EXIF orientation applied; None if the file is no image that can be read."""
    try:
        data = read_file(str(file))  # not by OpenCV, which a path that is not UTF-8 ends
        check_image(data)
    except (OSError, BadImage):
        return None
    pixels = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    return None if pixels is None else (pixels.shape[1], pixels.shape[0])
