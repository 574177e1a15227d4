"""Maps of a network's equivariance error over rotations and shifts (paper, supplement, section 6)."""

import dataclasses

import numpy as np

from peclr_dali.pipelines.arrays import DoubleArray
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.distributed.world import single_process
from peclr_dali.train.evaluation.errors import mean_keypoints_px
from peclr_dali.train.pose.inference import estimate_poses
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.pose.pose_run import PoseRun

ANGLES_DEG = np.linspace(-80, 80, 17)
SHIFTS_PX = np.linspace(-25, 25, 5)  # along each axis
SIDE_PX = 128.0
"""All pixels of the maps are those of a view with this side, the paper's."""


def equivariance_maps(run: PoseRun, config: FinetuneConfig, index: Index, labels: PoseLabels) -> dict[str, DoubleArray]:
    """Equivariance errors |t f(I) - f(t(I))| of the 2D keypoints over grids of rotations and shifts t.

    f(I) comes from the canonical view, f(t(I)) from the same view after rotation or shift, made from the source. The
    two are compared in the source's frame, which is t^-1 applied to both; t keeps lengths. All images need boxes.

    Returns:
        "rotation_deg" (R,) and "shift_px" (T,), the places; "rotation_error_px" (R,) and "shift_error_px" (T, T), y
        before x: means over images and keypoints. And, if the labels allow it, "constant_rotation_error_px" (R,), of
        the mean keypoints as a constant prediction: they stay where they are, so each errs by the chord that it should
        have moved along. The error of any constant under a shift is its length.
    """
    network, world = run.network, single_process(config.train.device)
    still = estimate_poses(network, index, labels.intrinsics, config, world)
    view_px_per_px = np.sqrt(np.abs(np.linalg.det(still.source_to_view_px[:, :, :2])))  # (N,)

    def error_px(x_px: float, y_px: float, rotation_deg: float) -> float:
        shown = shifted(index, x_px, y_px)
        moved = estimate_poses(network, shown, labels.intrinsics, config, world, rotation_deg=rotation_deg)
        distance_px = np.linalg.norm(moved.keypoints_px - still.keypoints_px, axis=2).mean(axis=1) * view_px_per_px
        # A bad file may have had two substitutes.
        return float(distance_px[moved.samples == still.samples].mean()) * SIDE_PX / config.geometry.side_px

    maps = {
        "rotation_deg": ANGLES_DEG,
        "rotation_error_px": np.array([error_px(0, 0, angle) for angle in ANGLES_DEG]),
        "shift_px": SHIFTS_PX,
        "shift_error_px": np.array([[error_px(x, y, 0) for x in SHIFTS_PX] for y in SHIFTS_PX]),
    }
    centre_px, side_px = np.split(index.box_px[:, None], [2], axis=2)
    radii_frac = np.linalg.norm((mean_keypoints_px(index, labels) - centre_px) / side_px, axis=2)
    chords_px = 2 * np.mean(radii_frac) * SIDE_PX * np.sin(np.radians(np.abs(ANGLES_DEG)) / 2)
    if np.isfinite(chords_px).all():
        maps["constant_rotation_error_px"] = chords_px
    return maps


def shifted(index: Index, x_px: float, y_px: float) -> Index:
    """The index with its boxes moved, so that what the views show is shifted by pixels of a view of 128."""
    box_px = index.box_px.copy()
    side = index.box_px[:, 2] / SIDE_PX
    box_px[:, 0] -= np.where(index.mirrored, -x_px, x_px) * side
    box_px[:, 1] -= y_px * side
    return dataclasses.replace(index, box_px=box_px)
