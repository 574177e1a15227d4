"""The table of samples: where the bytes are, where the hand is, what is known about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

WHOLE_IMAGE = (0.0, 0.0, 0.0)
"""The box of an image of which only the decoder will know the size: a square around all of it."""


@dataclass(frozen=True)
class Index:
    """What a source knows about its N samples, before a pixel is read.

    Attributes:
        name: the source, as messages call it.
        root: folder that `paths` are relative to.
        paths: (N,) file names.
        box_px: (N, 3) float32, centre x, centre y and side of the square around the hand, in pixels of the image as
            decoded (EXIF orientation applied), corner-based (the centre of the first pixel is 0.5, 0.5). A side of 0
            means the square around the whole image.
        keypoints_px: (N, 21, 2) float32 in the same frame, or None. Pictures show them; pre-training never reads them.
        targets: further arrays with N rows, such as intrinsics, for sources that have them.
    """

    name: str
    root: Path
    paths: Sequence[str]
    box_px: npt.NDArray[np.float32]
    keypoints_px: npt.NDArray[np.float32] | None = None
    targets: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.paths)
        arrays = {"box_px": self.box_px, "keypoints_px": self.keypoints_px, **self.targets}
        for name, array in arrays.items():
            if array is not None and len(array) != count:
                raise ValueError(f"{self.name}: {name} has {len(array)} rows for {count} samples")

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, sample: int) -> Path:
        """Full path of one sample."""
        return self.root / self.paths[sample]
