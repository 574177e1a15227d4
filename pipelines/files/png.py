"""Checks a PNG's chunks and their checksums."""

from __future__ import annotations

import struct
import zlib
from typing import Final

import numpy as np

from peclr_dali.pipelines.files.exif import read_orientation
from peclr_dali.pipelines.files.image_file import BadImage, ImageFile, require_pixels

PNG_START: Final = b"\x89PNG\r\n\x1a\n"
_PNG_DEPTHS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
_PNG_CHANNELS: Final = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
# The bit of a chunk's name that marks it as not needed for the pixels.
_PNG_ANCILLARY: Final = 0x20
# Deflate cannot compress by more than 1032.
_PNG_BYTES_PER_BYTE: Final = 1032

_chunk = struct.Struct(">I4s").unpack_from
_header = struct.Struct(">IIBBBBB").unpack_from
_crc = struct.Struct(">I").unpack_from


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
        length, kind = _chunk(data, at)
        end = at + 8 + length
        if end + 4 > size:
            raise BadImage(f"PNG chunk at byte {at} has {length} bytes, more than the rest of the file ({size} bytes)")
        if zlib.crc32(memoryview(data)[at + 4 : end]) != _crc(data, end)[0]:
            raise BadImage(f"PNG chunk at byte {at} is damaged (wrong checksum)")
        if kind == b"IHDR":
            if raw_bytes or length != 13:
                raise BadImage(f"PNG header at byte {at} has {length} bytes, or is the second one")
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
        raise BadImage(f"PNG header says {raw_bytes} bytes of pixels, but the image data has only {coded_bytes} bytes")
    width, height = _header(data, len(PNG_START) + 8)[:2]
    return ImageFile(np.frombuffer(b"".join(kept), np.uint8), (height, width), orientation or 1)


def _png_raw_bytes(data: bytes, at: int) -> int:
    width, height, depth, colour, compression, filtering, interlace = _header(data, at)
    if depth not in _PNG_DEPTHS.get(colour, ()) or compression or filtering or interlace > 1:
        raise BadImage(f"PNG header has unknown values: depth {depth}, colour type {colour}, interlace {interlace}")
    return require_pixels("PNG", width, height) * depth * _PNG_CHANNELS[colour] // 8 or 1
