"""Memory of batches on a CPU, taken into use again: a page that the system hands out costs a fault, and is cleared."""

from __future__ import annotations

import weakref

import numpy as np
import numpy.typing as npt
from torch import Tensor, from_numpy


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
