"""The results of `predict` in a folder: `predictions.json` and the drawings that it names."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from peclr_dali.errors import UserError
from peclr_dali.parsing import parse_json, regular
from peclr_dali.pipelines.arrays import DoubleArray
from peclr_dali.skeleton import HAND
from peclr_dali.writing import require_new, require_own_results, write_text

FILE: Final = "predictions.json"


@dataclass
class Prediction:
    """A pose in a picture.

    Attributes:
        image: absolute path of the picture.
        drawing: name of the drawing, beside `predictions.json`; None if it was not asked for. The last one of a call
            that was stopped may be missing.
        box_px: (4,) x0, y0, x1, y1 of the square that the network saw; it may extend beyond the picture.
        mirrored: whether the network saw the square mirrored, left for right, since it shows a left hand. The other
            values belong to the picture itself.
        keypoints_px: (K, 2) in pixels of the picture as displayed, corner-based.
        spread_px: how far apart turned views have the keypoints, in the same pixels: the larger, the less sure.
        joints: (K, 3) in the camera's frame (x right, y down, z forward), in `Predictions.unit`; None if the network
            was trained without depths.
        intrinsics: (3, 3), as given or assumed.
    """

    image: Path
    drawing: str | None
    box_px: DoubleArray
    mirrored: bool
    keypoints_px: DoubleArray
    spread_px: float
    joints: DoubleArray | None
    intrinsics: DoubleArray


@dataclass
class Predictions:
    """The results of one call.

    Attributes:
        unit: of the joints: "m", or "reference_bone": the length of the reference bone is 1.
        hands: number of hands that were asked for: boxes, or whole pictures.
        hands_done: number of them that were predicted, or whose picture could not be read.
        complete: whether the call went through all of them; False: it was stopped before.
        unreadable: pictures that could not be read.
    """

    checkpoint: Path
    unit: Literal["m", "reference_bone"]
    intrinsics_assumed: bool
    hands: int
    hands_done: int = 0
    complete: bool = False
    keypoints: tuple[str, ...] = HAND.keypoints
    unreadable: list[Path] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)


def write_predictions(folder: Path, results: Predictions) -> None:
    """Write `predictions.json`, with the attributes of `Predictions` and `Prediction`. The folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FILE, json.dumps(vars(results), default=_for_json) + "\n")


def _for_json(value: object) -> object:
    if isinstance(value, np.ndarray):
        return value.round(6).tolist()
    return vars(value) if isinstance(value, Prediction) else str(value)


def read_predictions(folder: Path) -> Mapping[str, Any]:
    """The results in a folder of `predict`, at least one pose, with the attributes of `Predictions` and `Prediction`.

    Raises:
        UserError: there are none.
    """
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
        results: Mapping[str, Any] = parse_json(regular(folder / FILE).read_bytes())
        predictions = results["predictions"]
        if (
            predictions
            and results.keys() >= {*Predictions.__annotations__}
            and all(prediction.keys() >= {*Prediction.__annotations__} for prediction in predictions)
        ):
            return results
    raise UserError(f"{folder} holds no predictions; expected a folder that predict wrote. Run predict first")


def earlier_drawings(folder: Path, *, force: bool) -> set[str]:
    """The names of the drawings of an earlier call in a folder for results, which a new call replaces.

    Raises:
        UserError: a file there is not of this command, or is named like a drawing and is none, and not `force`.
    """
    names = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    require_own_results(folder, [FILE, *names], force=force)
    try:
        predictions = read_predictions(folder)["predictions"]
    except UserError:  # there are no predictions, also after a call that was killed
        return set()
    drawn = {Path(prediction["drawing"]).name for prediction in predictions if isinstance(prediction["drawing"], str)}
    require_new(*(folder / name for name in names if re.match(r"\d{4,}_", name) and name not in drawn), force=force)
    return drawn
