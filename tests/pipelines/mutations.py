"""Good files and mutated ones of every kind, each a pure function of a seed and a number.

Half of the mutated ones are mutated in their headers and metadata (Exif, ICC, tables, chunks), with checksums made
right again, and half in the stream of their bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageCms

from tests.pipelines.decoder_fuzz import encoded, mutated
from tests.pipelines.image_parts import (
    EXIF_START,
    ORIENTATION,
    Entry,
    Part,
    exif_block,
    png_of,
    put_together,
    take_apart,
)

Rng = np.random.Generator
Pixels = npt.NDArray[np.uint8]

SMALL_PX: Final = ((56, 40), (40, 56), (53, 71))
LARGE_PX: Final = ((700, 500), (500, 700), (613, 457))
"""Width and height; above 2^18 pixels, of which regions are decoded."""

LARGE_SHARE: Final = 0.25
PICTURES: Final = 3
PROFILE: Final = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()

JPEG_OPTIONS: Final[dict[str, dict[str, object]]] = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "progressive": {"progressive": True},
    "progressive 4:4:4": {"progressive": True, "subsampling": 0},
    "restart markers": {"restart_marker_blocks": 3},
    "grey": {},
    "CMYK": {},
}
PNG_DEPTHS: Final = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
PNG_KINDS: Final = (
    *(f"{colour} {depth} {step}" for colour, depths in PNG_DEPTHS.items() for depth in depths
      for step in ("rows", "interlaced")),
    *("filtered RGB", "filtered RGBA") * 4,
)  # fmt: skip
WEBP_OPTIONS: Final[dict[str, dict[str, object]]] = {
    "lossy": {"quality": 90},
    "lossless": {"lossless": True, "method": 0},
    "lossy alpha": {"quality": 90},
    "lossless alpha": {"lossless": True, "method": 0},
}


@dataclass(frozen=True)
class Made:
    """A file, and how it came to be.

    Attributes:
        data: its bytes.
        kind: "jpeg", "png" or "webp": what it was before it was mutated.
        what: in words: the original and what was done to it.
        shown_px: width and height before mutation, as displayed.
    """

    data: bytes
    kind: str
    what: str
    shown_px: tuple[int, int]


@cache
def picture(width: int, height: int, number: int) -> Pixels:
    """(H, W, 3): smooth, with no symmetry, and a disc of another colour in every corner."""
    y, x = np.mgrid[0:height, 0:width] + 0.5
    u, v = x / width, y / height
    waves = np.stack([u, v, (u + 2 * v) / 3], axis=-1) + 0.08 * np.sin(7 * u + 4 * v * v + 2 * number)[..., None]
    out = 40 + 150 * np.roll(waves, number, axis=-1)
    colours = ((230, 30, 30), (30, 220, 40), (40, 40, 230), (225, 220, 40))
    for place, colour in enumerate(colours):
        right, low = place % 2, place // 2
        distance = np.hypot(u - right, (v - low) * (0.8 + 0.2 * place))
        weight = 1 / (1 + np.exp((distance - 0.22) * 24))[..., None]
        out = out * (1 - weight) + np.array(np.roll(colour, number)) * weight
    return np.asarray(np.clip(out, 0, 255), np.uint8)


@cache
def original(kind: str, option: str, size_px: tuple[int, int], number: int) -> bytes:
    """A good file without metadata."""
    pixels = picture(*size_px, number)
    image = Image.fromarray(pixels)
    if kind == "jpeg":
        mode = {"grey": "L", "CMYK": "CMYK"}.get(option, "RGB")
        return encoded(image.convert(mode), "JPEG", quality=90, **JPEG_OPTIONS[option])
    alpha = Image.fromarray(255 - pixels[..., 0] // 2)
    if kind == "webp" or option == "filtered RGBA":
        if option.endswith(("alpha", "RGBA")):
            image.putalpha(alpha)
        return (
            encoded(image, "WEBP", **WEBP_OPTIONS[option])
            if kind == "webp"
            else encoded(image, "PNG", compress_level=1)
        )
    if option == "filtered RGB":
        return encoded(image, "PNG", compress_level=1)
    colour, depth, step = (int(word) if word.isdigit() else word for word in option.split())
    return put_together("png", _plain_png(pixels, int(depth), int(colour), interlace=step == "interlaced"))


def _plain_png(pixels: Pixels, depth: int, colour: int, *, interlace: bool) -> list[Part]:
    if colour == 3:
        few = Image.fromarray(pixels).quantize(2**depth)
        samples, palette = np.asarray(few)[..., None], bytes(few.getpalette() or b"")
        return png_of(samples, depth, colour, interlace=interlace, palette=palette)
    grey, alpha = np.asarray(Image.fromarray(pixels).convert("L"))[..., None], 255 - pixels[..., :1] // 2
    eight = np.concatenate({0: [grey], 2: [pixels], 4: [grey, alpha], 6: [pixels, alpha]}[colour], axis=-1)
    samples = eight.astype(np.int64)
    samples = samples * 256 + samples % 200 if depth == 16 else samples >> 8 - depth
    return png_of(samples, depth, colour, interlace=interlace)


def good_file(seed: int, number: int) -> Made:
    """A file that must be used; three of four have an orientation, some have a colour profile."""
    return _dressed(np.random.default_rng([seed, number, 0]))


def mutated_file(seed: int, number: int) -> Made:
    """A mutated file: of an even number in its headers and metadata, of an odd one in its bytes."""
    rng = np.random.default_rng([seed, number, 1])
    made = _dressed(rng)
    if number % 2:
        data, changes = _mutated_stream(rng, made)
    else:
        parts, rest = take_apart(made.data)
        changes = []
        for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
            change = CHANGES[made.kind][rng.integers(len(CHANGES[made.kind]))]
            changes.append(change.__name__.strip("_"))
            change(rng, parts)
        data = put_together(made.kind, parts, rest)
    return Made(data, made.kind, f"{made.what}: {', '.join(changes)}", made.shown_px)


def _dressed(rng: Rng) -> Made:
    kind = str(rng.choice(["jpeg", "jpeg", "png", "png", "webp"]))
    option = str(rng.choice({"jpeg": list(JPEG_OPTIONS), "png": PNG_KINDS, "webp": list(WEBP_OPTIONS)}[kind]))
    sizes = LARGE_PX if rng.random() < LARGE_SHARE else SMALL_PX
    width, height = sizes[rng.integers(len(sizes))]
    parts, rest = take_apart(original(kind, option, (width, height), int(rng.integers(PICTURES))))
    orientation = int(rng.integers(1, 9)) if rng.random() < 0.75 else 0
    exif = exif_block(_entries(rng, orientation), big=rng.random() < 0.5) if orientation else b""
    profile = PROFILE if rng.random() < 0.1 else b""
    dress(kind, parts, exif, profile, (width, height), behind=rng.random() < 0.2)
    turned = f", orientation {orientation}" if orientation else ""
    shown_px = (height, width) if orientation >= 5 else (width, height)
    return Made(put_together(kind, parts, rest), kind, f"{kind} {option} {width} x {height}{turned}", shown_px)


def dress(kind: str, parts: list[Part], exif: bytes, profile: bytes, size_px: tuple[int, int], *, behind: bool) -> None:
    """Add Exif data and a profile as writers do; `behind` puts a PNG's Exif data after its pixels."""
    if kind == "jpeg":
        if profile:
            parts.insert(1, Part(b"\xe2", b"ICC_PROFILE\0\1\1" + profile))
        if exif:
            parts.insert(1 - behind, Part(b"\xe1", EXIF_START + exif))
    elif kind == "png":
        if exif:
            parts.insert(-1 if behind else 1, Part(b"eXIf", exif))
        if profile:
            parts.insert(1, Part(b"iCCP", b"a profile\0\0" + zlib.compress(profile)))
    elif exif or profile:
        canvas = next((part for part in parts if part.name == b"VP8X"), None)
        if canvas is None:
            canvas = Part(b"VP8X", bytes(4) + b"".join(struct.pack("<I", side - 1)[:3] for side in size_px))
            parts.insert(0, canvas)
        for part in parts:
            part.body += bytes(len(part.body) % 2)  # Exif data behind a part of odd length are not found by all
        canvas.body = bytes([canvas.body[0] | 8 * bool(exif) | 32 * bool(profile)]) + canvas.body[1:]
        if profile:
            parts.insert(1, Part(b"ICCP", profile + bytes(len(profile) % 2)))
        if exif:
            parts.append(Part(b"EXIF", exif + bytes(len(exif) % 2)))


