"""Good files of every kind; images taken apart into their segments and chunks, and put together again; Exif data."""

import functools
import io
import struct
import zlib
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

PNG_START: Final = b"\x89PNG\r\n\x1a\n"
EXIF_START: Final = b"Exif\0\0"
ORIENTATION: Final = 0x0112
PROFILE: Final = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()

Entry = tuple[int, int, int, int]
"""Of an Exif directory: tag, type, count and value or offset."""


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    """The file that Pillow writes for a picture."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def smooth_picture(width: int = 72, height: int = 56, seed: int = 0) -> Image.Image:
    """An RGB picture with gradients and a few edges."""
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


@functools.cache
def good_files(size_px: tuple[int, int] = (72, 56)) -> dict[str, bytes]:
    """One file of every kind that must be read, by name, of a picture of this width and height."""
    picture = smooth_picture(*size_px)
    exif = exif_block((0x010E, 2, 4, 0x68616E64), (ORIENTATION, 3, 1, 6))
    see_through = picture.copy()
    see_through.putalpha(Image.fromarray(255 - np.asarray(picture)[..., 0] // 2))
    jpeg, pixels = encoded(picture, "JPEG"), np.asarray(picture)
    comment = b"\xff\xfe\x00\x0a a hand "
    few = picture.quantize(4)
    return {
        "jpeg": jpeg,
        "jpeg 4:4:4": encoded(picture, "JPEG", subsampling=0, quality=97),
        "jpeg 4:2:2": encoded(picture, "JPEG", subsampling=1),
        "jpeg progressive": encoded(picture, "JPEG", progressive=True),
        "jpeg gray": encoded(picture.convert("L"), "JPEG"),
        "jpeg cmyk": encoded(picture.convert("CMYK"), "JPEG"),
        "jpeg restart markers": encoded(picture, "JPEG", restart_marker_blocks=2),
        "jpeg exif": encoded(picture, "JPEG", exif=EXIF_START + exif),
        "jpeg icc of two segments": encoded(picture, "JPEG", icc_profile=bytes(range(256)) * 300),
        "jpeg segments": jpeg[:2] + comment * 20 + b"\xff\xed\x00\x04ab" + jpeg[2:],
        "jpeg fill bytes": jpeg[:2] + b"\xff\xff" + jpeg[2:],
        "jpeg trailing bytes": jpeg + b"trailing" * 9,
        "jpeg one colour": encoded(Image.new("RGB", size_px, (10, 20, 30)), "JPEG", optimize=True, quality=5),
        "png": encoded(picture, "PNG"),
        "png rgba": encoded(see_through, "PNG"),
        "png gray": encoded(picture.convert("L"), "PNG"),
        "png gray alpha": encoded(see_through.convert("LA"), "PNG"),
        "png palette": encoded(picture.convert("P"), "PNG"),
        "png bilevel": encoded(picture.convert("1"), "PNG"),
        "png gray 16 bit": png_of(pixels[..., :1].astype(np.int64) * 257, 16, 0),
        "png interlaced": png_of(pixels, 8, 2, interlace=True),
        "png interlaced 16 bit": png_of(pixels.astype(np.int64) * 256 + 99, 16, 2, interlace=True),
        "png interlaced 2 bit palette": png_of(
            np.asarray(few)[..., None], 2, 3, interlace=True, palette=bytes(few.getpalette() or b"")
        ),
        "png exif, text": encoded(picture, "PNG", exif=exif, dpi=(72, 72), icc_profile=PROFILE),
        "png trailing bytes": encoded(picture, "PNG") + b"trailing",
        "webp": encoded(picture, "WEBP"),
        "webp lossless": encoded(picture, "WEBP", lossless=True),
        "webp alpha": encoded(see_through, "WEBP"),
        "webp lossless alpha": encoded(see_through, "WEBP", lossless=True),
        "webp exif": encoded(picture, "WEBP", exif=exif, icc_profile=PROFILE),
        "webp trailing bytes": encoded(picture, "WEBP") + b"trailing",
    }


@dataclass
class Part:
    """A JPEG segment, or a chunk of a PNG or a WebP.

    Attributes:
        name: JPEG: one byte, the marker; else the four letters.
        body: without name, length and checksum.
        length: what the file says instead of the body's true length; None says the truth.
        sound: PNG: whether the checksum is right. WebP: whether an odd body is padded.
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
            at += data[at + 1] == 0xFF  # a fill byte
            (length,) = struct.unpack_from(">H", data, at + 2)
            if data[at + 1] != 0xFF:
                parts.append(Part(data[at + 1 : at + 2], data[at + 4 : at + 2 + length]))
                at += 2 + length
        return parts, data[at:]
    png = data.startswith(PNG_START)
    at, end = (8, len(data)) if png else (12, 8 + struct.unpack_from("<I", data, 4)[0])
    while at < end and not (parts and parts[-1].name == b"IEND"):
        name, (length,) = data[at + 4 * png :][:4], struct.unpack_from(">I" if png else "<4xI", data, at)
        parts.append(Part(name, data[at + 8 : at + 8 + length]))
        at += 8 + length + (4 if png else length % 2)
    return parts, data[at:]


