"""The drawing of one prediction: the picture with its skeleton, what the network saw, and the pose in 3D."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from errors.terminal import printable
from train.pictures import FINGER_COLOURS, FINGERS, Image, save_figure

if TYPE_CHECKING:
    from train.pose.predict import Prediction

_LONGEST_PX = 1024
"""Larger pictures are drawn smaller; the coordinates stay the picture's own."""


def save_prediction(path: Path, image: Image, result: Prediction) -> None:
    """Draw a prediction.

    Args:
        path: of the drawing, a .png.
        image: (H, W, 3) RGB as displayed.
        result: what was predicted in it.

    Raises:
        NotWritten: there is no room, or no right to write.
    """
    height, width, _ = image.shape
    shrink = max(1.0, max(height, width) / _LONGEST_PX)
    small = cv2.resize(
        image, (max(1, round(width / shrink)), max(1, round(height / shrink))), interpolation=cv2.INTER_AREA
    )
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(13, 4.8), layout="constrained")
        whole, crop = figure.add_subplot(1, 3, 1), figure.add_subplot(1, 3, 2)
        space = figure.add_subplot(1, 3, 3, projection="3d")
        for axes in (whole, crop):
            axes.imshow(small, extent=(0, width, height, 0), interpolation="nearest" if shrink == 1 else "antialiased")
            _draw_flat(axes, result.keypoints_px)
            axes.set_facecolor("0.9")
        x0, y0, x1, y1 = result.box_px
        whole.add_patch(mpl.patches.Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor="0.5", linestyle=":"))
        whole.set_xlim(0, width)
        whole.set_ylim(height, 0)
        whole.set_title(printable(result.image.name)[-60:], fontsize=9, parse_math=False)
        crop.set_xlim(x0, x1)
        crop.set_ylim(y1, y0)
        crop.set_aspect("equal")
        crop.set_title("what the network was shown", fontsize=9)
        _draw_space(space, result.joints, result.unit)
        camera = "assumed: focal length = longer side" if result.intrinsics_assumed else "given"
        box = "" if result.box_needed == "no" else f"   box needed: {result.box_needed}"
        figure.supxlabel(f"camera {camera}{box}", fontsize=8, color="0.35")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)  # of a name in another script
            save_figure(path, figure, dpi=110)


def _draw_flat(axes: Any, keypoints_px: npt.NDArray[np.float64]) -> None:
    for finger, colour in zip(FINGERS.values(), FINGER_COLOURS, strict=True):
        x, y = keypoints_px[[0, *finger]].T
        shade = tuple(value / 255 for value in colour)
        axes.plot(x, y, "-", color="black", linewidth=3.2, solid_capstyle="round")  # seen on bright and dark alike
        axes.plot(x, y, ".-", color=shade, linewidth=1.8, markersize=5)


def _draw_space(axes: Any, joints: npt.NDArray[np.float64], unit: str) -> None:
    """The hand as a viewer beside the camera sees it: x to the right, up is up, depth into the page."""
    factor, label = (100.0, "cm") if unit == "m" else (1.0, "reference bones: scale-normalised")
    points = (joints - joints[:1]) * factor
    x, y, z = points[:, 0], points[:, 2], -points[:, 1]
    for finger, colour in zip(FINGERS.values(), FINGER_COLOURS, strict=True):
        rows = [0, *finger]
        axes.plot(x[rows], y[rows], z[rows], ".-", color=tuple(value / 255 for value in colour), linewidth=2)
    middle = np.array([(axis.min() + axis.max()) / 2 for axis in (x, y, z)])
    reach = max(float(max(np.ptp(axis) for axis in (x, y, z))), 1e-3) * 0.55
    axes.set_xlim(middle[0] - reach, middle[0] + reach)
    axes.set_ylim(middle[1] - reach, middle[1] + reach)
    axes.set_zlim(middle[2] - reach, middle[2] + reach)
    axes.set_box_aspect((1, 1, 1))
    axes.view_init(elev=15, azim=-65)
    axes.set_xlabel("x")
    axes.set_ylabel("depth")
    axes.set_title(f"from the wrist, in {label}", fontsize=9)
    axes.tick_params(labelsize=7)
