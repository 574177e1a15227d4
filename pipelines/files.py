"""What must be true of a file's bytes before DALI's decoder may see them.

A file that DALI 2.4 cannot parse does not raise in `fn.decoders.image`: it ends the process. So every file's structure
is walked first, which costs microseconds. What passes may still be damaged inside; DALI then raises or decodes it.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np
import numpy.typing as npt

MAX_PIXELS: Final = 100_000_000
"""Most pixels of an image that is decoded: 300 MB of RGB. A larger header is damage or an attack."""

MIN_PIXELS: Final = 4
"""Fewest; smaller ones show nothing, and the CPU's kernel reads eight bytes at once."""

_JPEG_START: Final = b"\xff\xd8\xff"
_JPEG_END: Final = b"\xff\xd9"
_SOS: Final = 0xDA
# Baseline, extended and progressive with Huffman codes, then the two with arithmetic codes.
_FRAMES_READ: Final = frozenset((0xC0, 0xC1, 0xC2, 0xC9, 0xCA))
_FRAMES_NOT_READ: Final = frozenset((0xC3, 0xC5, 0xC6, 0xC7, 0xCB, 0xCD, 0xCE, 0xCF))
_HUFFMAN_FRAMES: Final = frozenset((0xC0, 0xC1, 0xC2))
# A Huffman-coded scan spends at least one bit on each 8 x 8 block, so one byte codes at most 8 * 64 pixels.
_JPEG_PIXELS_PER_BYTE: Final = 512

_PNG_START: Final = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTHS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_PNG_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# Deflate cannot compress by more than 1032.
_PNG_BYTES_PER_BYTE: Final = 1032

_segment = struct.Struct(">BBH").unpack_from
_frame = struct.Struct(">BHHB").unpack_from
_chunk = struct.Struct(">I4s").unpack_from
_header = struct.Struct(">IIBBBBB").unpack_from
_crc = struct.Struct(">I").unpack_from

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


class BadImage(ValueError):  # noqa: N818 - it is the file that is bad, and messages read that way
    """The bytes of a file must not reach the decoder; the message is the reason, without the file's name."""


def check_image(data: bytes | npt.NDArray[np.uint8]) -> None:
    """Let pass what DALI's decoder can take: a JPEG or a PNG that is whole in its structure.

    The kind is read from the bytes, not from a file name. Bytes after the image's end are tolerated.

    Args:
        data: the whole file; an array is (bytes,) uint8.

    Raises:
        BadImage: for anything else; says what was found.
    """
    if not isinstance(data, bytes):
        data = data.tobytes()
    if data.startswith(_JPEG_START):
        _check_jpeg(data)
    elif data.startswith(_PNG_START):
        _check_png(data)
    else:
        raise BadImage(_kind_of(data))


def _check_jpeg(data: bytes) -> None:
    size = len(data)
    frame, pixels = 0, 0
    at = 2  # a segment's marker; its length counts itself but not the marker
    while True:
        if at + 4 > size:
            raise BadImage(f"JPEG cut in its header after {size} bytes")
        fill, marker, length = _segment(data, at)
        if fill != 0xFF:
            raise BadImage(f"JPEG without a marker at byte {at}")
        if marker == 0xFF:  # markers may be preceded by any number of fill bytes
            at += 1
            continue
        end = at + 2 + length
        if length < 2 or end > size:
            raise BadImage(f"JPEG segment {marker:02X} at byte {at} of length {length} in a file of {size} bytes")
        if marker == _SOS:
            break
        if marker in _FRAMES_READ:
            if frame:
                raise BadImage("JPEG with two frame headers")
            frame, pixels = marker, _jpeg_pixels(data, at + 4, length)
        elif marker in _FRAMES_NOT_READ:
            raise BadImage("lossless or hierarchical JPEG is not read")
        elif marker < 0xC0 or 0xD0 <= marker <= 0xD9:
            raise BadImage(f"JPEG marker {marker:02X} in the header, at byte {at}")
        at = end
    if not frame:
        raise BadImage("JPEG without a frame header before its data")
    if frame in _HUFFMAN_FRAMES and pixels > _JPEG_PIXELS_PER_BYTE * size:
        raise BadImage(f"JPEG header of {pixels} pixels in a file of only {size} bytes")
    if data.rfind(_JPEG_END, end) < 0:
        raise BadImage(f"JPEG cut after {size} bytes: no end marker")


