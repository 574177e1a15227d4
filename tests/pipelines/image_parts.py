"""Images taken apart into their segments and chunks, and put together again; blocks of Exif data; plain PNGs."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

ORIENTATION: Final = 0x0112
PNG_START: Final = b"\x89PNG\r\n\x1a\n"
EXIF_START: Final = b"Exif\0\0"
Samples = npt.NDArray[np.integer]


@dataclass
class Part:
    """A JPEG segment, or a chunk of a PNG or a WebP.

    Attributes:
        name: JPEG: one byte, the marker; else the four letters.
        body: without name, length and checksum.
        length: what the file says instead of the body's true length; None says the truth.
        sound: PNG: whether the checksum is right. WebP: whether an odd body is padded. JPEG: nothing.
    """

    name: bytes
    body: bytes
    length: int | None = None
    sound: bool = True


def take_apart(data: bytes) -> tuple[list[Part], bytes]:
    """The parts of a whole JPEG (up to its first scan), PNG or WebP, and the bytes that follow them."""
    parts: list[Part] = []
    if data.startswith(b"\xff\xd8"):
        at = 2
        while data[at + 1] != 0xDA:
            (length,) = struct.unpack_from(">H", data, at + 2)
            parts.append(Part(data[at + 1 : at + 2], data[at + 4 : at + 2 + length]))
            at += 2 + length
        return parts, data[at:]
    if data.startswith(PNG_START):
        at = len(PNG_START)
        while at < len(data):
            length, name = struct.unpack_from(">I4s", data, at)
            parts.append(Part(name, data[at + 8 : at + 8 + length]))
            at += 12 + length
        return parts, b""
    at = 12
    while at < len(data):
        name, length = struct.unpack_from("<4sI", data, at)
        parts.append(Part(name, data[at + 8 : at + 8 + length]))
        at += 8 + length + length % 2
    return parts, b""


def put_together(kind: str, parts: list[Part], rest: bytes = b"") -> bytes:
    """A file of the kind "jpeg", "png" or "webp"."""
    if kind == "jpeg":
        return b"\xff\xd8" + b"".join(map(_jpeg_segment, parts)) + rest
    if kind == "png":
        return PNG_START + b"".join(map(_png_chunk, parts)) + rest
    body = b"WEBP" + b"".join(map(_webp_chunk, parts)) + rest
    return b"RIFF" + struct.pack("<I", len(body) + len(body) % 2) + body + bytes(len(body) % 2)


def _jpeg_segment(part: Part) -> bytes:
    length = len(part.body) + 2 if part.length is None else part.length
    return b"\xff" + part.name + struct.pack(">H", length & 0xFFFF) + part.body


def _png_chunk(part: Part) -> bytes:
    length = len(part.body) if part.length is None else part.length
    checksum = zlib.crc32(part.name + part.body) ^ (not part.sound)
    return struct.pack(">I", length & 0xFFFFFFFF) + part.name + part.body + struct.pack(">I", checksum)


def _webp_chunk(part: Part) -> bytes:
    length = len(part.body) if part.length is None else part.length
    return part.name + struct.pack("<I", length & 0xFFFFFFFF) + part.body + bytes(len(part.body) % 2 * part.sound)


Entry = tuple[int, int, int, int]
"""Of an Exif directory: tag, type, count and value or offset."""


def exif_block(
    entries: list[Entry], *, big: bool, mark: bytes | None = None, directory: int = 8, count: int | None = None,
    after: bytes = bytes(20),
) -> bytes:  # fmt: skip
    """A block of Exif data, from the byte-order mark on; `count` is what its directory says instead of the truth."""
    order = ">" if big else "<"
    start = (b"MM\0*" if big else b"II*\0") if mark is None else mark
    out = start + struct.pack(order + "IH", directory, len(entries) if count is None else count)
    for tag, kind, many, value in entries:
        out += struct.pack(order + "HHI", tag, kind, many)
        out += struct.pack(order + "HH", value & 0xFFFF, 0) if kind == 3 else struct.pack(order + "I", value)
    return out + after


def png_of(samples: Samples, depth: int, colour: int, *, interlace: bool, palette: bytes = b"") -> list[Part]:
    """The chunks of a PNG of (H, W, C) samples, of every colour type and depth; Adam7 if it is interlaced."""
    height, width = samples.shape[:2]
    passes = (
        [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
        if interlace
        else [(0, 0, 1, 1)]
    )
    raw = b"".join(
        b"\0" + _packed(row, depth)
        for top, left, down, across in passes
        for row in samples[top::down, left::across]
        if row.size
    )
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, int(interlace))
    return [
        Part(b"IHDR", header),
        *([Part(b"PLTE", palette)] if palette else []),
        Part(b"IDAT", zlib.compress(raw, 1)),
        Part(b"IEND", b""),
    ]


def _packed(row: Samples, depth: int) -> bytes:
    if depth == 16:
        return row.astype(">u2").tobytes()
    if depth == 8:
        return row.astype(np.uint8).tobytes()
    bits = row.reshape(-1, 1) >> np.arange(depth - 1, -1, -1) & 1
    return np.packbits(bits.astype(np.uint8)).tobytes()
