"""Checks a file's structure before DALI's decoder may see it, and reads its header.

A file that DALI 2.4 cannot parse does not raise in `fn.decoders.image`: it ends the process. So every file's structure
is walked first, a JPEG's by a compiled kernel, a PNG's checksums by zlib. What passes may still be damaged inside; DALI
then raises or decodes it. The decoder gets no more of a PNG or a WebP than makes its pixels.
"""

from __future__ import annotations

import struct
import zlib
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from machine.compiled import cached
from pipelines.exif import read_orientation

MAX_PIXELS: Final = 100_000_000
"""Most pixels of an image that is decoded: 300 MB of RGB. A larger header is damage or an attack."""

MAX_FILE_BYTES: Final = 2**28
"""Largest file that is read; so many pixels are seldom coded in more."""

MIN_PIXELS: Final = 4
"""Fewest; smaller ones show nothing, and the CPU's kernel reads eight bytes at once."""

# A Huffman-coded scan spends at least one bit on each 8 x 8 block, so one byte codes at most 8 * 64 pixels.
_JPEG_PIXELS_PER_BYTE: Final = 512

_PNG_START: Final = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTHS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_PNG_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# The bit of a chunk's name that says that pixels can be had without it.
_PNG_ANCILLARY: Final = 0x20
# Deflate cannot compress by more than 1032.
_PNG_BYTES_PER_BYTE: Final = 1032

_WEBP_ANIMATED: Final = 2
_WEBP_ALPHA: Final = 16

_riff_chunk = struct.Struct("<4sI").unpack_from
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


class ImageFile(NamedTuple):
    """A file that the decoder can take."""

    encoded: npt.NDArray[np.uint8]
    """(bytes,) what the decoder gets: the file, a PNG or a WebP without its metadata."""

    size_px: tuple[int, int]
    """Height and width as stored; the decoder turns nothing."""

    orientation: int = 1
    """Exif's: 1 is upright, 2 to 8 are turned or mirrored."""

    @property
    def displayed_size_px(self) -> tuple[int, int]:
        """Width and height of the upright image."""
        height, width = self.size_px
        return (height, width) if self.orientation > 4 else (width, height)

    @property
    def is_jpeg(self) -> bool:
        """Whether a region of it can be decoded for less than the whole."""
        return bool(self.encoded[0] == 0xFF)


