"""Pictures of a fine-tuning run: how loss and errors fell, and what the network sees in held-out hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from train.pictures import Image, draw_hand, log_axis, save_figure, save_sheet
from train.pose.inference import Poses
from train.pose.validation import Validation, best_of

Floats = npt.NDArray[np.float64]

_SIDE_PX = 192


def save_curves(path: Path, rows: Sequence[Mapping[str, Any]], validations: Sequence[Mapping[str, Any]]) -> None:
    """The parts of the loss over the steps, and below the errors on held-out hands where they could be measured."""
    steps = [row["step"] for row in rows]
    validations = [row for row in validations if np.isfinite(row["pa_epe_cm"])]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(7, 6), layout="constrained")
        axes = figure.subplots(3 if validations else 2, 1, sharex=True)
        axes[0].plot(steps, [row["keypoints_px"] for row in rows], color="#1f6fb4")
        axes[0].set_ylabel("2D keypoints,\nmean |error| [px]")
        axes[1].plot(steps, [row["depth"] for row in rows], color="#1f6fb4", label="relative depths")
        if any(row["root_depth"] for row in rows):
            axes[1].plot(steps, [row["root_depth"] for row in rows], color="#c0504d", label="root's depth")
        axes[1].set_ylabel("depth, mean |error|\n[reference bones]")
        axes[1].legend(frameon=False)
        if validations:
            measured = [row["step"] for row in validations]
            axes[2].plot(measured, [row["epe_cm"] for row in validations], ".-", color="#888888", label="EPE")
            axes[2].plot(measured, [row["pa_epe_cm"] for row in validations], ".-", color="#2e8b57", label="PA-EPE")
            best = best_of(validations)
            axes[2].annotate(
                f"best PA-EPE {best['pa_epe_cm']:.2f} cm", (best["step"], best["pa_epe_cm"]), xytext=(0, 6),
                textcoords="offset points", ha="right", color="#2e8b57",
            )  # fmt: skip
            axes[2].set_ylabel("held-out hands [cm]")
            axes[2].legend(frameon=False)
        for axis in axes:
            log_axis(axis)
        axes[-1].set_xlabel("optimiser step")
        save_figure(path, figure, dpi=130)


def save_predictions(path: Path, poses: Poses, validation: Validation) -> None:
    """Held-out hands in three pictures each: the labels, the prediction, and both from the side."""
    assert validation.index.keypoints_px is not None
    pictures = []
    for number, image in zip(poses.image_rows.tolist(), poses.images, strict=True):
        sample = int(poses.samples[number])
        enlarge = _SIDE_PX / image.shape[0]
        large: Image = np.asarray(cv2.resize(image, (_SIDE_PX, _SIDE_PX), interpolation=cv2.INTER_CUBIC), np.uint8)
        matrix = poses.source_to_view_px[number] * enlarge
        overlays = []
        for keypoints_px in (validation.index.keypoints_px[sample], poses.keypoints_px[number]):
            overlay = large.copy()
            draw_hand(overlay, keypoints_px @ matrix[:, :2].T + matrix[:, 2])
            overlays.append(overlay)
        true = validation.labels.joints_m[sample].astype(np.float64) / float(validation.labels.scale_m[sample])
        pictures.append(np.concatenate([*overlays, side_view(poses.joints[number], true, _SIDE_PX)], axis=1))
    save_sheet(path, pictures, columns=2)


def side_view(joints: Floats, true: Floats | None, side_px: int) -> Image:
    """A hand from the side, the camera on the left: depth to the right, y down; the true hand in grey behind it.

    Args:
        joints: (21, 3) in the camera's frame, in reference bones.
        true: the same of the label, or None; both are drawn with their wrists in one place.
        side_px: of the picture.
    """
    picture = np.full((side_px, side_px, 3), 40, np.uint8)
    around = joints if true is None else true
    around = around - around[:1]
    low, high = np.nanmin(around, axis=0), np.nanmax(around, axis=0)
    pixels_per_bone = 0.75 * side_px / max(float((high - low)[1:].max()), 4.0)
    centre = (low + high)[[2, 1]] / 2
    for hand, grey in ((true, 130), (joints, None)):
        if hand is not None:
            draw_hand(picture, ((hand - hand[:1])[:, [2, 1]] - centre) * pixels_per_bone + side_px / 2, grey=grey)
    return picture
