"""The memory of batches: on a CPU it is used again, since the system would clear each new page."""

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, from_numpy

from peclr_dali.pipelines.arrays import IntArray, PixelArray
from peclr_dali.pipelines.batch import Batch, View
from peclr_dali.pipelines.samples.index import Index


class PixelBuffers:
    """Arrays of one shape that are reused when their tensors are gone."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._spare: list[PixelArray] = []

    def tensor(self) -> Tensor:
        """An uninitialised uint8 tensor of this shape. Its memory is reused when nothing refers to it any more."""
        buffer = self._spare.pop() if self._spare else np.empty(self.shape, np.uint8)  # NumPy asks for huge pages
        lent = buffer.view()  # lives as long as a tensor shares its memory; the buffer outlives it
        weakref.finalize(lent, self._spare.append, buffer).atexit = False
        return from_numpy(lent)


class BatchMemory:
    """Makes empty batches.

    Args:
        rows: rows of a batch.
        sides_px: the side of each view.
        device: device of the batches.
        made_on: device on which the pixels are made, from which they may be copied to `device`.
    """

    def __init__(
        self, index: Index, rows: int, sides_px: Sequence[int], device: torch.device, made_on: torch.device
    ) -> None:
        self._index, self._rows, self._sides_px, self._made_on = index, rows, sides_px, made_on
        self._pin = device.type == "cuda"
        self._buffers = {side_px: PixelBuffers((rows, side_px, side_px, 3)) for side_px in sides_px}

    def batch(self, positions: IntArray) -> Batch:
        """A batch with uninitialised tensors for the views and samples at some positions (N,)."""
        return Batch(
            tuple(View(self._pixels(side_px), self._matrices(), self._matrices()) for side_px in self._sides_px),
            torch.empty(self._rows, len(self._sides_px), dtype=torch.int64),
            from_numpy(positions),
            all_keypoints_px=self._index.keypoints_px,
        )

    def _matrices(self) -> Tensor:
        return torch.empty(self._rows, 2, 3, pin_memory=self._pin)

    def _pixels(self, side_px: int) -> Tensor:
        """(N, 3, S, S), channels-last in memory."""
        buffers = self._buffers[side_px]
        if self._made_on.type == "cuda":
            pixels = torch.empty(buffers.shape, dtype=torch.uint8, device=self._made_on)
        elif self._pin:
            pixels = torch.empty(buffers.shape, dtype=torch.uint8, pin_memory=True)
        else:
            pixels = buffers.tensor()
        return pixels.permute(0, 3, 1, 2)
