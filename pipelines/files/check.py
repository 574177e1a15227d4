"""Checks a file's structure before DALI's decoder may see it, and reads its header.

A file that DALI 2.4 cannot parse raises no error in `fn.decoders.image`: it ends the process. So the structure of every
file is checked first, of JPEGs by a compiled kernel. The compressed data may still be damaged; DALI then raises an
error or decodes it. PNGs and WebPs are passed on without their metadata.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from pipelines.files.image_file import BadImage, ImageFile
from pipelines.files.jpeg import NO_JPEG, SOUND, jpeg_reason, walk_jpeg
from pipelines.files.png import PNG_START, check_png
from pipelines.files.webp import check_webp

_OTHER_KINDS: Final = (
    (b"GIF8", "GIF is not read"),
    (b"BM", "BMP is not read"),
    (b"II*\0", "TIFF is not read"),
    (b"MM\0*", "TIFF is not read"),
    (b"\0\0\0\x0cjP", "JPEG 2000 is not read"),
    (b"\xff\x4f\xff\x51", "JPEG 2000 is not read"),
    (b"\xff\x0a", "JPEG XL is not read"),
    (b"\0\0\0\x0cJXL", "JPEG XL is not read"),
    (b"%PDF", "PDF, not an image"),
    (b"PK\x03\x04", "a ZIP archive, not an image"),
    (b"\x1f\x8b", "gzip, not an image"),
    (b"version https://git-lfs", "a Git LFS pointer, not the image (run 'git lfs pull')"),
)


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
    start = data[:256]
    for magic, kind in _OTHER_KINDS:
        if start.startswith(magic):
            return kind
    if start[4:8] == b"ftyp":
        return {b"avif": "AVIF is not read", b"heic": "HEIC is not read"}.get(start[8:12], "a video, not an image")
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "HTML, not an image"
    if text.startswith(b"<"):
        return "XML or SVG, not a picture of pixels"
    if not any(start):
        return "zero bytes"
    if start.startswith(b"\xff\xd8") or start.startswith(PNG_START[:4]):
        return f"damaged after the first bytes of an image (file of {len(data)} bytes)"
    return "bytes of an unknown kind"
