"""Memory that comes and goes with every image and batch, kept for the next one instead of going back to the system.

A page that the system hands out is cleared first, and costs a fault: more, on a CPU, than reading the files does.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # names of glibc's malloc.h
_MIB = 2**20


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, for the whole process: the decoder asks for each image's memory anew.

    Does nothing where the C library is not glibc.
    """
    mallopt: Any = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 * _MIB)  # the largest value that it takes: below it nothing is mapped by itself
        mallopt(_TRIM_THRESHOLD, 1024 * _MIB)
        mallopt(_TOP_PAD, 32 * _MIB)


class PixelBuffers:
    """Arrays of one shape, taken into use again when the tensors made of them are gone."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._spare: list[npt.NDArray[np.uint8]] = []

    def tensor(self) -> Tensor:
        """An uninitialised uint8 tensor of that shape; its memory comes back once nothing refers to it."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = np.empty(self.shape, np.uint8)  # NumPy asks for huge pages
        lent = buffer.view()  # lives as long as a tensor shares its memory; the buffer outlives it
        weakref.finalize(lent, self._spare.append, buffer).atexit = False
        return from_numpy(lent)