def put_together(parts: list[Part], rest: bytes = b"") -> bytes:
    """The file of these parts, which were a JPEG's, a PNG's or a WebP's when `take_apart` made them."""
    if len(parts[0].name) == 1:
        return b"\xff\xd8" + b"".join(
            b"\xff" + one.name + struct.pack(">H", _length(one, 2) & 0xFFFF) + one.body for one in parts
        ) + rest  # fmt: skip
    if any(one.name in (b"IHDR", b"IDAT", b"IEND") for one in parts):
        return PNG_START + b"".join(
            struct.pack(">I", _length(one)) + one.name + one.body
            + struct.pack(">I", zlib.crc32(one.name + one.body) ^ (not one.sound)) for one in parts
        ) + rest  # fmt: skip
    body = b"WEBP" + b"".join(
        one.name + struct.pack("<I", _length(one)) + one.body + bytes(len(one.body) % 2 * one.sound) for one in parts
    )
    return b"RIFF" + struct.pack("<I", len(body) + len(body) % 2) + body + bytes(len(body) % 2) + rest


def _length(part: Part, more: int = 0) -> int:
    return (len(part.body) + more if part.length is None else part.length) & 0xFFFFFFFF


def exif_block(
    *entries: Entry, big: bool = True, mark: bytes | None = None, directory: int = 8, count: int | None = None,
    behind: int = 16,
) -> bytes:  # fmt: skip
    """A block of Exif data, from the byte-order mark on; `count` is what its directory says instead of the truth."""
    order = ">" if big else "<"
    out = (b"MM\0*" if big else b"II*\0") if mark is None else mark
    out += struct.pack(order + "IH", directory, len(entries) if count is None else count)
    for tag, kind, many, value in entries:
        out += struct.pack(order + "HHI", tag, kind, many)
        out += struct.pack(order + "HH", value & 0xFFFF, 0) if kind == 3 else struct.pack(order + "I", value)
    return out + bytes(behind)


def with_exif(data: bytes, block: bytes, size_px: tuple[int, int]) -> bytes:
    """A good file of this width and height with a block of Exif data before all others that it has."""
    parts, rest = take_apart(data)
    if len(parts[0].name) == 1:
        parts.insert(0, Part(b"\xe1", EXIF_START + block))
    elif parts[0].name == b"IHDR":
        parts.insert(1, Part(b"eXIf", block))
    else:
        parts = [part for part in parts if part.name != b"EXIF"]
        if parts[0].name != b"VP8X":
            parts.insert(0, Part(b"VP8X", bytes(4) + b"".join(struct.pack("<I", side - 1)[:3] for side in size_px)))
        parts[0].body = bytes([parts[0].body[0] | 8]) + parts[0].body[1:]
        parts.append(Part(b"EXIF", block))
    return put_together(parts, rest)


def png_of(
    samples: npt.NDArray[np.integer], depth: int, colour: int, *, interlace: bool = False, palette: bytes = b""
) -> bytes:
    """A PNG of (H, W, C) samples, of every colour type and depth; Adam7 if it is interlaced."""
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    rows = (
        row
        for top, left, down, across in (passes if interlace else [(0, 0, 1, 1)])
        for row in samples[top::down, left::across]
        if row.size
    )
    bits = range(depth - 1, -1, -1)
    raw = b"".join(b"\0" + np.packbits((row.reshape(-1, 1) >> bits & 1).astype(np.uint8)).tobytes() for row in rows)
    header = struct.pack(">IIBBBBB", samples.shape[1], samples.shape[0], depth, colour, 0, 0, int(interlace))
    parts = [Part(b"IHDR", header), Part(b"PLTE", palette), Part(b"IDAT", zlib.compress(raw, 1)), Part(b"IEND", b"")]
    return put_together([part for part in parts if part.name != b"PLTE" or palette])