def _entries(rng: Rng, orientation: int) -> list[Entry]:
    entries = [(ORIENTATION, 3, 1, orientation)]
    if rng.random() < 0.3:
        entries.insert(0, (0x010F, 2, 4, 0x41424300))
    if rng.random() < 0.3:
        entries.append((0x0128, 3, 1, 2))
    return entries


# Mutations of headers and metadata. Each changes the parts of a file in place.

MARKS: Final = (
    b"II*\0", b"MM\0*", b"IM\0*", b"MI*\0", b"M\x08\0*", b"II\0*", b"MM*\0", b"II+\0", b"MM\0+", b"ii*\0", b"IM*\0",
    b"MM\0\0", b"\0\0\0\0", b"\0*MM", b"I\x49\x2a\x08",
)  # fmt: skip
STARTS: Final = (EXIF_START, EXIF_START, EXIF_START, b"", b"Exif\0", b"Exif\0\xff", b"exif\0\0", EXIF_START * 2)
NUMBERS: Final = (0, 1, 2, 3, 4, 5, 8, 9, 26, 255, 256, 0x600, 0x7FFF, 0xFFFF, 2**24, 2**31 - 1, 2**31, 2**32 - 1)


def _any(rng: Rng, *values: int) -> int:
    return int(rng.choice(np.array(values or NUMBERS, np.int64)))


