"""Checks a JPEG's structure up to its image data, compiled, since nearly all images are JPEGs."""

from typing import Any

import numba
import numpy as np

from peclr_dali.numba_cache import cached
from peclr_dali.pipelines.files.image_file import MAX_PIXELS, MIN_PIXELS, read_orientation, size_reason

# A Huffman-coded scan spends at least one bit on each 8 x 8 block, so one byte codes at most 8 * 64 pixels.
_JPEG_PIXELS_PER_BYTE = 512

SOUND = 0
NO_JPEG = 1
JPEG_FAULTS = {
    2: "JPEG cut in its header after {size} bytes",
    3: "JPEG without a marker at byte {at}",
    4: "JPEG segment {first:02X} at byte {at} of length {second} in a file of {size} bytes",
    5: "JPEG with two frame headers",
    6: "lossless or hierarchical JPEG is not read",
    7: "JPEG marker {first:02X} in the header, at byte {at}",
    8: "JPEG without a frame header before its data",
    9: "JPEG frame header of {first} bytes",
    10: "JPEG frame header of {first} components in {second} bytes",
    11: "JPEG with {first} bits a sample is not read",
    12: size_reason("JPEG", "{first}", "{second}"),
    13: "JPEG header of {first} pixels in a file of only {size} bytes",
    14: "JPEG cut after {size} bytes: no end marker",
}
"""Result of `walk_jpeg` other than `SOUND` and `NO_JPEG` -> message, given its numbers and the file's size in bytes."""


@cached(numba.njit, nogil=True)
def walk_jpeg(data: Any) -> tuple[int, int, int, int]:
    """Follow the segments of a JPEG, (bytes,) uint8, up to its first scan, and search its end marker backwards.

    Returns:
        A fault, its byte offset, and two numbers for its message. Without a fault: `SOUND`, the Exif orientation,
        height and width.
    """
    size = data.size
    if size < 3 or data[0] != 0xFF or data[1] != 0xD8 or data[2] != 0xFF:
        return 1, 0, 0, 0
    frame: Any = 0
    height: Any = 0
    width: Any = 0
    orientation = 0  # no Exif data yet
    at = 2  # a segment's marker; its length counts itself but not the marker
    while True:
        if at + 4 > size:
            return 2, at, 0, 0
        marker: Any = np.int64(data[at + 1])
        if data[at] != 0xFF:
            return 3, at, 0, 0
        if marker == 0xFF:  # markers may be preceded by any number of fill bytes
            at += 1
            continue
        length: Any = (np.int64(data[at + 2]) << 8) | np.int64(data[at + 3])
        end = at + 2 + length
        if length < 2 or end > size:
            return 4, at, marker, length
        if marker == 0xDA:  # start of scan
            break
        if marker in (0xC0, 0xC1, 0xC2, 0xC9, 0xCA):  # baseline, extended, progressive; the last two arithmetic-coded
            if frame:
                return 5, at, 0, 0
            if length < 8:
                return 9, at, length, 0
            components: Any = np.int64(data[at + 9])
            if components not in (1, 3, 4) or length != 8 + 3 * components:
                return 10, at, components, length
            precision: Any = np.int64(data[at + 4])
            if precision != 8:
                return 11, at, precision, 0
            height = (np.int64(data[at + 5]) << 8) | np.int64(data[at + 6])
            width = (np.int64(data[at + 7]) << 8) | np.int64(data[at + 8])
            frame = marker
            if not MIN_PIXELS <= width * height <= MAX_PIXELS:
                return 12, at, width, height
        elif 0xC3 <= marker <= 0xCF and marker != 0xC4 and marker != 0xC8 and marker != 0xCC:
            return 6, at, marker, 0
        elif marker < 0xC0 or 0xD0 <= marker <= 0xD9:
            return 7, at, marker, 0
        elif marker == 0xE1 and not orientation and _is_exif(data, at + 4, end):
            orientation = read_orientation(data[at + 10 : end])
        at = end
    if not frame:
        return 8, at, 0, 0
    if frame <= 0xC2 and width * height > _JPEG_PIXELS_PER_BYTE * size:
        return 13, at, width * height, 0
    for last in range(size - 2, end - 1, -1):
        if data[last] == 0xFF and data[last + 1] == 0xD9:
            return 0, max(orientation, 1), height, width
    return 14, at, 0, 0


@cached(numba.njit, nogil=True)
def _is_exif(data: Any, start: int, end: int) -> bool:
    """Whether a segment's body begins with "Exif", 0, 0."""
    if end - start < 6:
        return False
    a, b, c, d, e, f = data[start : start + 6]
    return bool(a == 0x45 and b == 0x78 and c == 0x69 and d == 0x66 and e == 0 and f == 0)
