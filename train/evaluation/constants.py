"""Errors of constant predictions, to compare the errors of a network with.

The constants of an evaluation are fitted to the labels that are measured, which favours them; those of the probe to the
labels that it is fitted to. A network that is not clearly better has learnt nothing from the pictures.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from peclr_dali.errors import UserError
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.pose.metrics import (
    Floats,
    align,
    in_one_place,
    metric_of,
    pixel_errors,
    pose_tables,
)

_ALIGNMENTS: Final = 5
"""Rounds of aligning all poses to their mean; two are enough to converge."""


def evaluation_constants(index: Index, labels: PoseLabels) -> dict[str, dict[str, float]]:
    """The metrics of each of `CONSTANTS` that the labels allow, by name."""
    found = {}
    known_px = np.isfinite(labels.keypoints_px).all(axis=2)
    placed_px = mean_keypoints_px(labels, index.box_px)
    known_px &= np.isfinite(placed_px).all(axis=2)
    if known_px.any():
        error_px = pixel_errors(placed_px, labels.keypoints_px, valid=known_px)
        found["mean_keypoints"] = {"epe_px": metric_of(error_px)}
    joints_m = labels.joints.astype(np.float64)
    if labels.in_metres and len(_poses_of_some_size(joints_m)):
        found |= constant_pose_errors(joints_m, joints_m)
    return found


def mean_keypoints_px(labels: PoseLabels, box_px: npt.NDArray[np.float32]) -> Floats:
    """The mean place of each keypoint in its box, put into every box: (N, K, 2), in pixels of the source.

    NaN where a keypoint is never labelled, or the box is a whole image of unknown size. Mirrored samples count as their
    mirror image.
    """
    side_px = np.where(box_px[:, 2] > 0, box_px[:, 2], np.nan)[:, None, None]
    turned = np.where(labels.mirror[:, None], [-1.0, 1.0], 1.0)[:, None]  # (N, 1, 2)
    in_box = ((labels.keypoints_px - box_px[:, None, :2]) / side_px * turned).astype(np.float64)
    mean = np.ma.masked_invalid(in_box).mean(axis=0).filled(np.nan)
    return np.asarray(mean * turned * side_px + box_px[:, None, :2])


def constant_pose_errors(known_m: Floats, measured_m: Floats) -> dict[str, dict[str, float]]:
    """EPE and AUC of the mean of the joints in the camera's frame; PA-EPE and PA-AUC of one rigid pose.

    The rigid pose is the mean of the poses after alignment to each other; the metric aligns it to each pose.

    Args:
        known_m: (N, K, 3) poses whose mean is taken, in metres. Labels that are a single point, or not finite, are left
            out.
        measured_m: (M, K, 3) poses to measure on, in metres, with the same exception.

    Raises:
        UserError: no pose is left.
    """
    known_m, measured_m = (_poses_of_some_size(poses_m) for poses_m in (known_m, measured_m))
    if not (len(known_m) and len(measured_m)):
        raise UserError("all labels are a single point or not finite: expected poses. Use another dataset")
    rigid_m = known_m[0]
    for _ in range(_ALIGNMENTS):
        rigid_m = align(known_m, np.broadcast_to(rigid_m, known_m.shape)).mean(axis=0)
    poses = {
        "mean_joints": (known_m.mean(axis=0), ("epe_cm", "auc")),
        "rigid_pose": (rigid_m, ("pa_epe_cm", "pa_auc")),
    }
    errors = {}
    for name, (pose_m, metrics) in poses.items():
        tables = pose_tables(np.broadcast_to(pose_m, measured_m.shape), measured_m)
        errors[name] = {metric: metric_of(tables[metric]) for metric in metrics}
    return errors


def _poses_of_some_size(poses_m: Floats) -> Floats:
    known: npt.NDArray[np.bool_] = np.asarray(np.isfinite(poses_m).all(axis=2))
    return poses_m[known.all(axis=1) & ~in_one_place(poses_m, known)]
