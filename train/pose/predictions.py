"""Predicted poses: the file `predictions.json`, and a drawing of each."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import matplotlib as mpl
from matplotlib.figure import Figure

from peclr_dali.errors import UserError
from peclr_dali.errors.terminal import printable
from peclr_dali.parsing import parse_json, regular
from peclr_dali.skeleton import HAND
from peclr_dali.train.pose.metrics import Floats
from peclr_dali.train.runs.pictures import Image, save_figure
from peclr_dali.writing import write_text

FILE = "predictions.json"
_LONGEST_PX = 1024
"""Longest side of a drawn picture. Coordinates refer to the original picture."""
_KEYS = {"image", "drawing", "box_px", "mirrored", "keypoints_px", "joints", "intrinsics"}


@dataclass(frozen=True)
class Prediction:
    """A pose in a picture.

    Attributes:
        image: absolute path of the picture.
        drawing: path of the drawing; None if it was not asked for.
        keypoints_px: (K, 2) in pixels of the picture as displayed, corner-based.
        joints: (K, 3) in the camera's frame (x right, y down, z forward), in `Predicted.unit`; None if the network was
            trained without depths.
        box_px: (4,) x0, y0, x1, y1 of the square that the network saw; it may extend beyond the picture.
        mirrored: whether the network saw the square mirrored, left for right, since it shows a left hand. The other
            values belong to the picture itself.
        intrinsics: (3, 3), as given or assumed.
    """

    image: Path
    drawing: Path | None
    keypoints_px: Floats
    joints: Floats | None
    box_px: Floats
    mirrored: bool
    intrinsics: Floats


@dataclass(frozen=True)
class Predicted:
    """The results of one call.

    Attributes:
        unit: of the joints: "m", or "reference_bone": the length of the reference bone is 1.
        unreadable: a line for each picture that could not be read.
    """

    checkpoint: Path
    unit: Literal["m", "reference_bone"]
    intrinsics_assumed: bool
    predictions: list[Prediction]
    unreadable: list[str]


def write_predictions(folder: Path, predicted: Predicted) -> None:
    """Write `predictions.json`: a line for what all predictions share, and one for each of them."""
    shared = {
        "checkpoint": str(predicted.checkpoint),
        "keypoints": HAND.keypoints,
        "unit": predicted.unit,
        "intrinsics_assumed": predicted.intrinsics_assumed,
    }
    lines = ",\n".join(json.dumps(_as_json(one)) for one in predicted.predictions)
    write_text(folder / FILE, f'{json.dumps(shared)[:-1]}, "predictions": [\n{lines}\n]}}\n')


def _as_json(one: Prediction) -> dict[str, Any]:
    return {
        "image": str(one.image),
        "drawing": None if one.drawing is None else one.drawing.name,
        "box_px": one.box_px.round(2).tolist(),
        "mirrored": one.mirrored,
        "keypoints_px": one.keypoints_px.round(3).tolist(),
        "joints": None if one.joints is None else one.joints.round(6).tolist(),
        "intrinsics": one.intrinsics.tolist(),
    }


def read_predictions(folder: Path) -> Sequence[Mapping[str, Any]]:
    """The predictions in a folder of `predict`, at least one, with the keys that `write_predictions` writes.

    Raises:
        UserError: there are none.
    """
    try:
        predictions = parse_json(regular(folder / FILE).read_bytes())["predictions"]
        usable = bool(predictions) and all(one.keys() >= _KEYS for one in predictions)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        usable = False
    if not usable:
        raise UserError(f"{folder} holds no predictions; expected a folder that predict wrote. Run predict first")
    found: Sequence[Mapping[str, Any]] = predictions
    return found


def save_drawing(path: Path, image: Image, one: Prediction, shared: Predicted) -> None:
    """Draw a prediction into a .png: the picture with the skeleton, the network's view, and the pose in 3D.

    `image` is (H, W, 3) RGB, as displayed.

    Raises:
        OSError: the disk is full, or writing is not permitted.
    """
    height, width, _ = image.shape
    shrink = max(1.0, max(height, width) / _LONGEST_PX)
    size = [max(1, round(length / shrink)) for length in (width, height)]
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    x0, y0, x1, y1 = one.box_px
    with mpl.rc_context({"font.size": 9}):
        figure = Figure(figsize=(13, 4.8), layout="constrained")
        whole, crop = figure.add_subplot(1, 3, 1), figure.add_subplot(1, 3, 2)
        for axes in (whole, crop):
            axes.imshow(small, extent=(0, width, height, 0), interpolation="nearest" if shrink == 1 else "antialiased")
            _draw_flat(axes, one.keypoints_px)
            axes.set_facecolor("0.9")
        whole.add_patch(mpl.patches.Rectangle((x0, y0), x1 - x0, y1 - y0, fill=False, edgecolor="0.5", linestyle=":"))
        whole.set_xlim(0, width)
        whole.set_ylim(height, 0)
        whole.set_title(printable(one.image.name)[-60:], fontsize=9, parse_math=False)
        crop.set_xlim(*((x1, x0) if one.mirrored else (x0, x1)))
        crop.set_ylim(y1, y0)
        crop.set_aspect("equal")
        crop.set_title(f"what the network was shown{', mirrored' if one.mirrored else ''}", fontsize=9)
        if one.joints is not None:
            _draw_space(figure.add_subplot(1, 3, 3, projection="3d"), one.joints, shared)
        camera = "assumed: focal length = longer side" if shared.intrinsics_assumed else "given"
        figure.supxlabel(f"camera {camera}", fontsize=8, color="0.35")
        with warnings.catch_warnings():  # the font may lack letters of a file's name
            warnings.filterwarnings("ignore", message="Glyph", category=UserWarning)
            save_figure(path, figure, dpi=110)


def _draw_flat(axes: Any, keypoints_px: Floats) -> None:
    for chain, colour in HAND.limbs:
        x, y = keypoints_px[list(chain)].T
        shade = tuple(value / 255 for value in colour)
        axes.plot(x, y, "-", color="black", linewidth=3.2, solid_capstyle="round")  # visible on bright and dark pixels
        axes.plot(x, y, ".-", color=shade, linewidth=1.8, markersize=5)


def _draw_space(axes: Any, joints: Floats, shared: Predicted) -> None:
    """Draw the pose in 3D as seen from beside the camera: x to the right, y up, depth into the page."""
    factor, label = (100.0, "cm") if shared.unit == "m" else (1.0, "reference bones: scale-normalised")
    x, z, y = ((joints - joints[0]) * [factor, -factor, factor]).T
    for chain, colour in HAND.limbs:
        rows = list(chain)
        axes.plot(x[rows], y[rows], z[rows], ".-", color=tuple(value / 255 for value in colour), linewidth=2)
    axes.set_aspect("equal", adjustable="datalim")
    axes.view_init(elev=15, azim=-65)
    axes.set_xlabel("x")
    axes.set_ylabel("depth")
    axes.set_title(f"from the wrist, in {label}", fontsize=9)
    axes.tick_params(labelsize=7)
