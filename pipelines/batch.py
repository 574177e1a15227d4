"""`View` and `Batch`: what the data path passes to training, and the memory that they are made in.

They are not frozen, because Lightning converts the types of tensors by writing into a copy.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from peclr_dali.errors import UserError
from peclr_dali.pipelines.arrays import AnyArray, FloatArray, IntArray, PixelArray


@dataclass(eq=False)
class View:
    """One augmented view of each of N samples.

    Attributes:
        image: (N, 3, S, S) uint8, RGB, channels-last in memory.
        matrix: (N, 2, 3) float32, the augmentation u -> A u + v from the canonical view (the hand's box resized to the
            output, not augmented) to this view, in units of the output side, origin at the centre, x right, y down.
        source_to_view_px: (N, 2, 3) float32, from pixels of the source as displayed to pixels of this view, both
            corner-based. The pixels were warped with it; use it to transform keypoints.
    """

    image: Tensor
    matrix: Tensor
    source_to_view_px: Tensor

    def rows(self, rows: slice) -> "View":
        """Some of the rows; the tensors are not copied."""
        return View(self.image[rows], self.matrix[rows], self.source_to_view_px[rows])


@dataclass(eq=False)
class Batch:
    """N rows of V views.

    Attributes:
        views: the views; views[0] and views[1] are a positive pair, row by row. Each has its own side S.
        samples: (N, V) int64 on the CPU, the row of the index that each view shows, substitutes included. All views of
            a row show the same image, unless the data has pairs (`DataConfig.positive`): then views 0, 2, ... show the
            image at this place of the epoch, and views 1, 3, ... its partner.
        positions: (N,) int64 on the CPU, their global positions in the run.
        bad: (K,) int64 on the CPU, rows of the index that could not be used while this batch was made, bad substitutes
            included; a row appears as often as it was tried.
        all_keypoints_px: the array `keypoints_px` of the whole index, not copied; use the method `keypoints_px`.
    """

    views: tuple[View, ...]
    samples: Tensor
    positions: Tensor
    bad: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    all_keypoints_px: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on `device`; copied only if it is on another device."""
        views = tuple(
            View(*(t.to(device, non_blocking=True) for t in (v.image, v.matrix, v.source_to_view_px)))
            for v in self.views
        )
        return replace(self, views=views)

    def keypoints_px(self, view: int) -> Tensor:
        """The samples' keypoints in one view: (N, K, 2) float32, in its pixels, corner-based, on its device.

        They may lie outside the view. A keypoint that is not known is NaN.

        Raises:
            UserError: the data has no keypoints.
        """
        if self.all_keypoints_px is None:
            raise UserError("the batch has no keypoints: its data has none. Use a labelled source (docs/datasets.md)")
        affine = self.views[view].source_to_view_px[:, None]  # (N, 1, 2, 3)
        points_px = to_device(self.all_keypoints_px[self.samples[:, view].numpy()], affine.device)
        # Written out, because autocast would run a product of matrices in 16 bits.
        return affine[..., 0] * points_px[..., :1] + affine[..., 1] * points_px[..., 1:] + affine[..., 2]


def to_device(array: AnyArray, device: torch.device) -> Tensor:
    """The array as a tensor on a device: on a CPU it shares the array's memory, on a GPU it is a copy.

    The host does not wait for the copy, since it is made from pinned memory. Torch does not use the pinned memory again
    before the copy is finished. The array itself may be changed as soon as this function returns.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class BatchMemory:
    """Makes empty batches. On a CPU, the memory of pixels is used again, since the system would clear each new page.

    Args:
        rows: rows of a batch.
        sides_px: the side of each view.
        device: device of the batches.
        made_on: device on which the pixels are made, from which they may be copied to `device`.
        keypoints_px: those of the whole index.
    """

    def __init__(
        self,
        rows: int,
        sides_px: Sequence[int],
        device: torch.device,
        made_on: torch.device,
        keypoints_px: FloatArray | None = None,
    ) -> None:
        self._rows, self._sides_px, self._made_on, self._keypoints_px = rows, sides_px, made_on, keypoints_px
        self._pin = device.type == "cuda"
        self._spare: dict[int, list[PixelArray]] = {side_px: [] for side_px in sides_px}

    def batch(self, positions: IntArray) -> Batch:
        """A batch with uninitialised tensors for the views and samples at some positions (N,)."""
        return Batch(
            tuple(View(self._pixels(side_px), self._matrices(), self._matrices()) for side_px in self._sides_px),
            torch.empty(self._rows, len(self._sides_px), dtype=torch.int64),
            torch.from_numpy(positions),
            all_keypoints_px=self._keypoints_px,
        )

    def _matrices(self) -> Tensor:
        return torch.empty(self._rows, 2, 3, pin_memory=self._pin)

    def _pixels(self, side_px: int) -> Tensor:
        """(N, 3, S, S) uint8, channels-last in memory."""
        shape = self._rows, side_px, side_px, 3
        if self._pin or self._made_on.type == "cuda":
            pixels = torch.empty(shape, dtype=torch.uint8, device=self._made_on, pin_memory=self._made_on.type == "cpu")
        else:
            spare = self._spare[side_px]
            buffer = spare.pop() if spare else np.empty(shape, np.uint8)  # NumPy asks for huge pages
            lent = buffer.view()  # lives as long as a tensor shares its memory; the buffer outlives it
            weakref.finalize(lent, spare.append, buffer).atexit = False
            pixels = torch.from_numpy(lent)
        return pixels.permute(0, 3, 1, 2)
