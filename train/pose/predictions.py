"""Predicted poses, and their file `predictions.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from peclr_dali.errors import UserError
from peclr_dali.parsing import parse_json, regular
from peclr_dali.skeleton import HAND
from peclr_dali.train.pose.metrics import Floats
from peclr_dali.writing import write_text

FILE = "predictions.json"
_KEYS = {"image", "drawing", "box_px", "mirrored", "keypoints_px", "joints", "intrinsics"}


@dataclass(frozen=True)
class Prediction:
    """A pose in a picture.

    Attributes:
        image: absolute path of the picture.
        drawing: name of the drawing, beside `predictions.json`; None if it was not asked for.
        box_px: (4,) x0, y0, x1, y1 of the square that the network saw; it may extend beyond the picture.
        mirrored: whether the network saw the square mirrored, left for right, since it shows a left hand. The other
            values belong to the picture itself.
        keypoints_px: (K, 2) in pixels of the picture as displayed, corner-based.
        joints: (K, 3) in the camera's frame (x right, y down, z forward), in `Predicted.unit`; None if the network was
            trained without depths.
        intrinsics: (3, 3), as given or assumed.
    """

    image: Path
    drawing: str | None
    box_px: Floats
    mirrored: bool
    keypoints_px: Floats
    joints: Floats | None
    intrinsics: Floats


@dataclass(frozen=True)
class Predicted:
    """The results of one call.

    Attributes:
        unit: of the joints: "m", or "reference_bone": the length of the reference bone is 1.
        unreadable: pictures that could not be read.
    """

    checkpoint: Path
    unit: Literal["m", "reference_bone"]
    intrinsics_assumed: bool
    predictions: list[Prediction]
    unreadable: list[Path]


def write_predictions(folder: Path, predicted: Predicted) -> None:
    """Write `predictions.json`: a line for what all predictions share, and one for each of them."""
    shared = {
        "checkpoint": str(predicted.checkpoint),
        "keypoints": HAND.keypoints,
        "unit": predicted.unit,
        "intrinsics_assumed": predicted.intrinsics_assumed,
    }
    lines = [
        {
            "image": str(one.image),
            "drawing": one.drawing,
            "box_px": one.box_px.round(2).tolist(),
            "mirrored": one.mirrored,
            "keypoints_px": one.keypoints_px.round(3).tolist(),
            "joints": None if one.joints is None else one.joints.round(6).tolist(),
            "intrinsics": one.intrinsics.tolist(),
        }
        for one in predicted.predictions
    ]
    text = ",\n".join(map(json.dumps, lines))
    write_text(folder / FILE, f'{json.dumps(shared)[:-1]}, "predictions": [\n{text}\n]}}\n')


def read_predictions(folder: Path) -> Sequence[Mapping[str, Any]]:
    """The predictions in a folder of `predict`, at least one, with the keys that `write_predictions` writes.

    Raises:
        UserError: there are none.
    """
    try:
        predictions: Sequence[Mapping[str, Any]] = parse_json(regular(folder / FILE).read_bytes())["predictions"]
        usable = bool(predictions) and all(one.keys() >= _KEYS for one in predictions)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        usable = False
    if not usable:
        raise UserError(f"{folder} holds no predictions; expected a folder that predict wrote. Run predict first")
    return predictions
