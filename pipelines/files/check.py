"""Checks a file's structure before DALI's decoder may see it, and reads its header.

A file that DALI 2.4 cannot parse raises no error in `fn.decoders.image`: it ends the process. So the structure of every
file is checked first, of JPEGs by a compiled kernel. The compressed data may still be damaged; DALI then raises an
error or decodes it. PNGs and WebPs are passed on without their metadata.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from peclr_dali.pipelines.files.image_file import BadImage, ImageFile
from peclr_dali.pipelines.files.jpeg import NO_JPEG, SOUND, jpeg_reason, walk_jpeg
from peclr_dali.pipelines.files.png_webp import PNG_START, check_png, check_webp

_OTHER_KINDS: Final = (
    (0, b"GIF8", "GIF is not read"),
    (0, b"BM", "BMP is not read"),
    (0, b"II*\0", "TIFF is not read"),
    (0, b"MM\0*", "TIFF is not read"),
    (4, b"ftypavif", "AVIF is not read"),
    (4, b"ftypheic", "HEIC is not read"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the image (run 'git lfs pull')"),
    (0, bytes(256), "zero bytes"),
    (0, b"\xff\xd8", "a JPEG that is damaged after its first bytes"),
    (0, PNG_START[:4], "a PNG that is damaged after its first bytes"),
)
"""Offset, bytes there, and what such a file is."""


def check_image(data: bytes | npt.NDArray[np.uint8]) -> ImageFile:
    """Check that a file is a JPEG, PNG or WebP with a complete structure, which DALI's decoder can read.

    The kind is read from the bytes of the whole file, not from its name. Bytes after the image's end are tolerated.

    Raises:
        BadImage: the file is anything else; the message has the reason.
    """
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data)
    fault, at, first, second = walk_jpeg(array)
    if fault == SOUND:
        return ImageFile(array, (first, second), at)
    if fault != NO_JPEG:
        raise BadImage(jpeg_reason(fault, at, first, second, len(array)))
    data = array.tobytes()
    if data.startswith(PNG_START):
        return check_png(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return check_webp(data)
    raise BadImage(_kind_of(data))


def _kind_of(data: bytes) -> str:
    if not data:
        return "empty file"
    for at, magic, kind in _OTHER_KINDS:
        if data.startswith(magic, at):
            return kind
    if data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return "HTML or XML, not an image"
    return f"bytes of an unknown kind, which begin with {data[:12]!r}"
