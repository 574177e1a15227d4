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
        keypoints_px: (N, 21, 2) float32 in the same frame, or None; the wrist, then thumb, index, middle, ring and
            little finger, each from the palm outward (FreiHAND's order). Pictures show them; pre-training never reads
            them. A keypoint that is not known is NaN.
        mirror: (N,) bool, the samples whose canonical view is the box seen in a mirror, left for right, so that left
            hands look like right ones; None mirrors none. The mirror is part of `source_to_view_px` and not of the
            augmentation, so keypoints are carried through it and the loss does not undo it. Everything here, boxes,
            keypoints and targets, speaks of the file's image, before the mirror.
        targets: further float32 arrays with N rows, by name; a source has those that its dataset knows:

            - "K" (N, 3, 3), the camera matrix: from the camera's frame to pixels of the image as decoded,
              corner-based. `source_to_view_px` times K projects into a view, mirrored or not.
            - "xyz_m" (N, 21, 3), keypoints in metres, in `keypoints_px`'s order, in the camera's frame: x right,
              y down, z forward, so K xyz divided by depth is `keypoints_px`. NaN where a keypoint is not known.
            - "scale_m" (N,), metres, length of the bone that scale-normalised poses take as 1 (FreiHAND: the middle
              finger's first phalanx, keypoints 9 and 10).
    """

    name: str
    root: Path
    paths: Sequence[str]
    box_px: npt.NDArray[np.float32]
    keypoints_px: npt.NDArray[np.float32] | None = None
    mirror: npt.NDArray[np.bool_] | None = None
    targets: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = len(self.paths)
        arrays = {"box_px": self.box_px, "keypoints_px": self.keypoints_px, "mirror": self.mirror, **self.targets}
        for name, array in arrays.items():
            if array is not None and len(array) != count:
                raise ValueError(f"{self.name}: {name} has {len(array)} rows for {count} samples")

    def __len__(self) -> int:
        return len(self.paths)

    def path(self, sample: int) -> Path:
        """Full path of one sample."""
        return self.root / self.paths[sample]