def _jpeg_pixels(data: bytes, at: int, length: int) -> int:
    if length < 8:
        raise BadImage(f"JPEG frame header of {length} bytes")
    precision, height, width, components = _frame(data, at)
    if components not in (1, 3, 4) or length != 8 + 3 * components:
        raise BadImage(f"JPEG frame header of {components} components in {length} bytes")
    if precision != 8:
        raise BadImage(f"JPEG with {precision} bits a sample is not read")
    return _pixels("JPEG", width, height)


def _check_png(data: bytes) -> None:
    size = len(data)
    at = len(_PNG_START)
    raw_bytes, coded_bytes = 0, 0
    kind = b""
    while kind != b"IEND":
        if at + 12 > size:
            raise BadImage(f"PNG cut after {size} bytes")
        length, kind = _chunk(data, at)
        end = at + 8 + length
        if end + 4 > size:
            raise BadImage(f"PNG chunk at byte {at} of length {length} in a file of {size} bytes")
        if zlib.crc32(memoryview(data)[at + 4 : end]) != _crc(data, end)[0]:
            raise BadImage(f"PNG chunk at byte {at} is damaged (wrong checksum)")
        if kind == b"IHDR":
            if raw_bytes or length != 13:
                raise BadImage(f"PNG header of {length} bytes at byte {at}")
            raw_bytes = _png_raw_bytes(data, at + 8)
        elif not raw_bytes:
            raise BadImage("PNG does not begin with its header")
        elif kind == b"IDAT":
            coded_bytes += length
        at = end + 4
    if not coded_bytes:
        raise BadImage("PNG without image data")
    if raw_bytes > _PNG_BYTES_PER_BYTE * coded_bytes:
        raise BadImage(f"PNG header of {raw_bytes} bytes of pixels over only {coded_bytes} bytes of image data")


def _png_raw_bytes(data: bytes, at: int) -> int:
    width, height, depth, colour, compression, filtering, interlace = _header(data, at)
    if depth not in _PNG_DEPTHS.get(colour, ()) or compression or filtering or interlace > 1:
        raise BadImage(f"PNG header of unknown values: depth {depth}, colour type {colour}, interlace {interlace}")
    return _pixels("PNG", width, height) * depth * _PNG_CHANNELS[colour] // 8 or 1


def _pixels(kind: str, width: int, height: int) -> int:
    pixels = width * height
    if not MIN_PIXELS <= pixels <= MAX_PIXELS:
        raise BadImage(f"{kind} header says {width} x {height} pixels; {MIN_PIXELS} to {MAX_PIXELS} in all are read")
    return pixels


def _kind_of(data: bytes) -> str:
    if not data:
        return "empty file"
    start = data[:256]
    for magic, kind in _OTHER_KINDS:
        if start.startswith(magic):
            return kind
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return "WebP is not read"
    if start[4:8] == b"ftyp":
        return {b"avif": "AVIF is not read", b"heic": "HEIC is not read"}.get(start[8:12], "a video, not an image")
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "HTML, not an image"
    if text.startswith(b"<"):
        return "XML or SVG, not a picture of pixels"
    if not any(start):
        return "zero bytes"
    if start.startswith(b"\xff\xd8") or start.startswith(_PNG_START[:4]):
        return f"an image's first bytes, then damage (file of {len(data)} bytes)"
    return "bytes of an unknown kind"
