"""The stage that plans the views of a chunk, given its samples and files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from peclr_dali.pipelines.render.chunk import Chunk
from peclr_dali.pipelines.render.settings import Settings
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.samples.order import Order
from peclr_dali.pipelines.views.augmentation import Augmentation
from peclr_dali.pipelines.views.draws import draw_view
from peclr_dali.pipelines.views.plan import join_plans, plan_views


def plan_chunk(
    chunk: Chunk, *, index: Index, order: Order, augmentations: Sequence[Augmentation], settings: Settings
) -> Chunk:
    """Add the plan: draws, matrices, halvings and regions. The draws are those of the positions and views."""
    epochs, halves = order.epochs(chunk.positions), chunk.halves
    plans = []
    for number, half in enumerate(halves):
        views = range(len(augmentations))[number :: len(halves)]
        samples, files = chunk.samples[half], chunk.files[half]
        draws = [
            np.concatenate([
                draw_view(augmentations[view], seed=order.seed, epoch=epoch, view=view, places=places)
                for epoch, places in epochs
            ])
            for view in views
        ]  # fmt: skip
        plans.append(
            plan_views(
                np.array([file.size_px for file in files], np.int64),
                np.array([file.orientation for file in files], np.int64),
                index.box_px[samples],
                draws,
                [augmentations[view].geometry for view in views],
                mirror=None if index.mirror is None else index.mirror[samples],
                croppable=np.array([file.is_jpeg for file in files]) if settings.regions else None,
            )
        )
    return replace(chunk, plan=join_plans(plans))