def wild_exif(rng: Rng) -> bytes:
    """A block of Exif data with one to three faults, or none."""
    orientation = _any(rng, *range(10), 6, 8, 256, 0x600, 0xFFFF)
    entries = _entries(rng, orientation)
    big = bool(rng.random() < 0.5)
    mark, directory, count, after = None, 8, None, rng.bytes(int(rng.integers(0, 60)))
    cut, flips = 0, 0
    for fault in rng.integers(0, 11, rng.integers(0, 4)).tolist():
        match fault:
            case 0 | 1:
                mark = MARKS[rng.integers(len(MARKS))]
            case 2:
                directory = _any(rng, 0, 1, 7, 9, 10, 20, 22, 30, 60, 2**31, 2**32 - 1)
            case 3:
                count = _any(rng, 0, 1, 2, 3, 9, 255, 256, 0x7FFF, 0xFFFF)
            case 4:
                entries.insert(int(rng.integers(2)), (ORIENTATION, 3, 1, int(rng.integers(0, 10))))
            case 5:
                kind, many = _any(rng, 0, 1, 2, 4, 5, 7, 8, 9, 12, 13, 255), _any(rng, 0, 1, 2, 4, 5, 2**31, 2**32 - 1)
                entries = [(tag, kind, many, value) if tag == ORIENTATION else (tag, k, m, value)
                           for tag, k, m, value in entries]  # fmt: skip
            case 6:
                entries = [(tag, 3, _any(rng, 0, 2, 4, 9, 2**31), value) if tag == ORIENTATION else (tag, k, m, value)
                           for tag, k, m, value in entries]  # fmt: skip
            case 7:
                tag = _any(rng, 0x010E, 0x010F, 0x011A, 0x8769, 0x8825, 0x0201, 0x0211, 0x0214, 0, 0xFFFF)
                entries.insert(int(rng.integers(2)), (tag, _any(rng, 2, 3, 4, 5, 7), _any(rng), _any(rng)))
            case 8:
                cut = int(rng.integers(1, 40))
            case 9:
                flips = int(rng.integers(1, 4))
            case 10:
                after = struct.pack((">" if big else "<") + "I", _any(rng, 8, 9, 26, 2**31)) + after
    block = bytearray(exif_block(entries, big=big, mark=mark, directory=directory, count=count, after=after))
    for at in rng.integers(0, len(block), flips).tolist():
        block[at] ^= 1 << int(rng.integers(8))
    return bytes(block[: max(len(block) - cut, 0)] if cut else block)


