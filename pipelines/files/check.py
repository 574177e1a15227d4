"""Checks a file's structure before DALI's decoder may see it, and reads the image's size.

A file that DALI 2.4 cannot parse raises no error in `fn.decoders.image`: it ends the process. So the structure of every
file is checked first, of JPEGs by a compiled kernel. The compressed data may still be damaged; DALI then raises an
error or decodes it. PNGs and WebPs are passed on without their metadata.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numba
import numpy as np
from numba import types

from peclr_dali.numba_cache import cached
from peclr_dali.pipelines.arrays import IntArray, PixelArray
from peclr_dali.pipelines.files.image_file import MAX_FILE_BYTES, BadImage, ImageFile
from peclr_dali.pipelines.files.jpeg import JPEG_FAULTS, NO_JPEG, SOUND, walk_jpeg
from peclr_dali.pipelines.files.png_webp import PNG_START, check_png, check_webp

T = TypeVar("T")

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
"""Offset, bytes there, and what such a file is."""


def check_image(data: bytes | PixelArray) -> ImageFile:
    """Check that a file is a JPEG, PNG or WebP with a complete structure, which DALI's decoder can read.

    The kind is read from the bytes of the whole file, not from its name. Bytes after the image's end are tolerated.

    Raises:
        BadImage: the file is anything else; the message has the reason.
    """
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data)
    fault, at, first, second = walk_jpeg(array)
    if fault == SOUND:
        return ImageFile(array, (first, second), at)
    if fault != NO_JPEG:
        raise BadImage(JPEG_FAULTS[fault].format(at=at, first=first, second=second, size=len(array)))
    data = array.tobytes()
    if data.startswith(PNG_START):
        return check_png(data)
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return check_webp(data)
    raise BadImage(_kind_of(data))


def _kind_of(data: bytes) -> str:
    if not data:
        return "empty file"
    for at, magic, kind in _OTHER_KINDS:
        if data.startswith(magic, at):
            return kind
    if data[:256].lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"<"):
        return "HTML or XML, not an image"
    return f"bytes of an unknown kind, which begin with {data[:12]!r}"


def image_sizes_px(read: Callable[[T], bytes], images: Iterable[T], *, stored: bool = False) -> IntArray:
    """Heights and widths (N, 2) of images as displayed (EXIF orientation applied), or as they are `stored`.

    They are 0 for what cannot be read or is no image. `read` gives the bytes of an image, as `Index.read` of a row does
    and `read_file` of a path.
    """
    sizes_px = []
    for image in images:
        try:
            file = check_image(read(image))
        except (OSError, BadImage):
            sizes_px.append((0, 0))
        else:
            sizes_px.append(file.size_px if stored else file.displayed_size_px)
    return np.array(sizes_px, np.int64).reshape(-1, 2)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).astype(int).tolist()))


# Functions of the C library, with the types of 64-bit Linux.
_open: Any = types.ExternalFunction("open", types.int32(types.intp, types.int32))
_read: Any = types.ExternalFunction("read", types.intp(types.int32, types.intp, types.uintp))
_close: Any = types.ExternalFunction("close", types.int32(types.int32))

_HOW = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags to open a file without waiting: a pipe without a writer would block."""

_USUAL_BYTES = 2**15
"""Initial buffer for each file, in bytes. Memory pages that are not written cost nothing."""


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
    room = _USUAL_BYTES * len(paths)
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
