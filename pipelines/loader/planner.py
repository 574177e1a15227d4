"""The second stage: plans the views of a chunk from its files' headers, boxes and random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from peclr_dali.pipelines.arrays import FloatArray, IntArray
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import Order
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.plan import plan_views


@dataclass(frozen=True)
class Planner:
    """Plans views: draws, matrices, halvings and regions. The draws are those of the positions and views.

    Attributes:
        augmentations: of each view.
        regions: decode regions of images, where that is faster.
    """

    index: Index
    order: Order
    augmentations: Sequence[Augmentation]
    regions: bool

    def add_plan(self, chunk: Chunk) -> Chunk:
        """Add the plan to a chunk of N rows and M images.

        Where rows hold pairs (M = 2 N), views 0, 2, ... show the first images, and views 1, 3, ... the second ones.
        """
        rows = np.arange(len(chunk.positions))
        images_per_row = len(chunk.files) // len(rows)
        view = np.arange(len(self.augmentations))[:, None]
        mirror = self.index.mirror
        plan = plan_views(
            np.array([file.size_px for file in chunk.files], np.int64),
            np.array([file.orientation for file in chunk.files], np.int64),
            self.index.box_px[chunk.samples],
            [self._draws(number, chunk.positions) for number in range(len(self.augmentations))],
            [augmentation.geometry for augmentation in self.augmentations],
            image=rows + len(rows) * (view % images_per_row),
            mirror=None if mirror is None else mirror[chunk.samples],
            croppable=np.array([file.is_jpeg for file in chunk.files]) if self.regions else None,
        )
        return replace(chunk, plan=plan)

    def _draws(self, view: int, positions: IntArray) -> FloatArray:
        """The draws (N, COLUMNS) of a view at some positions (N,), which may lie in several epochs."""
        augmentation, seed = self.augmentations[view], self.order.seed
        tables = [
            draw_view(augmentation, seed=seed, epoch=epoch, view=view, places=places)
            for epoch, places in self.order.epochs(positions)
        ]
        return np.concatenate(tables)
