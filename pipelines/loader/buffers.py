"""Reuses the memory of batches on a CPU, since every new page of the system costs a page fault and is cleared."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy


class PixelBuffers:
    """Arrays of one shape that are reused when their tensors are gone."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._spare: list[npt.NDArray[np.uint8]] = []

    def tensor(self) -> Tensor:
        """An uninitialised uint8 tensor of this shape. Its memory is reused when nothing refers to it any more."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = np.empty(self.shape, np.uint8)  # NumPy asks for huge pages
        lent = buffer.view()  # lives as long as a tensor shares its memory; the buffer outlives it
        weakref.finalize(lent, self._spare.append, buffer).atexit = False
        return from_numpy(lent)
