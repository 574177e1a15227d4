"""Mean distances of the keypoints of any two views, some rows of the matrix at a time."""

from __future__ import annotations

import torch
from torch import Tensor


class KeypointDistances:
    """The distances of 2N views. It uses the same memory for all rows: new memory each time is slow on a CPU.

    Args:
        keypoints_px: (2, N, K, 2), both views of N samples.
        tile_elements: number of distances that are computed at once.
    """

    def __init__(self, keypoints_px: Tensor, tile_elements: int) -> None:
        self._keypoints_px = keypoints_px.flatten(0, 1).permute(1, 2, 0).contiguous()  # (K, 2, 2N)
        self._views = self._keypoints_px.shape[2]
        self._strip = min(self._views, max(1, tile_elements // self._views))
        self._tiles = keypoints_px.new_empty(3, self._strip, self._views)

    def of_positives(self) -> Tensor:
        """(N,), of the two views of each sample."""
        first, second = self._keypoints_px.chunk(2, dim=2)
        distances: Tensor = torch.linalg.vector_norm(first - second, dim=1).mean(dim=0)
        return distances

    def of_rows(self, start: int, stop: int) -> Tensor:
        """(n, 2N), of the views from `start` to `stop` and all views. The next call overwrites it."""
        total, across, down = self._tiles[:, : stop - start].unbind()
        total.zero_()
        for x, y in self._keypoints_px:  # (2N,) each
            torch.sub(x[start:stop, None], x, out=across)
            torch.sub(y[start:stop, None], y, out=down)
            total += across.square_().addcmul_(down, down).sqrt_()
        return total.div_(len(self._keypoints_px))

    def largest_and_mean(self) -> tuple[Tensor, Tensor]:
        """Over all pairs of the 2N views, each view with itself included; scalars."""
        largest = total = self._keypoints_px.new_zeros(())
        for start in range(0, self._views, self._strip):
            distances = self.of_rows(start, min(start + self._strip, self._views))
            largest, total = torch.maximum(largest, distances.amax()), total + distances.sum()
        return largest, total / self._views**2
