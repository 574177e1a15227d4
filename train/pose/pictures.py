"""Pictures of a fine-tuning run: curves of losses and errors, and predictions for held-out images."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from peclr_dali.pipelines.arrays import DoubleArray
from peclr_dali.train.pose.inference import Poses
from peclr_dali.train.pose.labels import PoseLabels
from peclr_dali.train.runs.pictures import Image, draw_skeleton, log_axis, save_figure, save_sheet

POSE_PX = 192
"""Side in pixels of each picture of a pose in predictions.png and worst.png."""
PREDICTION_PX = 320
"""The same in drawings of `predict`."""
_BACKGROUND = 40


def save_curves(path: Path, rows: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]) -> None:
    """Draw the parts of the loss over the steps, and below them the errors on held-out images, if measured."""
    titles = (("depth", "relative depths"), ("root_depth", "root's depth"))
    depths = {name: title for name, title in titles if any(row[name] for row in rows)}
    held_out, unit = {"epe_cm": "EPE", "pa_epe_cm": "PA-EPE"}, "cm"
    if not any(np.isfinite(row["pa_epe_cm"]) for row in validations):
        held_out, unit = {"epe_px": "2D EPE"}, "px of the source"
    panels = [
        ("2D keypoints,\nmean |error| [px]", rows, {"keypoints_px": "augmented training images"}),
        ("depth, mean |error|\n[reference bones]", rows, depths),
        (f"held-out images [{unit}]", validations, held_out),
    ]
    panels = [panel for panel in panels if all(panel[1:])]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 6), layout="constrained")
        axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axis, (label, measured, curves) in zip(axes, panels, strict=True):
            for name, title in curves.items():
                steps, values = ([row[key] for row in measured] for key in ("step", name))
                axis.plot(steps, values, ".-" if measured is validations else "-", label=title)
            axis.set_ylabel(label)
            axis.legend(frameon=False)
            log_axis(axis)
        axes[-1].set_xlabel("optimiser step")
        save_figure(path, figure, dpi=130)


def save_predictions(path: Path, poses: Poses, labels: PoseLabels) -> None:
    """Write a sheet of held-out poses, see `pose_picture`."""
    pictures = [
        pose_picture(poses, row, labels, int(poses.samples[row]), depth=labels.in_metres)
        for row in range(len(poses.images))
    ]
    save_sheet(path, pictures, columns=2)


def pose_picture(poses: Poses, row: int, labels: PoseLabels, sample: int, *, depth: bool) -> Image:
    """Draw a pose in three pictures: the label, the prediction, and both from the side.

    `row` is that of the prediction in `poses`, which has its view; `sample` is the row of its label. Without depths the
    third picture is empty.
    """
    image, to_view = poses.images[row], poses.source_to_view_px[row]
    label, predicted = (
        _overlay(image, to_view, points, POSE_PX) for points in (labels.keypoints_px[sample], poses.keypoints_px[row])
    )
    side = np.full_like(label, _BACKGROUND)
    if depth:
        true = labels.joints[sample].astype(np.float64) / float(labels.scale_m[sample])
        side = side_view(poses.joints[row], true if np.isfinite(true).all() else None, POSE_PX)
    return np.concatenate([label, predicted, side], axis=1)


def prediction_pictures(
    picture: Image,
    box_px: DoubleArray,
    view: Image,
    source_to_view_px: DoubleArray,
    keypoints_px: DoubleArray,
    joints: DoubleArray | None,
) -> list[Image]:
    """Draw a prediction: the whole picture with the network's box, the network's view, and the pose from the side.

    `picture` is (H, W, 3) and `view` (S, S, 3) RGB. `box_px` (x0, y0, x1, y1) and `keypoints_px` (K, 2) are in pixels
    of the picture, `joints` (K, 3) in reference bones; None: without depths.
    """
    height, width, _ = picture.shape
    scale = PREDICTION_PX / max(height, width)
    size = max(1, round(scale * width)), max(1, round(scale * height))
    x, y = ((PREDICTION_PX - length) // 2 for length in size)
    whole = np.full((PREDICTION_PX, PREDICTION_PX, 3), _BACKGROUND, np.uint8)
    whole[y : y + size[1], x : x + size[0]] = cv2.resize(picture, size, interpolation=cv2.INTER_AREA)
    x0, y0, x1, y1 = np.rint(box_px * scale + [x, y, x, y]).clip(-1e4, 1e4).astype(int).tolist()
    cv2.rectangle(whole, (x0, y0), (x1, y1), (255, 255, 255))
    draw_skeleton(whole, keypoints_px * scale + [x, y])
    shown = _overlay(view, source_to_view_px, keypoints_px, PREDICTION_PX)
    return [whole, shown, *([] if joints is None else [side_view(joints, None, PREDICTION_PX)])]


def _overlay(view: Image, source_to_view_px: DoubleArray, keypoints_px: DoubleArray, side_px: int) -> Image:
    """A view (S, S, 3), enlarged, with the skeleton of keypoints (K, 2) in pixels of its source."""
    large = np.asarray(cv2.resize(view, (side_px, side_px), interpolation=cv2.INTER_CUBIC), np.uint8)
    matrix = source_to_view_px * (side_px / len(view))
    draw_skeleton(large, keypoints_px @ matrix[:, :2].T + matrix[:, 2])
    return large


def side_view(joints: DoubleArray, true: DoubleArray | None, side_px: int) -> Image:
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
            draw_skeleton(picture, ((pose - pose[0])[:, [2, 1]] - centre) * pixels_per_bone + side_px / 2, grey=grey)
    return picture
