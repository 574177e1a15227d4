"""Good files and mutated ones of every kind, each a pure function of a seed and a number."""

import zlib
from typing import Final, NamedTuple

import numpy as np

from tests.pipelines.image_files import (
    EXIF_START,
    ORIENTATION,
    Part,
    exif_block,
    good_files,
    put_together,
    take_apart,
    with_exif,
)

Rng = np.random.Generator

SIZES_PX: Final = ((56, 40), (40, 56), (53, 71), (700, 500), (457, 613))
"""Width and height; the last two have more than 2^18 pixels, so regions of them are decoded."""

JPEG_PARTS: Final = (
    b"\xdd", b"\xdc", b"\xfe", b"\xe0JFIF\0\1\2", b"\xe0JFXX\0\x10", b"\xe1http://ns.adobe.com/\0", b"\xc4\0",
    b"\xe2ICC_PROFILE\0\1\2", b"\xeeAdobe\0\x64\0\0\0\0\1", b"\xf0", b"\xc8", b"\1", b"\xd0",
)  # fmt: skip
OTHER_PARTS: Final = (
    b"tRNS", b"gAMA\0\0", b"cHRM", b"sRGB", b"pHYs", b"bKGD", b"sBIT", b"hIST", b"acTL\0\0\0\1", b"fcTL", b"PLTE",
    b"fdAT", b"cICP", b"tEXta\0b", b"iTXtXML:com.adobe.xmp\0\0\0", b"zTXtRaw profile\0\0", b"iCCPa\0\0", b"IDAT",
    b"ZZZZ", b"zzZz", b"ICCP", b"XMP ", b"ALPH", b"ANIM", b"ANMF", b"VP8 ", b"VP8L", b"VP8X\x10",
)  # fmt: skip
"""Names with the beginning of their bodies."""


class Made(NamedTuple):
    """A file, what it was made from in words, and its width and height before mutation, as displayed."""

    data: bytes
    what: str
    shown_px: tuple[int, ...]


def good_file(rng: Rng) -> Made:
    """A file that must be used; half of the files have an orientation."""
    size_px = SIZES_PX[rng.choice(len(SIZES_PX), p=[0.25, 0.25, 0.25, 0.125, 0.125])]
    names = list(good_files(size_px))
    name = names[rng.integers(len(names))]
    data, orientation = good_files(size_px)[name], 6 if "exif" in name else 1
    if rng.random() < 0.5:
        orientation = int(rng.integers(1, 9))
        data = with_exif(data, exif_block((ORIENTATION, 3, 1, orientation), big=bool(rng.random() < 0.5)), size_px)
    return Made(data, f"{name}, {size_px}, orientation {orientation}", size_px[:: -1 if orientation > 4 else 1])


def mutated_file(rng: Rng) -> Made:
    """A file mutated in its headers and metadata, with checksums made right again, or in the stream of its bytes."""
    made = good_file(rng)
    if rng.random() < 0.03:
        return Made(rng.bytes(int(rng.integers(3000))), "random bytes", made.shown_px)
    if rng.random() < 0.25:
        return Made(_in_bytes(rng, made.data, 5), f"{made.what}: bytes", made.shown_px)
    parts, rest = take_apart(made.data)
    changes = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = int(rng.choice(9, p=[0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05, 0.2]))
        changes.append(change)
        part = parts[rng.integers(len(parts))]
        match change:
            case 0 | 1:
                _wild_exif_in(rng, parts, instead=change == 0)
            case 2 | 3:
                part.body = _in_bytes(rng, part.body, 3)
            case 4:
                begins, size = JPEG_PARTS if len(part.name) == 1 else OTHER_PARTS, len(part.name)
                begin = begins[rng.integers(len(begins))]
                body = begin[size:] + rng.bytes(int(rng.choice([0, 1, 2, 4, 7, 30, 256])))
                _insert(rng, parts, Part(begin[:size], body, sound=bool(rng.random() < 0.9)))
            case 5:
                _size_in(rng, parts)
            case 6:
                part.length = max(0, len(part.body) + 2 + int(rng.choice([-9, -2, -1, 1, 2, 9, 300, 2**30])))
            case 7:
                moved = parts.pop(parts.index(part)) if len(parts) > 1 else part
                for _ in range(rng.integers(3)):
                    _insert(rng, parts, Part(moved.name, moved.body))
            case 8:
                rest = _coded_pixels_in(rng, parts, rest)
    return Made(put_together(parts, rest), f"{made.what}: changes {changes}", made.shown_px)


