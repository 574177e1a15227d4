"""Checks the structure of a PNG (chunks, checksums) or a WebP (RIFF chunks)."""

import struct
import zlib

import numpy as np

from peclr_dali.pipelines.files.image_file import BadImage, ImageFile, read_orientation, require_pixels

PNG_START = b"\x89PNG\r\n\x1a\n"
# Colour type -> channels, and their possible depths in bits.
_PNG_KINDS = {0: (1, (1, 2, 4, 8, 16)), 2: (3, (8, 16)), 3: (1, (1, 2, 4, 8)), 4: (2, (8, 16)), 6: (4, (8, 16))}


def check_png(data: bytes) -> ImageFile:
    """Check that a PNG's structure is complete.

    Raises:
        BadImage: it is not.
    """
    size = len(data)
    at = len(PNG_START)
    raw_bytes, coded_bytes, orientation = 0, 0, 0
    kept = [PNG_START]
    kind = b""
    while kind != b"IEND":
        if at + 12 > size:
            raise BadImage(f"PNG cut after {size} bytes")
        length, kind = struct.unpack_from(">I4s", data, at)
        end = at + 8 + length
        if end + 4 > size:
            raise BadImage(f"PNG chunk at byte {at} has {length} bytes, more than the rest of the file ({size} bytes)")
        if zlib.crc32(memoryview(data)[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            raise BadImage(f"PNG chunk at byte {at} is damaged (wrong checksum)")
        if kind == b"IHDR":
            if raw_bytes or length != 13:
                raise BadImage(f"PNG header at byte {at} has {length} bytes, or is the second one")
            width, height, depth, colour, *methods = struct.unpack_from(">IIBBBBB", data, at + 8)
            channels, depths = _PNG_KINDS.get(colour, (0, ()))
            if depth not in depths or methods not in ([0, 0, 0], [0, 0, 1]):  # compression, filter, interlace
                raise BadImage(
                    f"PNG header has unknown values: depth {depth}, colour type {colour}, interlace {methods[2]}"
                )
            raw_bytes = require_pixels("PNG", width, height) * depth * channels // 8 or 1
        elif not raw_bytes:
            raise BadImage("PNG does not begin with its header")
        elif kind == b"IDAT":
            coded_bytes += length
        elif kind == b"eXIf":
            orientation = orientation or read_orientation(np.frombuffer(data[at + 8 : end], np.uint8))
        if kind == b"tRNS" or not kind[0] & 0x20:  # this bit marks what the pixels do not need
            kept.append(data[at : end + 4])
        at = end + 4
    if not coded_bytes:
        raise BadImage("PNG without image data")
    if raw_bytes > 1032 * coded_bytes:  # Deflate cannot compress by more
        raise BadImage(f"PNG header says {raw_bytes} bytes of pixels, but the image data has only {coded_bytes} bytes")
    return ImageFile(np.frombuffer(b"".join(kept), np.uint8), (height, width), orientation or 1)


def check_webp(data: bytes) -> ImageFile:
    """Check that a WebP has one still image in one chunk, lossy or lossless. A canvas must have the image's size.

    Raises:
        BadImage: it is anything else.
    """
    size, end = len(data), 8 + struct.unpack_from("<4sI", data, 0)[1]
    if end > size:
        raise BadImage(f"WebP header says {end} bytes, but the file has {size} bytes")
    if end % 2:
        raise BadImage(f"WebP header says {end} bytes; expected an even number")
    at, canvas, image, orientation = 12, None, None, 0
    kept = []
    while at < end:
        if at + 8 > end:
            raise BadImage(f"WebP cut in the chunk at byte {at}")
        kind, length = struct.unpack_from("<4sI", data, at)
        body, after = at + 8, at + 8 + length + length % 2
        if after > end:
            raise BadImage(f"WebP chunk at byte {at} has {length} bytes, more than the rest of the file ({size} bytes)")
        if kind == b"VP8X":
            if at != 12 or length != 10:
                raise BadImage(f"WebP canvas at byte {at} has {length} bytes; expected 10 bytes at byte 12")
            if data[body] & 2:
                raise BadImage("animated WebP is not read")
            canvas = tuple(int.from_bytes(data[body + side : body + side + 3], "little") + 1 for side in (4, 7))
            # Of the flags only that of transparency is kept.
            kept += [data[at:body], bytes([data[body] & 16]), data[body + 1 : after]]
        elif kind == b"EXIF":
            block = np.frombuffer(data[body : body + length].removeprefix(b"Exif\0\0"), np.uint8)
            orientation = orientation or read_orientation(block)
        elif kind in (b"VP8 ", b"VP8L"):
            if image is not None or (canvas is None and at != 12):
                raise BadImage(f"WebP with a second or misplaced image at byte {at}")
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
    require_pixels("WebP", width, height)
    chunks = b"".join(kept)
    encoded = b"RIFF" + struct.pack("<I", 4 + len(chunks)) + b"WEBP" + chunks
    return ImageFile(np.frombuffer(encoded, np.uint8), (height, width), orientation or 1)


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