def check_image(data: bytes | npt.NDArray[np.uint8]) -> ImageFile:
    """Let pass what DALI's decoder can take: a JPEG, a PNG or a WebP that is whole in its structure.

    The kind is read from the bytes, not from a file name. Bytes after the image's end are tolerated.

    Args:
        data: the whole file; an array is (bytes,) uint8.

    Raises:
        BadImage: for anything else; says what was found.
    """
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data)
    fault, at, first, second = walk_jpeg(array)
    if fault == JpegFault.NONE:
        return ImageFile(array, (first, second), at)
    if fault != JpegFault.NO_JPEG:
        raise BadImage(_jpeg_reason(JpegFault(fault), at, first, second, len(array)))
    data = array.tobytes()
    if data.startswith(_PNG_START):
        return _check_png(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return _check_webp(data)
    raise BadImage(_kind_of(data))


class JpegFault(IntEnum):
    """What `walk_jpeg` finds."""

    NONE = 0
    NO_JPEG = 1
    CUT_IN_HEADER = 2
    NO_MARKER = 3
    SEGMENT = 4
    TWO_FRAMES = 5
    FRAME_NOT_READ = 6
    MARKER = 7
    NO_FRAME = 8
    FRAME_LENGTH = 9
    COMPONENTS = 10
    PRECISION = 11
    PIXELS = 12
    FEW_BYTES = 13
    NO_END = 14


@cached(numba.njit, nogil=True)
def walk_jpeg(data: Any) -> tuple[int, int, int, int]:
    """Follow a JPEG's segments up to its first scan, and look for its end from behind.

    Args:
        data: (bytes,) uint8.

    Returns:
        A `JpegFault`, the byte where it stands, and two numbers that tell of it. Without a fault: NONE, the Exif
        orientation, height and width.
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


def _jpeg_reason(fault: JpegFault, at: int, first: int, second: int, size: int) -> str:
    match fault:
        case JpegFault.CUT_IN_HEADER:
            return f"JPEG cut in its header after {size} bytes"
        case JpegFault.NO_MARKER:
            return f"JPEG without a marker at byte {at}"
        case JpegFault.SEGMENT:
            return f"JPEG segment {first:02X} at byte {at} of length {second} in a file of {size} bytes"
        case JpegFault.TWO_FRAMES:
            return "JPEG with two frame headers"
        case JpegFault.FRAME_NOT_READ:
            return "lossless or hierarchical JPEG is not read"
        case JpegFault.MARKER:
            return f"JPEG marker {first:02X} in the header, at byte {at}"
        case JpegFault.NO_FRAME:
            return "JPEG without a frame header before its data"
        case JpegFault.FRAME_LENGTH:
            return f"JPEG frame header of {first} bytes"
        case JpegFault.COMPONENTS:
            return f"JPEG frame header of {first} components in {second} bytes"
        case JpegFault.PRECISION:
            return f"JPEG with {first} bits a sample is not read"
        case JpegFault.PIXELS:
            return _size_reason("JPEG", first, second)
        case JpegFault.FEW_BYTES:
            return f"JPEG header of {first} pixels in a file of only {size} bytes"
        case _:
            return f"JPEG cut after {size} bytes: no end marker"


def _check_webp(data: bytes) -> ImageFile:
    """A still image in one chunk, lossy or lossless, alone or in the extended form with a canvas of its size."""
    size, end = len(data), 8 + _riff_chunk(data, 0)[1]
    if end > size or end % 2:
        raise BadImage(f"WebP of {end} bytes in a file of {size} bytes")
    at, canvas, image, orientation = 12, None, None, 0
    kept = []
    while at < end:
        if at + 8 > end:
            raise BadImage(f"WebP cut in the chunk at byte {at}")
        kind, length = _riff_chunk(data, at)
        body, after = at + 8, at + 8 + length + length % 2
        if after > end:
            raise BadImage(f"WebP chunk at byte {at} of length {length} in a file of {size} bytes")
        if kind == b"VP8X":
            if at != 12 or length != 10:
                raise BadImage(f"WebP canvas of {length} bytes at byte {at}")
            if data[body] & _WEBP_ANIMATED:
                raise BadImage("animated WebP is not read")
            canvas = _webp_canvas_px(data, body)
            kept += [data[at:body], bytes([data[body] & _WEBP_ALPHA]), data[body + 1 : after]]
        elif kind == b"EXIF":
            block = np.frombuffer(data[body : body + length].removeprefix(b"Exif\0\0"), np.uint8)
            orientation = orientation or read_orientation(block)
        elif kind in (b"VP8 ", b"VP8L"):
            if image is not None or (canvas is None and at != 12):
                raise BadImage(f"WebP with a second image, or one out of place, at byte {at}")
            image = _webp_lossy_px(data, body, length) if kind == b"VP8 " else _webp_lossless_px(data, body, length)
            kept.append(data[at:after])
        elif kind == b"ALPH":
            kept.append(data[at:after])
        at = after
    if image is None:
        raise BadImage("WebP without an image")
    if canvas is not None and canvas != image:
        raise BadImage(f"WebP image of {image[0]} x {image[1]} on a canvas of {canvas[0]} x {canvas[1]} pixels")
    width, height = image
    _pixels("WebP", width, height)
    chunks = b"".join(kept)
    encoded = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks
    return ImageFile(np.frombuffer(encoded, np.uint8), (height, width), orientation or 1)


def _webp_canvas_px(data: bytes, at: int) -> tuple[int, int]:
    width, height = (int.from_bytes(data[at + start : at + start + 3], "little") + 1 for start in (4, 7))
    return width, height


def _webp_lossy_px(data: bytes, at: int, length: int) -> tuple[int, int]:
    if length < 10 or data[at] & 1 or data[at + 3 : at + 6] != b"\x9d\x01\x2a":
        raise BadImage(f"WebP image at byte {at} without the header of a key frame")
    width, height = struct.unpack_from("<HH", data, at + 6)
    return width & 0x3FFF, height & 0x3FFF


def _webp_lossless_px(data: bytes, at: int, length: int) -> tuple[int, int]:
    if length < 5 or data[at] != 0x2F or data[at + 4] >> 5:
        raise BadImage(f"WebP image at byte {at} without the header of a lossless image")
    packed = int.from_bytes(data[at + 1 : at + 5], "little")
    return (packed & 0x3FFF) + 1, (packed >> 14 & 0x3FFF) + 1


def _check_png(data: bytes) -> ImageFile:
    size = len(data)
    at = len(_PNG_START)
    raw_bytes, coded_bytes, orientation = 0, 0, 0
    kept = [_PNG_START]
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
        elif kind == b"eXIf":
            orientation = orientation or read_orientation(np.frombuffer(data[at + 8 : end], np.uint8))
        if kind == b"tRNS" or not kind[0] & _PNG_ANCILLARY:
            kept.append(data[at : end + 4])
        at = end + 4
    if not coded_bytes:
        raise BadImage("PNG without image data")
    if raw_bytes > _PNG_BYTES_PER_BYTE * coded_bytes:
        raise BadImage(f"PNG header of {raw_bytes} bytes of pixels over only {coded_bytes} bytes of image data")
    width, height = _header(data, len(_PNG_START) + 8)[:2]
    return ImageFile(np.frombuffer(b"".join(kept), np.uint8), (height, width), orientation or 1)


def _png_raw_bytes(data: bytes, at: int) -> int:
    width, height, depth, colour, compression, filtering, interlace = _header(data, at)
    if depth not in _PNG_DEPTHS.get(colour, ()) or compression or filtering or interlace > 1:
        raise BadImage(f"PNG header of unknown values: depth {depth}, colour type {colour}, interlace {interlace}")
    return _pixels("PNG", width, height) * depth * _PNG_CHANNELS[colour] // 8 or 1


def _pixels(kind: str, width: int, height: int) -> int:
    pixels = width * height
    if not MIN_PIXELS <= pixels <= MAX_PIXELS:
        raise BadImage(_size_reason(kind, width, height))
    return pixels


def _size_reason(kind: str, width: int, height: int) -> str:
    return f"{kind} header says {width} x {height} pixels; {MIN_PIXELS} to {MAX_PIXELS} in all are read"


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
    if start.startswith(b"\xff\xd8") or start.startswith(_PNG_START[:4]):
        return f"an image's first bytes, then damage (file of {len(data)} bytes)"
    return "bytes of an unknown kind"
