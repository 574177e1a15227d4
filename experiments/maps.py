"""Maps of the equivariance error |t f(I) - f(t(I))| of the 2D keypoints (paper, supplement)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from errors import UserError
from experiments.config import Maps
from pipelines.samples.index import Index
from pipelines.sources import load_index
from train.distributed.world import single_process
from train.evaluation.network_errors import evaluation_config
from train.pose.inference import estimate_poses
from train.pose.labels import labels_to_learn
from train.pose.pose_run import PoseRun
from train.runs.log import progress_bar

ROTATION_DEG = 80.0
SHIFT_PX = 25.0
SIDE_PX = 128.0
"""Side of a view in the paper, whose pixels are the unit of shifts and errors."""


def measure_maps(run: PoseRun, overrides: Sequence[str], maps: Maps) -> dict[str, Any]:
    """Errors of a network at each place of the grids, means over images and keypoints, in pixels of a view of 128.

    f(I) comes from the canonical view, f(t(I)) from the same view after rotation or shift, made from the source. The
    two are compared in the source's frame, which is t^-1 applied to both; t keeps lengths.

    Args:
        run: the network.
        overrides: the images, as for `evaluation_config`.
        maps: the grids.

    Raises:
        UserError: images without boxes, which cannot be shifted.
    """
    config = evaluation_config(run, (), overrides)
    index = load_index(config.data)
    if (index.box_px[:, 2] <= 0).any():
        raise UserError(f"{index.root} ({index.name}): has images without boxes; the maps shift boxes. Give data.box")
    intrinsics = labels_to_learn(index, config.pose).intrinsics
    world = single_process(config.train.device)

    def poses(moved: Index, rotation_deg: float) -> Any:
        return estimate_poses(run.network, moved, intrinsics, config, world, rotation_deg=rotation_deg)

    still = poses(index, 0.0)
    view_px_per_px = np.sqrt(np.abs(np.linalg.det(still.source_to_view_px[:, :, :2])))  # (N,)

    def error_px(shift_px: tuple[float, float] = (0.0, 0.0), rotation_deg: float = 0.0) -> float:
        moved = poses(shifted(index, shift_px), rotation_deg)
        distance_px = np.linalg.norm(moved.keypoints_px - still.keypoints_px, axis=2).mean(axis=1) * view_px_per_px
        same = moved.samples == still.samples  # a bad file may have had two substitutes
        return float(distance_px[same].mean()) * SIDE_PX / config.geometry.side_px

    angles = np.linspace(-ROTATION_DEG, ROTATION_DEG, maps.rotations).tolist()
    shifts = np.linspace(-SHIFT_PX, SHIFT_PX, maps.translations).tolist()
    places: list[Callable[[], float]] = [lambda angle=angle: error_px(rotation_deg=angle) for angle in angles]  # type: ignore[misc]
    places += [lambda x=x, y=y: error_px((x, y)) for y in shifts for x in shifts]  # type: ignore[misc]
    errors = []
    with progress_bar("equivariance") as progress:
        for done, place in enumerate(places, 1):
            errors.append(place())
            progress(done, len(places))
    return {
        "rotation_deg": angles,
        "rotation_error_px": errors[: len(angles)],
        "shift_px": shifts,
        "shift_error_px": np.reshape(errors[len(angles) :], (len(shifts), len(shifts))).tolist(),
    }


def shifted(index: Index, shift_px: tuple[float, float]) -> Index:
    """The index with its boxes moved, so that what the views show is shifted by (x, y) pixels of a view of 128."""
    x, y = shift_px
    box_px = index.box_px.copy()
    side = index.box_px[:, 2] / SIDE_PX
    box_px[:, 0] -= np.where(index.mirrored, -x, x) * side
    box_px[:, 1] -= y * side
    return dataclasses.replace(index, box_px=box_px)
