"""Checks a file's structure before DALI's decoder may see it, and reads the image's size.

A file that DALI 2.4 cannot parse raises no error in `fn.decoders.image`: it ends the process. So the structure of every
file is checked first, of JPEGs by a compiled kernel. The compressed data may still be damaged; DALI then raises an
error or decodes it. PNGs and WebPs are passed on without their metadata.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numba
import numpy as np
from numba import types

from peclr_dali.numba_cache import cached
from peclr_dali.pipelines.arrays import IntArray, PixelArray
from peclr_dali.pipelines.files.image_file import (
    MAX_FILE_BYTES,
    MAX_PIXELS,
    MIN_PIXELS,
    BadImage,
    ImageFile,
    read_orientation,
    size_reason,
    upright_size_px,
)
from peclr_dali.pipelines.files.png_webp import PNG_START, check_png, check_webp

# Offset, bytes there, and what such a file is.
_OTHER_KINDS = (
    (0, b"GIF8", "GIF is not read"),
    (0, b"BM", "BMP is not read"),
    (0, b"II*\0", "TIFF is not read"),
    (0, b"MM\0*", "TIFF is not read"),
    (4, b"ftypavif", "AVIF is not read"),
    (4, b"ftypheic", "HEIC is not read"),
    (0, b"version https://git-lfs", "a Git LFS pointer, not the image (run 'git lfs pull')"),
    (0, bytes(256), "zero bytes"),
    (0, b"\xff\xd8", "a JPEG that is damaged after its first bytes"),
    (0, PNG_START[:4], "a PNG that is damaged after its first bytes"),
)

_EXIF = np.frombuffer(b"Exif\0\0", np.uint8)

JPEG_FAULTS = {
    2: "JPEG cut in its header after {size} bytes",
    3: "JPEG without a marker at byte {at}",
    4: "JPEG segment {first:02X} at byte {at} of length {second} in a file of {size} bytes",
    5: "JPEG with two frame headers",
    6: "lossless or hierarchical JPEG is not read",
    7: "JPEG marker {first:02X} in the header, at byte {at}",
    8: "JPEG without a frame header before its data",
    9: "JPEG frame header of {first} bytes",
    10: "JPEG frame header of {first} components in {second} bytes",
    11: "JPEG with {first} bits a sample is not read",
    12: size_reason("JPEG", "{first}", "{second}"),
    13: "JPEG header of {first} pixels in a file of only {size} bytes",
    14: "JPEG cut after {size} bytes: no end marker",
}
"""Result of `walk_jpeg`, but for 0 (sound) and 1 (no JPEG) -> message, given its numbers and the file's bytes."""


def check_image(data: bytes | PixelArray) -> ImageFile:
    """Check that a file is a JPEG, PNG or WebP with a complete structure, which DALI's decoder can read.

    The kind is read from the bytes of the whole file, not from its name. Bytes after the image's end are tolerated.

    Raises:
        BadImage: the file is anything else; the message has the reason.
    """
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data)
    fault, at, first, second = walk_jpeg(array)
    if fault == 0:
        return ImageFile(array, (first, second), at)
    if fault != 1:
        raise BadImage(JPEG_FAULTS[fault].format(at=at, first=first, second=second, size=len(array)))
    data = data if isinstance(data, bytes) else array.tobytes()
    if data.startswith(PNG_START):
        return check_png(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return check_webp(data)
    if not data:
        raise BadImage("empty file")
    for start, magic, kind in _OTHER_KINDS:
        if data.startswith(magic, start):
            raise BadImage(kind)
    if data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        raise BadImage("HTML or XML, not an image")
    raise BadImage(f"bytes of an unknown kind, which begin with {data[:12]!r}")


def image_headers(files: Iterable[bytes | OSError]) -> IntArray:
    """Heights and widths of images as stored, and their EXIF orientations (N, 3); 0, 0, 1 for what is no image.

    Args:
        files: bytes, or why they cannot be read, as `Index.read_many` gives them.
    """
    headers = []
    for data in files:
        try:
            file = check_image(b"" if isinstance(data, OSError) else data)
            headers.append((*file.size_px, file.orientation))
        except BadImage:
            headers.append((0, 0, 1))
    return np.array(headers, np.int64).reshape(-1, 3)


def image_sizes_px(files: Iterable[bytes | OSError]) -> IntArray:
    """Heights and widths (N, 2) of images as displayed, with EXIF's orientation; see `image_headers`."""
    headers = image_headers(files)
    return upright_size_px(headers[:, :2], headers[:, 2])


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).astype(int).tolist()))