def _flipped(rng: Rng, body: bytes) -> bytes:
    """The body with one to three of its bits, bytes, or its length changed."""
    out = bytearray(body)
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(0, len(out) + 1))
        match int(rng.integers(0, 5)):
            case 0 | 1:
                out[at : at + 1] = bytes(byte ^ 1 << int(rng.integers(8)) for byte in out[at : at + 1])
            case 2:
                out[at : at + 1] = rng.choice([b"\0", b"\1", b"\x7f", b"\xff"])
            case 3:
                del out[at : at + int(rng.integers(1, 9))]
            case 4:
                out[at:at] = rng.bytes(int(rng.integers(1, 9)))
    return bytes(out)


def _change_one(rng: Rng, parts: list[Part], *names: bytes) -> None:
    """Flip in the body of one part of these names, if there is one; of any name if none is given."""
    chosen = [part for part in parts if not names or part.name in names]
    if chosen:
        part = chosen[rng.integers(len(chosen))]
        part.body = _flipped(rng, part.body)


def _insert(rng: Rng, parts: list[Part], part: Part, first: int = 0) -> None:
    parts.insert(int(rng.integers(min(first, len(parts)), len(parts) + 1)), part)


def _remove_all(parts: list[Part], name: bytes) -> None:
    parts[:] = [part for part in parts if part.name != name]


def _exif_name(parts: list[Part]) -> bytes:
    return b"eXIf" if any(part.name == b"IHDR" for part in parts) else b"EXIF"


def _another_exif(rng: Rng, parts: list[Part]) -> None:
    """Put other Exif data in the place of the file's own."""
    if len(parts[0].name) == 1:
        _remove_all(parts, b"\xe1")
        _insert(rng, parts, Part(b"\xe1", STARTS[rng.integers(3)] + wild_exif(rng)))
    else:
        name = _exif_name(parts)
        _remove_all(parts, name)
        start = STARTS[rng.integers(len(STARTS))] if rng.random() < 0.2 else b""
        _insert(rng, parts, Part(name, start + wild_exif(rng)), first=1)


def _more_exif(rng: Rng, parts: list[Part]) -> None:
    """Add one to three blocks of Exif data, anywhere."""
    for _ in range(rng.integers(1, 4)):
        start = STARTS[rng.integers(len(STARTS))]
        if len(parts[0].name) == 1:
            length = _any(rng, 0, 1, 2, 7, 8, 20, 0xFFFF) if rng.random() < 0.1 else None
            _insert(rng, parts, Part(b"\xe1", start + wild_exif(rng), length))
        else:
            body = (start if rng.random() < 0.2 else b"") + wild_exif(rng)
            _insert(rng, parts, Part(_exif_name(parts), body, sound=bool(rng.random() < 0.95)), first=1)


def _xmp(rng: Rng, parts: list[Part]) -> None:
    """XMP data that names an orientation."""
    text = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><tiff:Orientation>%d</tiff:Orientation></x:xmpmeta>'
    text = text % rng.integers(0, 10)
    if len(parts[0].name) == 1:
        _insert(rng, parts, Part(b"\xe1", b"http://ns.adobe.com/xap/1.0/\0" + text))
    elif _exif_name(parts) == b"eXIf":
        _insert(rng, parts, Part(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + text), first=1)
    else:
        _insert(rng, parts, Part(b"XMP ", text, sound=bool(rng.random() < 0.8)), first=1)


def _order_of_parts(rng: Rng, parts: list[Part]) -> None:
    """Move, repeat or remove a part."""
    at = int(rng.integers(len(parts)))
    part = parts[at]
    match int(rng.integers(3)):
        case 0:
            parts.insert(int(rng.integers(len(parts))), parts.pop(at))
        case 1:
            _insert(rng, parts, Part(part.name, part.body))
        case 2 if len(parts) > 1:
            del parts[at]


def _length_of_a_part(rng: Rng, parts: list[Part]) -> None:
    """Make a part say a length that it does not have."""
    part = parts[rng.integers(len(parts))]
    part.length = max(0, len(part.body) + 2 * (len(part.name) == 1) + _any(rng, -9, -2, -1, 1, 2, 9, 300, 2**30))


