"""A prediction and its drawing: the picture with the skeleton, the network's view, and the pose in 3D."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any, Literal

import cv2
import matplotlib as mpl
from matplotlib.figure import Figure

from peclr_dali.errors.terminal import printable
from peclr_dali.skeleton import Skeleton
from peclr_dali.train.pose.metrics import Floats
from peclr_dali.train.runs.pictures import Image, save_figure

Box = tuple[float, float, float, float]

_LONGEST_PX = 1024
"""Longest side of a drawn picture. Coordinates refer to the original picture."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A pose in a picture.

    Attributes:
        picture: path of the drawing. The file of the same name with .json has the values. The name is the image's, with
            a number if it is taken.
        keypoints_px: (K, 2) in pixels of the picture as displayed, corner-based.
        joints: (K, 3) in the camera's frame (x right, y down, z forward), in `unit`; None if the network was trained
            without depths.
        unit: "m", or "reference_bone": the length of the skeleton's reference bone is 1.
        box_px: x0, y0, x1, y1 of the square that the network saw; it may extend beyond the picture.
        mirrored: whether the network saw the square mirrored, left for right, since it shows a left hand. The other
            values belong to the picture itself.
        intrinsics: (3, 3), as given or assumed.
        box_needed: "no" if a box was given; else "likely" or "unknown", with the reason in `note`.
    """

    image: Path
    picture: Path
    skeleton: Skeleton
    keypoints_px: Floats
    joints: Floats | None
    unit: Literal["m", "reference_bone"]
    box_px: Box
    mirrored: bool
    intrinsics: Floats
    intrinsics_assumed: bool
    box_needed: Literal["no", "likely", "unknown"]
    note: str


def save_prediction(path: Path, image: Image, result: Prediction) -> None:
    """Draw a prediction in an image (H, W, 3) RGB, as displayed, into a .png.

    Raises:
        NotWritten: the disk is full, or writing is not permitted.
    """
    height, width, _ = image.shape
    shrink = max(1.0, max(height, width) / _LONGEST_PX)
    size = [max(1, round(length / shrink)) for length in (width, height)]
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(13, 4.8), layout="constrained")
        whole, crop = figure.add_subplot(1, 3, 1), figure.add_subplot(1, 3, 2)
        for axes in (whole, crop):
            axes.imshow(small, extent=(0, width, height, 0), interpolation="nearest" if shrink == 1 else "antialiased")
            _draw_flat(axes, result.keypoints_px, result.skeleton)
            axes.set_facecolor("0.9")
        x0, y0, x1, y1 = result.box_px
        whole.add_patch(mpl.patches.Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor="0.5", linestyle=":"))
        whole.set_xlim(0, width)
        whole.set_ylim(height, 0)
        whole.set_title(printable(result.image.name)[-60:], fontsize=9, parse_math=False)
        crop.set_xlim(*((x1, x0) if result.mirrored else (x0, x1)))
        crop.set_ylim(y1, y0)
        crop.set_aspect("equal")
        mirrored = ", mirrored" if result.mirrored else ""
        crop.set_title(f"what the network was shown{mirrored}", fontsize=9)
        if result.joints is not None:
            space = figure.add_subplot(1, 3, 3, projection="3d")
            _draw_space(space, result.joints, result.unit, result.skeleton)
        camera = "assumed: focal length = longer side" if result.intrinsics_assumed else "given"
        box = "" if result.box_needed == "no" else f"   box needed: {result.box_needed}"
        figure.supxlabel(f"camera {camera}{box}", fontsize=8, color="0.35")
        with warnings.catch_warnings():
            # The font may lack letters of a file's name.
            warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
            save_figure(path, figure, dpi=110)


def _draw_flat(axes: Any, keypoints_px: Floats, skeleton: Skeleton) -> None:
    for chain, colour in skeleton.limbs:
        x, y = keypoints_px[list(chain)].T
        shade = tuple(value / 255 for value in colour)
        axes.plot(x, y, "-", color="black", linewidth=3.2, solid_capstyle="round")  # visible on bright and dark pixels
        axes.plot(x, y, ".-", color=shade, linewidth=1.8, markersize=5)


def _draw_space(axes: Any, joints: Floats, unit: str, skeleton: Skeleton) -> None:
    """Draw the pose in 3D as seen from beside the camera: x to the right, y up, depth into the page."""
    factor, label = (100.0, "cm") if unit == "m" else (1.0, "reference bones: scale-normalised")
    points = (joints - joints[skeleton.keypoints.index(skeleton.root)]) * factor
    x, y, z = points[:, 0], points[:, 2], -points[:, 1]
    for chain, colour in skeleton.limbs:
        rows = list(chain)
        axes.plot(x[rows], y[rows], z[rows], ".-", color=tuple(value / 255 for value in colour), linewidth=2)
    axes.set_aspect("equal", adjustable="datalim")
    axes.view_init(elev=15, azim=-65)
    axes.set_xlabel("x")
    axes.set_ylabel("depth")
    axes.set_title(f"from the {skeleton.root.replace('_', ' ')}, in {label}", fontsize=9)
    axes.tick_params(labelsize=7)
