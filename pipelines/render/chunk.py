"""The record that passes through the loader's stages."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.files.image_file import ImageFile
from peclr_dali.pipelines.views.plan import Plan

_NO_PX, _NO_VIEWS = np.empty((0, 2), np.int64), np.empty((0, 0), np.float32)
_NO_PLAN = Plan(_NO_PX, _NO_PX, _NO_PX, _NO_VIEWS, _NO_VIEWS, _NO_VIEWS, _NO_VIEWS, _NO_PX)


@dataclass(frozen=True)
class Chunk:
    """N consecutive rows of a step, whose M images are read and decoded together: one batch of DALI.

    Every stage takes a chunk and returns it with more of its fields.

    Attributes:
        positions: (N,) int64, global positions in the run.
        samples: (M,) int64, the rows of the index that are used, substitutes included.
        bad: (K,) int64, rows of the index that could not be used; a row appears as often as it was tried.
        files: the M files, checked.
        plan: the views, which image each of them shows, and the regions of the images to decode.
    """

    positions: IntArray
    samples: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    bad: IntArray = field(default_factory=lambda: np.empty(0, np.int64))
    files: Sequence[ImageFile] = ()
    plan: Plan = _NO_PLAN

    def only(self, image: int) -> "Chunk":
        """The file and the region of one image, to decode it by itself."""
        region = replace(_NO_PLAN, start_px=self.plan.start_px[[image]], shape_px=self.plan.shape_px[[image]])
        return Chunk(self.positions[:1], files=[self.files[image]], plan=region)