def _icc_segments(rng: Rng, parts: list[Part]) -> None:
    count = int(rng.integers(0, 4))
    for number in range(1, count + 1):
        place = number if rng.random() < 0.7 else _any(rng, 0, 1, 2, 255)
        total = count if rng.random() < 0.7 else _any(rng, 0, 1, 2, 255)
        body = b"ICC_PROFILE\0" + bytes([place, total]) + rng.bytes(int(rng.integers(0, 200)))
        _insert(rng, parts, Part(b"\xe2", body[: int(rng.integers(1, 300))]))


def _jpeg_frame(rng: Rng, parts: list[Part]) -> None:
    """Another size, precision, sampling or number of components."""
    for part in parts:
        if part.name in (b"\xc0", b"\xc1", b"\xc2") and len(part.body) >= 6:
            precision, height, width, components = struct.unpack_from(">BHHB", part.body)
            match int(rng.integers(6)):
                case 0:
                    height += _any(rng, -17, -8, -1, 1, 8, 16, 40)
                case 1:
                    width += _any(rng, -17, -8, -1, 1, 8, 16, 40)
                case 2:
                    height, width = width, height
                case 3:
                    precision = _any(rng, 0, 7, 8, 12)
                case 4:
                    part.name = bytes([_any(rng, 0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA)])
                case 5:
                    part.body = part.body[:6] + _flipped(rng, part.body[6:])
            size = struct.pack(">BHHB", precision & 0xFF, height & 0xFFFF, width & 0xFFFF, components)
            part.body = size + part.body[6:]


def _jpeg_tables(rng: Rng, parts: list[Part]) -> None:
    _change_one(rng, parts, b"\xc4", b"\xdb")


def _jfif(rng: Rng, parts: list[Part]) -> None:
    _remove_all(parts, b"\xe0")
    version = struct.pack(">HBHHBB", _any(rng, 0, 0x100, 0x102, 0xFFFF), _any(rng, 0, 1, 2, 255), _any(rng, 0, 1, 72),
                          _any(rng, 0, 1, 72), _any(rng, 0, 1, 255), _any(rng, 0, 1, 255))  # fmt: skip
    body = [b"JFIF\0", b"JFIF\0", b"JFXX\0\x10", b"AVI1"][rng.integers(4)] + version
    _insert(rng, parts, Part(b"\xe0", body[: int(rng.integers(3, 20))]))


def _adobe(rng: Rng, parts: list[Part]) -> None:
    """The segment that tells how colours are coded."""
    _remove_all(parts, b"\xee")
    body = b"Adobe" + struct.pack(">HHHB", 100, 0, 0, _any(rng, 0, 1, 2, 3, 255))
    if rng.random() < 0.8:
        _insert(rng, parts, Part(b"\xee", body[: int(rng.integers(8, 16))]))


def _small_segments(rng: Rng, parts: list[Part]) -> None:
    """A restart interval, comments, reserved markers."""
    name = bytes([_any(rng, 0xDD, 0xDC, 0xFE, 0xE5, 0xEC, 0xED, 0xF0, 0xC8, 0xCC, 0x01, 0xD0)])
    _insert(rng, parts, Part(name, rng.bytes(_any(rng, 0, 2, 4, 10, 200))))


def _png_header(rng: Rng, parts: list[Part]) -> None:
    for part in parts:
        if part.name == b"IHDR" and len(part.body) == 13:
            width, height, *rest = struct.unpack(">IIBBBBB", part.body)
            match int(rng.integers(5)):
                case 0:
                    width += _any(rng, -9, -1, 1, 8, 40)
                case 1:
                    height += _any(rng, -9, -1, 1, 8, 40)
                case 2:
                    width, height = height, width
                case 3:
                    rest[rng.integers(5)] = _any(rng, 0, 1, 2, 3, 4, 6, 8, 16)
                case 4:
                    part.body = _flipped(rng, part.body)
                    return
            part.body = struct.pack(">IIBBBBB", max(width, 0), max(height, 0), *rest)


