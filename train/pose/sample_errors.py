"""Computes a network's errors on labelled samples, and counts the samples that are left out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from peclr_dali.train.pose.inference import Poses
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.pose.metrics import Floats, in_one_place, pixel_errors, pose_tables


@dataclass(frozen=True)
class Errors:
    """Errors of N predictions.

    Attributes:
        tables: (N, K) for each of the `METRICS` that could be measured; NaN where a keypoint is not measured.
        measured: number of samples that are measured.
        left_out: number of samples that are not measured, by reason.
        single_points: number of measured predictions that are a single point.
    """

    tables: dict[str, Floats]
    measured: int
    left_out: dict[str, int]
    single_points: int

    @property
    def reasons(self) -> str:
        """The reasons why samples are not measured, with counts; empty if all are measured."""
        return ", ".join(f"{count} {reason}" for reason, count in self.left_out.items() if count)


def with_true_root(poses: Poses, labels: PoseLabels, root: int) -> Poses:
    """The poses of N images with the label's depth of the root, keypoint `root`, where there is one.

    Each keypoint moves along its ray, so that its pixel and its depth relative to the root stay. EPE and AUC then do
    not measure how well the distance to the camera is known.
    """
    depth = poses.joints[..., 2]
    true_depth = labels.joints[:, root, 2].astype(np.float64) / labels.scale_m
    moved = poses.joints * ((depth - depth[:, [root]] + true_depth[:, None]) / depth)[..., None]
    return replace(poses, joints=np.where(np.isfinite(true_depth)[:, None, None], moved, poses.joints))


def errors_of(
    poses: Poses,
    labels: PoseLabels,
    *,
    unreadable: npt.NDArray[np.bool_] | None = None,
    proper_rotation: bool = False,
) -> Errors:
    """Compute the errors of predictions for N images, given their labels, row by row; arguments as `pose_tables`.

    A sample is left out and counted if its file cannot be read, it has no label, its label is a single point, or the
    prediction is not finite. Errors without alignment are NaN if camera or scale are unknown.

    Args:
        unreadable: (N,) images that could not be read; none by default.
    """
    true, true_px = labels.joints.astype(np.float64), labels.keypoints_px.astype(np.float64)
    # Alignment does not need the scale.
    unit = np.where(np.isnan(labels.scale_m), 1.0, labels.scale_m.astype(np.float64))
    joints, keypoints_px = poses.joints * unit[:, None, None], poses.keypoints_px
    known, known_px = (np.asarray(np.isfinite(points).all(axis=2)) for points in (true, true_px))  # (N, K) each
    reasons = {
        "unreadable": np.zeros(len(joints), bool) if unreadable is None else unreadable,
        "without labels": ~(known | known_px).any(axis=1),
        "label is one point": in_one_place(true, known),
        "prediction is not finite": ~np.isfinite(joints).all(axis=(1, 2)) | ~np.isfinite(keypoints_px).all(axis=(1, 2)),
    }
    usable, left_out = np.ones(len(joints), bool), {}
    for reason, found in reasons.items():  # each sample counts only for its first reason
        left_out[reason] = int((found & usable).sum())
        usable &= ~found
    counts = known & usable[:, None]
    tables = pose_tables(joints, true, valid=counts, proper_rotation=proper_rotation)
    if labels.in_metres:
        for name in ("epe_cm", "auc"):
            tables[name][~(labels.has_camera & ~np.isnan(labels.scale_m))] = np.nan
    else:
        tables = {"pa_epe_px": tables["pa_epe_cm"] / 100}
    tables["epe_px"] = pixel_errors(keypoints_px, true_px, valid=known_px & usable[:, None])
    return Errors(
        {name: table for name, table in tables.items() if not np.isnan(table).all()},
        int(usable.sum()),
        left_out,
        int(in_one_place(joints, counts).sum()),
    )