def wild_exif(rng: Rng) -> bytes:
    """A block of Exif data with up to a few faults."""

    def usually(usual: int, *others: int) -> int:
        return int(rng.choice(others)) if rng.random() < 0.1 else usual

    entries = [
        (int(rng.choice([ORIENTATION, ORIENTATION, 0x010E, 0x8769, 0, 0xFFFF])), usually(3, 0, 1, 2, 4, 9, 255),
         usually(1, 0, 2, 4, 9, 2**31, 2**32 - 1), usually(int(rng.integers(10)), 256, 0x600, 0xFFFF, 2**31))
        for _ in range(rng.integers(1, 4))
    ]  # fmt: skip
    mark = (b"IM\0*", b"MI*\0", b"M\x08\0*", b"II\0*", b"MM*\0", b"ii*\0", b"MM\0\0")[rng.integers(7)]
    block = exif_block(
        *entries, big=bool(rng.random() < 0.5), mark=mark if rng.random() < 0.2 else None,
        directory=usually(8, 0, 1, 7, 9, 22, 60, 2**31, 2**32 - 1), behind=int(rng.integers(40)),
        count=usually(len(entries), 0, 1, 2, 9, 255, 0xFFFF),
    )  # fmt: skip
    return _in_bytes(rng, block, 3) if rng.random() < 0.2 else block[: usually(len(block), *range(40))]


def _insert(rng: Rng, parts: list[Part], part: Part) -> None:
    """Not before the first part, which a PNG's or a WebP's header is, in most cases."""
    parts.insert(int(rng.integers(rng.random() < 0.9, len(parts) + 1)), part)


def _wild_exif_in(rng: Rng, parts: list[Part], *, instead: bool) -> None:
    """Put Exif data in the place of the file's own, or add one to three blocks of it."""
    others = b"eXIf" if any(part.name == b"IHDR" for part in parts) else b"EXIF"
    name, usual = (b"\xe1", EXIF_START) if len(parts[0].name) == 1 else (others, b"")
    if instead and (kept := [part for part in parts if part.name != name]):
        parts[:] = kept
    for _ in range(1 if instead else rng.integers(1, 4)):
        starts = (b"", EXIF_START, b"Exif\0", b"exif\0\0", EXIF_START * 2)
        start = starts[rng.integers(len(starts))] if rng.random() < 0.2 else usual
        _insert(rng, parts, Part(name, start + wild_exif(rng)))


def _size_in(rng: Rng, parts: list[Part]) -> None:
    """Another size, depth, sampling or number of components in the header."""
    for part in parts:
        if part.name in (b"\xc0", b"\xc1", b"\xc2", b"IHDR", b"VP8X") and part.body:
            places = {b"IHDR": (3, 3, 7, 7, 8, 9, 12), b"VP8X": (0, 4, 7)}.get(part.name, (0, 2, 2, 4, 4, 5, 7))
            body, at = bytearray(part.body), int(rng.choice(places)) % len(part.body)
            body[at] = (body[at] + int(rng.choice([-16, -8, -1, 1, 8, 16]))) % 256
            part.body = bytes(body)


def _coded_pixels_in(rng: Rng, parts: list[Part], rest: bytes) -> bytes:
    """Damage the pixels alone: behind a JPEG's scan header, in a PNG's filtered rows, in a WebP's image."""
    if len(parts[0].name) == 1:
        return rest[:14] + _in_bytes(rng, rest[14:-2], 3) + b"\xff\xd9"
    for part in parts:
        if part.name == b"IDAT":
            try:
                part.body = zlib.compress(_in_bytes(rng, zlib.decompress(part.body), 3), 1)
            except zlib.error:  # one of several chunks, or damaged before
                part.body = _in_bytes(rng, part.body, 2)
        elif part.name in (b"VP8 ", b"VP8L", b"ALPH"):
            part.body = part.body[:10] + _in_bytes(rng, part.body[10:], 3)
    return rest


def _in_bytes(rng: Rng, data: bytes, most: int) -> bytes:
    """The data with one to `most` of: bits flipped, bytes written, removed, repeated or cut."""
    file = bytearray(data)
    for _ in range(rng.integers(1, most + 1)):
        header = rng.random() < 0.5  # parsers fail most often at damage in a header
        at, span = int(rng.integers(min(len(file), 700 if header else len(file)) + 1)), int(rng.integers(1, 40))
        match int(rng.integers(6)):
            case 0 | 1:
                file[at : at + 1] = bytes(byte ^ 1 << int(rng.integers(8)) for byte in file[at : at + 1])
            case 2:
                values = (b"\0", b"\x7f", b"\xff", b"\xff\xd8", b"\xff\xd9", b"\xff\xda", b"\xff\xd3", b"\xff\0")
                file[at : at + 1] = values[rng.integers(len(values))]
            case 3:
                del file[at : at + span]
            case 4:
                file[at:at] = file[at : at + span]
            case 5:
                del file[at : len(file) if rng.random() < 0.3 else at + 1]
    return bytes(file)
