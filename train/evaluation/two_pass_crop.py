"""Estimates poses without boxes, in two passes as the authors' test code does: crop the middle, then the prediction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.models.pose import PoseNetwork
from peclr_dali.pipelines.files.check import image_sizes_px
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pose.inference import Floats, Poses, Progress, estimate_poses, from_view

FIRST_BOX_FRAC = 0.33
"""Side of the first pass's box, which is in the middle of the image, over the image's longer side."""
BOX_IN_VIEW = 0.7
"""Side of a box over the side of the view around it."""
_FARTHEST_PX = 1e5
"""Keypoints of the first view that are farther away are moved to this distance."""


def estimate_in_two_passes(
    network: PoseNetwork,
    index: Index,
    intrinsics: npt.NDArray[np.float32],
    config: FinetuneConfig,
    world: World,
    *,
    keep_images: int = 0,
    progress: Progress | None = None,
) -> Poses:
    """Estimate poses without the boxes of the index; arguments and result as in `estimate_poses`.

    The first box is `FIRST_BOX_FRAC` of the image; the second is the rectangle around the predicted 2D keypoints, in
    whole pixels of the first view. The box's longer side is `BOX_IN_VIEW` of the view's side; the view is black outside
    the image, and images are not halved before they are warped. Left hands are mirrored in both views, as in training.

    The authors' code counts pixels from the first pixel's centre. For the authors' networks
    (`pose.first_keypoint = "palm"`), this function does the same. For ours, it counts from the corner, as in training.
    """
    geometry = replace(config.geometry, fill=0, antialias=False)
    config = replace(config, geometry=geometry)
    origin_px = 0.0 if config.pose.first_keypoint == "palm" else 0.5
    sizes_px = image_sizes_px(index.read, range(len(index)))[:, ::-1]  # width, height; 0 for what cannot be read
    middle = boxes_in_views(
        sizes_px / 2, FIRST_BOX_FRAC * sizes_px.max(axis=1), index.mirrored, geometry.side_px, origin_px
    )
    index = replace(index, box_px=middle)
    first = estimate_poses(network, index, intrinsics, config, world, origin_px=origin_px, progress=progress)
    seen_px = np.nan_to_num(first.in_view_px).clip(-_FARTHEST_PX, _FARTHEST_PX)
    edges_px = np.trunc(np.stack([seen_px.min(axis=1), seen_px.max(axis=1)], axis=1))  # (N, 2, 2)
    corners_px = from_view(torch.from_numpy(edges_px), torch.from_numpy(first.source_to_view_px)).numpy()
    longer_px = np.abs(corners_px[:, 1] - corners_px[:, 0]).max(axis=1)  # of a mirrored view, the first is on the right
    around = boxes_in_views(corners_px.mean(axis=1), longer_px.clip(min=1), index.mirrored, geometry.side_px, origin_px)
    index = replace(index, box_px=around)
    return estimate_poses(
        network, index, intrinsics, config, world, keep_images=keep_images, origin_px=origin_px, progress=progress
    )


def boxes_in_views(
    centre_px: Floats, side_px: Floats, mirror: npt.NDArray[np.bool_], view_side_px: int, origin_px: float
) -> npt.NDArray[np.float32]:
    """Boxes (N, 3) for the loader, whose canonical views have the given boxes in the middle, at `BOX_IN_VIEW`.

    Args:
        centre_px: (N, 2) centres of the given boxes, in the source.
        side_px: (N,) sides of the given boxes, in the source.
        mirror: (N,) the views that are mirrored, left for right.
        view_side_px: side of the views.
        origin_px: coordinate of the first pixel's centre, in `centre_px` and in the view whose middle is
            `view_side_px` / 2; the loader counts from 0.5.
    """
    source_px = side_px / (BOX_IN_VIEW * view_side_px)  # pixels of the source for one of the view
    across_px = np.stack([np.where(mirror, -source_px, source_px), source_px], axis=1)
    loader_centre_px = centre_px + (0.5 - origin_px) * (1 - across_px)
    return np.column_stack([loader_centre_px, side_px / BOX_IN_VIEW]).astype(np.float32)
