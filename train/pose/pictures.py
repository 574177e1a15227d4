"""Pictures of a fine-tuning run: curves of losses and errors, and predictions for held-out images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from peclr_dali.train.pose.inference import Floats, Poses
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.pose.validation import best_of
from peclr_dali.train.runs.pictures import Image, draw_skeleton, log_axis, save_figure, save_sheet

POSE_PX = 192
"""Side in pixels of each picture of a pose in predictions.png and worst.png."""
_BACKGROUND = 40


def save_curves(path: Path, rows: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]) -> None:
    """Draw the parts of the loss over the steps, and below them the errors on held-out images, if measured."""
    steps = [row["step"] for row in rows]
    shown, last, unit = {"epe_cm": ("EPE", "#888888"), "pa_epe_cm": ("PA-EPE", "#2e8b57")}, "pa_epe_cm", "cm"
    if not any(np.isfinite(row["pa_epe_cm"]) for row in validations):
        shown, last, unit = {"epe_px": ("2D EPE", "#2e8b57")}, "epe_px", "px of the source"
    validations = [row for row in validations if np.isfinite(row[last])]
    depths = [(name, title) for name, title in (("depth", "relative depths"), ("root_depth", "root's depth"))
              if any(row[name] for row in rows)]  # fmt: skip
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 6), layout="constrained")
        axes = figure.subplots(1 + bool(depths) + bool(validations), 1, sharex=True, squeeze=False)[:, 0]
        axes[0].plot(steps, [row["keypoints_px"] for row in rows], color="#1f6fb4")
        axes[0].set_ylabel("2D keypoints,\nmean |error| [px]")
        for (name, title), colour in zip(depths, ("#1f6fb4", "#c0504d"), strict=False):
            axes[1].plot(steps, [row[name] for row in rows], color=colour, label=title)
            axes[1].set_ylabel("depth, mean |error|\n[reference bones]")
            axes[1].legend(frameon=False)
        if validations:
            measured = [row["step"] for row in validations]
            for name, (title, colour) in shown.items():
                axes[-1].plot(measured, [row[name] for row in validations], ".-", color=colour, label=title)
            best = best_of(validations)
            axes[-1].annotate(
                f"best {title} {best[last]:.2f} {unit}", (best["step"], best[last]), xytext=(0, 6),
                textcoords="offset points", ha="right", color=colour,
            )  # fmt: skip
            axes[-1].set_ylabel(f"held-out images [{unit}]")
            axes[-1].legend(frameon=False)
        for axis in axes:
            log_axis(axis)
        axes[-1].set_xlabel("optimiser step")
        save_figure(path, figure, dpi=130)


def save_predictions(path: Path, poses: Poses, labels: PoseLabels) -> None:
    """Write a sheet of held-out poses, see `pose_picture`."""
    pictures = [
        pose_picture(poses, shown, labels, int(poses.samples[row]), depth=labels.in_metres)
        for shown, row in enumerate(poses.image_rows.tolist())
    ]
    save_sheet(path, pictures, columns=2)


def pose_picture(poses: Poses, shown: int, labels: PoseLabels, sample: int, *, depth: bool) -> Image:
    """Draw a pose in three pictures: the label, the prediction, and both from the side.

    `shown` is the number of the view in `poses`; `sample` is the row of its label. Without depths the third picture is
    empty.
    """
    image, row = poses.images[shown], int(poses.image_rows[shown])
    large: Image = np.asarray(cv2.resize(image, (POSE_PX, POSE_PX), interpolation=cv2.INTER_CUBIC), np.uint8)
    matrix = poses.source_to_view_px[row] * (POSE_PX / image.shape[0])
    overlays = []
    for keypoints_px in (labels.keypoints_px[sample], poses.keypoints_px[row]):
        overlay = large.copy()
        draw_skeleton(overlay, keypoints_px @ matrix[:, :2].T + matrix[:, 2])
        overlays.append(overlay)
    side = np.full_like(large, _BACKGROUND)
    if depth:
        true = labels.joints[sample].astype(np.float64) / float(labels.scale_m[sample])
        side = side_view(poses.joints[row], true if np.isfinite(true).all() else None, POSE_PX)
    return np.concatenate([*overlays, side], axis=1)


def side_view(joints: Floats, true: Floats | None, side_px: int) -> Image:
    """Draw a pose from the side with the camera on the left: depth to the right, y down; the true pose in grey.

    Both are (K, 3) in the camera's frame, in reference bones, and are drawn with their wrists at the same point.
    """
    picture = np.full((side_px, side_px, 3), _BACKGROUND, np.uint8)
    around = joints if true is None else true
    around = around - around[0]
    low, high = np.nanmin(around, axis=0), np.nanmax(around, axis=0)
    pixels_per_bone = 0.75 * side_px / max(float((high - low)[1:].max()), 4.0)
    centre = (low + high)[[2, 1]] / 2
    for pose, grey in ((true, 130), (joints, None)):
        if pose is not None:
            points_px = ((pose - pose[0])[:, [2, 1]] - centre) * pixels_per_bone + side_px / 2
            draw_skeleton(picture, points_px, grey=grey)
    return picture
