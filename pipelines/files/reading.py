"""Reads and checks many JPEG files in compiled code without the GIL; a read in Python takes the GIL three times."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
from numba import types

from peclr_dali.machine import cached
from peclr_dali.pipelines.files.image_file import MAX_FILE_BYTES, ImageFile
from peclr_dali.pipelines.files.jpeg import walk_jpeg

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
