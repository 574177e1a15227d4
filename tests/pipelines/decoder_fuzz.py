"""Good files of every kind, and damage to their bytes."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image

from peclr_dali.pipelines.files.check import check_image
from peclr_dali.pipelines.render.chunk import chunk_of
from tests.pipelines.harness import decode_chunk


def encoded(picture: Image.Image, kind: str, **options: object) -> bytes:
    """The file that Pillow writes for a picture."""
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def smooth_picture(width: int = 72, height: int = 56, seed: int = 0) -> Image.Image:
    """An RGB picture with gradients and a few edges."""
    pixels = np.random.default_rng(seed).integers(0, 256, (7, 9, 3), np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def good_files(picture: Image.Image | None = None) -> dict[str, bytes]:
    """One file of every kind that must be read, by name; most are of the picture, if one is given."""
    picture = smooth_picture() if picture is None else picture
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: rotate by 90 degrees to display
    exif[0x010E] = "a hand"
    sixteen_bit = Image.fromarray(np.arange(72 * 56, dtype=np.uint16).reshape(56, 72) * 16)
    bilevel = picture.convert("1")
    see_through = picture.copy()
    see_through.putalpha(100)
    jpeg = encoded(picture, "JPEG")
    comment = b"\xff\xfe\x00\x0a a hand "
    return {
        "jpeg": jpeg,
        "jpeg 4:4:4": encoded(picture, "JPEG", subsampling=0, quality=97),
        "jpeg progressive": encoded(picture, "JPEG", progressive=True),
        "jpeg gray": encoded(picture.convert("L"), "JPEG"),
        "jpeg cmyk": encoded(picture.convert("CMYK"), "JPEG"),
        "jpeg restart markers": encoded(picture, "JPEG", restart_marker_blocks=2),
        "jpeg exif": encoded(picture, "JPEG", exif=exif.tobytes()),
        "jpeg icc of two segments": encoded(picture, "JPEG", icc_profile=bytes(range(256)) * 300),
        "jpeg segments": jpeg[:2] + comment * 20 + b"\xff\xed\x00\x04ab" + jpeg[2:],
        "jpeg fill bytes": jpeg[:2] + b"\xff\xff" + jpeg[2:],
        "jpeg trailing bytes": jpeg + b"trailing" * 9,
        "jpeg one colour": encoded(Image.new("RGB", (600, 800), (10, 20, 30)), "JPEG", optimize=True, quality=5),
        "jpeg one colour progressive": encoded(Image.new("L", (600, 800), 99), "JPEG", progressive=True, quality=5),
        "png": encoded(picture, "PNG"),
        "png rgba": encoded(picture.convert("RGBA"), "PNG"),
        "png gray": encoded(picture.convert("L"), "PNG"),
        "png gray alpha": encoded(picture.convert("LA"), "PNG"),
        "png palette": encoded(picture.convert("P"), "PNG"),
        "png bilevel": encoded(bilevel, "PNG"),
        "png 16 bit": encoded(sixteen_bit, "PNG"),
        "png exif, text": encoded(picture, "PNG", exif=exif.tobytes(), dpi=(72, 72)),
        "png trailing bytes": encoded(picture, "PNG") + b"trailing",
        "webp": encoded(picture, "WEBP"),
        "webp lossless": encoded(picture, "WEBP", lossless=True),
        "webp alpha": encoded(see_through, "WEBP"),
        "webp lossless alpha": encoded(see_through, "WEBP", lossless=True),
        "webp exif": encoded(picture, "WEBP", exif=exif.tobytes()),
        "webp trailing bytes": encoded(picture, "WEBP") + b"trailing",
        "png one colour": encoded(Image.new("1", (3000, 2000)), "PNG", compress_level=9),
    }


def mutated(data: bytes, rng: np.random.Generator, other: bytes) -> bytes:
    """`data` with one to three of: bits flipped, bytes written, cut, a part removed, repeated or taken from `other`."""
    file = bytearray(data)
    for _ in range(rng.integers(1, 4)):
        size = max(len(file), 2)
        header = rng.random() < 0.6  # damage in a header is what parsers trip over
        at = int(rng.integers(0, min(size, 700) if header else size))
        span = int(rng.integers(1, 40))
        match int(rng.integers(0, 8)):
            case 0 | 1:
                for where in rng.integers(0, min(size, 700) if header else size, rng.integers(1, 5)):
                    if where < len(file):
                        file[where] ^= 1 << int(rng.integers(0, 8))
            case 2 | 3:
                file[at : at + 1] = rng.choice(
                    [b"\0", b"\xff", b"\x7f", b"\x80", b"\xff\xd8", b"\xff\xda", b"\xff\xc4"]
                )
            case 4:
                del file[at:]
            case 5:
                del file[at : at + span]
            case 6:
                file[at:at] = file[at : at + span]
            case 7:
                file[at : at + span] = other[at : at + span]
    repaired = with_png_checksums(bytes(file)) if rng.random() < 0.7 else bytes(file)
    if repaired.startswith(b"RIFF") and len(repaired) > 8 and rng.random() < 0.7:
        repaired = b"RIFF" + struct.pack("<I", len(repaired) - 8 & ~1) + repaired[8:]
    if repaired.startswith(b"\xff\xd8") and rng.random() < 0.5:
        repaired += b"\xff\xd9"
    return repaired


def with_png_checksums(data: bytes) -> bytes:
    """A PNG whose chunks' checksums are made right, so that damage gets past them; other files as they are."""
    if not data.startswith(b"\x89PNG"):
        return data
    file = bytearray(data)
    at = 8
    while at + 12 <= len(file):
        end = at + 8 + struct.unpack_from(">I", file, at)[0]
        if end + 4 > len(file):
            break
        struct.pack_into(">I", file, end, zlib.crc32(file[at + 4 : end]))
        at = end + 4
    return bytes(file)


def decode(batch: list[bytes]) -> bool:
    """Whether DALI decodes all of a batch of files that pass the check; False is its clean error."""
    return decode_chunk(chunk_of([check_image(data) for data in batch]), threads=2) is not None