def _png_small_chunks(rng: Rng, parts: list[Part]) -> None:
    """Chunks of a few bytes, well formed or not, before or behind the pixels."""
    bodies: dict[bytes, bytes] = {
        b"tRNS": rng.bytes(_any(rng, 0, 1, 2, 6, 7, 256, 300)),
        b"gAMA": struct.pack(">I", _any(rng, 0, 1, 45455, 100000, 220000, 2**31, 2**32 - 1)),
        b"cHRM": rng.bytes(32) if rng.random() < 0.5 else struct.pack(">8I", *rng.integers(0, 90000, 8).tolist()),
        b"sRGB": bytes([_any(rng, 0, 3, 4, 255)]),
        b"pHYs": struct.pack(">IIB", _any(rng), _any(rng), _any(rng, 0, 1, 2, 255)),
        b"bKGD": rng.bytes(_any(rng, 0, 1, 2, 6)),
        b"sBIT": rng.bytes(_any(rng, 0, 1, 2, 3, 4)),
        b"hIST": rng.bytes(_any(rng, 0, 2, 512)),
        b"tIME": rng.bytes(7),
        b"acTL": struct.pack(">II", _any(rng, 0, 1, 2, 2**31), _any(rng, 0, 1)),
        b"fcTL": struct.pack(">5I2H2B", 0, *rng.integers(0, 80, 4).tolist(), 1, 10, 0, 0),
        b"fdAT": rng.bytes(30),
        b"cICP": rng.bytes(4),
        b"tEXt": b"a\0" + rng.bytes(20),
        b"zTXt": b"Raw profile type exif\0\0" + zlib.compress(b"\nexif\n 8\n" + wild_exif(rng).hex().encode()),
        b"ZZZZ": rng.bytes(8),
        b"zzZz": rng.bytes(8),
    }
    for _ in range(rng.integers(1, 4)):
        name = list(bodies)[rng.integers(len(bodies))]
        body = _flipped(rng, bodies[name]) if rng.random() < 0.3 else bodies[name]
        _insert(rng, parts, Part(name, body, sound=bool(rng.random() < 0.95)), first=1)


def _palette(rng: Rng, parts: list[Part]) -> None:
    if any(part.name == b"PLTE" for part in parts) and rng.random() < 0.6:
        _change_one(rng, parts, b"PLTE")
    else:
        _insert(rng, parts, Part(b"PLTE", rng.bytes(_any(rng, 0, 3, 4, 6, 768, 771))), first=1)


def _png_profile(rng: Rng, parts: list[Part]) -> None:
    _remove_all(parts, b"iCCP")
    profile = zlib.compress(rng.bytes(int(rng.integers(0, 400))))
    body = [b"a\0\0", b"\0\0", b"a\0\1", b"a" * 90 + b"\0\0"][rng.integers(4)] + profile
    _insert(rng, parts, Part(b"iCCP", body[: int(rng.integers(1, 400))]), first=1)


def _png_data(rng: Rng, parts: list[Part]) -> None:
    """Split, empty or repeated data, and data whose filters and samples are others."""
    at = next((at for at, part in enumerate(parts) if part.name == b"IDAT"), None)
    if at is None:
        return
    body = parts[at].body
    match int(rng.integers(3)):
        case 0:
            middle = int(rng.integers(0, len(body) + 1))
            between = [Part(b"tEXt", b"a\0b")] if rng.random() < 0.3 else []
            parts[at : at + 1] = [Part(b"IDAT", body[:middle]), *between, Part(b"IDAT", body[middle:])]
        case 1:
            _insert(rng, parts, Part(b"IDAT", b""), first=1)
        case 2:
            try:
                raw = zlib.decompress(b"".join(part.body for part in parts if part.name == b"IDAT"))
            except zlib.error:
                return
            _remove_all(parts, b"IDAT")
            parts.insert(min(at, len(parts)), Part(b"IDAT", zlib.compress(_flipped(rng, raw), 1)))


