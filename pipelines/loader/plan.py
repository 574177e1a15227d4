"""The stage that plans the views of a chunk, given its samples and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from peclr_dali.pipelines.arrays import IntArray
from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import Order
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.plan import plan_views


def plan_chunk(
    chunk: Chunk, *, index: Index, order: Order, augmentations: Sequence[Augmentation], settings: Settings
) -> Chunk:
    """Add the plan: draws, matrices, halvings and regions. The draws are those of the positions."""
    epochs, images = order.epochs(chunk.positions), chunk.images
    planned = [
        _planned(image, list(enumerate(augmentations))[number :: len(images)], epochs, order.seed, index, settings)
        for number, image in enumerate(images)
    ]
    return planned[0] if len(planned) == 1 else replace(planned[0], partner=planned[1])


def _planned(
    chunk: Chunk,
    views: Sequence[tuple[int, Augmentation]],
    epochs: Sequence[tuple[int, IntArray]],
    seed: int,
    index: Index,
    settings: Settings,
) -> Chunk:
    """Plan some views of one image in each row: their numbers and augmentations."""
    draws = [
        np.concatenate([
            draw_view(augmentation, seed=seed, epoch=epoch, view=view, places=places) for epoch, places in epochs
        ])
        for view, augmentation in views
    ]  # fmt: skip
    plan = plan_views(
        np.array([file.size_px for file in chunk.files], np.int64),
        np.array([file.orientation for file in chunk.files], np.int64),
        index.box_px[chunk.samples],
        draws,
        [augmentation.geometry for _, augmentation in views],
        mirror=None if index.mirror is None else index.mirror[chunk.samples],
        croppable=np.array([file.is_jpeg for file in chunk.files]) if settings.regions else None,
    )
    return replace(chunk, plan=plan)