@cached(numba.njit, nogil=True)
def walk_jpeg(data: Any) -> tuple[int, int, int, int]:
    """Follow the segments of a JPEG, (bytes,) uint8, up to its first scan, and search its end marker backwards.

    Returns:
        A fault, its byte offset, and two numbers for its message. Without a fault: 0, the Exif orientation,
        height and width.
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
        elif marker == 0xE1 and not orientation and np.array_equal(data[at + 4 : min(at + 10, end)], _EXIF):
            orientation = read_orientation(data[at + 10 : end])
        at = end
    if not frame:
        return 8, at, 0, 0
    # A Huffman-coded scan spends at least one bit on each 8 x 8 block, so one byte codes at most 8 * 64 pixels.
    if frame <= 0xC2 and width * height > 512 * size:
        return 13, at, width * height, 0
    for last in range(size - 2, end - 1, -1):
        if data[last] == 0xFF and data[last + 1] == 0xD9:
            return 0, max(orientation, 1), height, width
    return 14, at, 0, 0


# Functions of the C library, with the types of 64-bit Linux.
_open: Any = types.ExternalFunction("open", types.int32(types.intp, types.int32))
_read: Any = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.uintp))
_close: Any = types.ExternalFunction("close", types.int32(types.int32))

# Flags to open a file without waiting: a pipe without a writer would block.
_HOW = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC


def read_sound_jpegs(paths: Sequence[str]) -> list[ImageFile | None]:
    """Read files that `peclr_dali.pipelines.files.check.check_image` accepts as JPEGs.

    Their bytes share memory. The result is None for a file that cannot be read or is not a sound JPEG.
    """
    names = np.frombuffer("\0".join([*paths, ""]).encode(errors="surrogateescape"), np.uint8)
    name_stops = np.flatnonzero(names == 0)
    if len(name_stops) != len(paths):
        raise ValueError("a path with a zero byte names no file")
    name_starts = np.concatenate([[0], name_stops[:-1] + 1])
    read: list[ImageFile | None] = []
    room = 2**15 * len(paths)  # memory pages that are not written cost nothing
    while len(read) < len(paths):
        memory = np.empty(room, np.uint8)
        found = np.zeros((len(paths), 5), np.int64)
        fitted = _read_into(memory, names, name_starts[len(read) :], found)
        read += [
            ImageFile(memory[start:stop], (height, width), orientation) if start < stop else None
            for start, stop, orientation, height, width in found[:fitted].tolist()
        ]
        room *= 2
    return read


@cached(numba.njit, nogil=True)
def _read_into(memory: Any, names: Any, name_starts: Any, found: Any) -> int:
    """Read files into memory, one after the other, until it is full.

    Args:
        names: file names, each ended by a zero.
        name_starts: (N,) place in `names` where each file's name begins.
        found: (N, 5) written to: start and end of each file in `memory`, orientation, height and width. The end equals
            the start if the file is not a sound JPEG.

    Returns:
        The number of files read.
    """
    at = 0
    for number in range(len(name_starts)):
        found[number, :2] = at
        descriptor = _open(names.ctypes.data + name_starts[number], _HOW)
        if descriptor < 0:
            continue
        stop, got = at, 1
        while got > 0 and stop < len(memory):
            got = _read(descriptor, memory.ctypes.data + stop, len(memory) - stop)
            stop += max(got, 0)
        _close(descriptor)
        if stop == len(memory) and stop - at < MAX_FILE_BYTES:  # the file may be longer
            return number
        if got == 0:
            fault, orientation, height, width = walk_jpeg(memory[at:stop])
            if fault == 0:
                found[number, 1:] = stop, orientation, height, width
                at = stop
    return len(name_starts)