def _webp_canvas(rng: Rng, parts: list[Part]) -> None:
    """Flags and size of the canvas, or one where there was none."""
    canvas = next((part for part in parts if part.name == b"VP8X"), None)
    if canvas is None:
        sides = [int(rng.choice([40, 53, 56, 71, 500, 700])) - 1 for _ in range(2)]
        parts.insert(0, Part(b"VP8X", bytes(4) + b"".join(struct.pack("<I", side)[:3] for side in sides)))
    elif rng.random() < 0.7:
        canvas.body = bytes([canvas.body[0] ^ 1 << int(rng.integers(8))]) + canvas.body[1:]
    else:
        canvas.body = _flipped(rng, canvas.body)


def _webp_chunks(rng: Rng, parts: list[Part]) -> None:
    """Profiles, XMP, alpha, animation and unknown chunks, padded or not."""
    for _ in range(rng.integers(1, 3)):
        name = [b"ICCP", b"XMP ", b"ALPH", b"ANIM", b"ANMF", b"ABCD", b"VP8 ", b"VP8L"][rng.integers(8)]
        body = rng.bytes(int(rng.integers(0, 60)))
        _insert(rng, parts, Part(name, body, sound=bool(rng.random() < 0.7)))


def _webp_alpha(rng: Rng, parts: list[Part]) -> None:
    _change_one(rng, parts, b"ALPH", b"VP8X")


def _webp_padding(rng: Rng, parts: list[Part]) -> None:
    part = parts[rng.integers(len(parts))]
    part.body = part.body + b"\0" if rng.random() < 0.7 else part.body[:-1]
    part.sound = bool(rng.random() < 0.6)


def _any_part(rng: Rng, parts: list[Part]) -> None:
    _change_one(rng, parts)


Change = Callable[[Rng, list[Part]], None]
_EVERYWHERE: Final[list[Change]] = [
    *[_another_exif] * 5, *[_more_exif] * 3, _xmp, _order_of_parts, _length_of_a_part, _any_part,
]  # fmt: skip
CHANGES: Final[dict[str, list[Change]]] = {
    "jpeg": [*_EVERYWHERE, *[_icc_segments] * 2, *[_jpeg_frame] * 2, *[_jpeg_tables] * 2, _jfif, _adobe,
             _small_segments],
    "png": [*_EVERYWHERE, *[_png_small_chunks] * 4, *[_png_header] * 2, _palette, _png_profile, _png_data],
    "webp": [*_EVERYWHERE, *[_webp_canvas] * 3, *[_webp_chunks] * 3, *[_webp_alpha] * 2, _webp_padding],
}  # fmt: skip


def _mutated_stream(rng: Rng, made: Made) -> tuple[bytes, list[str]]:
    """Bits, cuts, removed, inserted and repeated bytes: anywhere, or in the coded pixels only."""
    if rng.random() < 0.03:
        return rng.bytes(int(rng.integers(0, 3000))), ["random bytes"]
    if rng.random() < 0.5:
        return mutated(made.data, rng, _dressed(rng).data), ["bytes anywhere"]
    parts, rest = take_apart(made.data)
    if made.kind == "jpeg":
        return put_together("jpeg", parts, _damaged_scans(rng, rest)), ["coded pixels"]
    if made.kind == "png":
        _png_data(rng, parts)
        return put_together("png", parts), ["coded pixels"]
    _change_one(rng, parts, b"VP8 ", b"VP8L", b"ALPH")
    return put_together("webp", parts), ["coded pixels"]


def _damaged_scans(rng: Rng, scans: bytes) -> bytes:
    """A JPEG from its first scan on, damaged behind that scan's header; its end marker stays."""
    out = bytearray(scans[:-2])
    for _ in range(rng.integers(1, 4)):
        at = int(rng.integers(14, max(len(out), 15)))
        span = int(rng.integers(1, 60))
        match int(rng.integers(6)):
            case 0 | 1:
                out[at : at + 1] = bytes(byte ^ 1 << int(rng.integers(8)) for byte in out[at : at + 1])
            case 2:
                del out[at : at + span]
            case 3:
                out[at:at] = out[at : at + span]
            case 4:
                out[at:at] = [b"\xff\xd3", b"\xff\xd9", b"\xff\xda", b"\xff\0", b"\xff\xff"][rng.integers(5)]
            case 5:
                del out[at:]
    return bytes(out) + b"\xff\xd9"
