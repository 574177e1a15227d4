"""The pictures of a report: views, predictions, and samples with large errors."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import cv2

from peclr_dali.errors import UserError
from peclr_dali.train.evaluation.report import CAPTION_PX
from peclr_dali.train.pose.metrics import METRICS
from peclr_dali.train.pose.pictures import POSE_PX
from peclr_dali.train.pose.predictions import read_predictions
from peclr_dali.train.report.charts import Picture, Section
from peclr_dali.train.report.contents import Measured, Run
from peclr_dali.train.report.numbers import as_text
from peclr_dali.train.runs.pictures import Image, read_picture, read_sheet, shown_side_px

SHOWN: Final = 12
"""Largest number of pictures of a kind."""
PREDICTIONS: Final = 200
"""Largest number of predictions."""
_PARTS: Final = "label · prediction · both from the side"


def views(runs: Sequence[Run]) -> list[Section]:
    """Views of the first pre-training run, or else of the first run."""
    run = next((run for run in runs if run.kind == "pre-training"), next(iter(runs), None))
    if run is None or not run.folder.views_picture.exists():
        return []
    side_px, count = shown_side_px(run.config.geometry.side_px), 2 if run.kind == "pre-training" else 1
    pictures = _sheet(run.folder.views_picture, side_px, count * side_px)
    text = "Two views of each image" if count == 2 else "Views of training images"
    text += ". Skeletons, where an image has keypoints, were transformed by the matrices that warped the pixels."
    return [Section("What the network saw", text, [jpeg(picture, "views of an image") for picture in pictures])]


def predictions(folder: Path) -> Section:
    """The drawings in a folder of `predict`. A folder without predictions, or a lost drawing, is a `UserError`."""
    drawn = [one for one in read_predictions(folder) if one["drawing"] is not None]
    pictures = []
    for one in drawn[:PREDICTIONS]:
        picture, name = read_picture(folder / one["drawing"]), Path(one["image"]).name
        if picture is None:
            raise UserError(f"{folder / one['drawing']} cannot be read any more: run predict again")
        pictures.append(jpeg(picture, f"pose predicted in {name}", name))
    text = "The picture, the view of the network with its prediction, and the prediction in 3D."
    if len(drawn) > len(pictures):
        text += f" The first {len(pictures)} of {len(drawn)}."
    return Section("Predictions", text, pictures, wide=True)


def held_out(runs: Sequence[Run]) -> list[Section]:
    """Samples from the validation of the first fine-tuned run."""
    run = next((run for run in runs if run.kind == "fine-tuning" and run.folder.predictions_picture.exists()), None)
    if run is None:
        return []
    pictures = _sheet(run.folder.predictions_picture, POSE_PX, 3 * POSE_PX)
    text = f"Not selected, from the validation of “{run.name}”: {_PARTS}. From the side, the label is grey."
    return [Section("Held-out images", text, [jpeg(picture, _PARTS) for picture in pictures])]


def largest_errors(found: Measured) -> list[Section]:
    """Held-out samples with the largest errors of the first run."""
    run = found.runs[0]
    sheet = run.folder.root / "evaluation" / "worst.png"
    if run.evaluation is None or not sheet.exists():
        return []
    pictures = [picture[CAPTION_PX:] for picture in _sheet(sheet, POSE_PX + CAPTION_PX, 3 * POSE_PX)]
    worst = zip(pictures, run.evaluation["worst"], strict=False)
    text = f"The samples on which “{run.name}” has the largest errors after alignment: {_PARTS}."
    return [Section("Largest errors", text, [jpeg(picture, _PARTS, _errors_of(pose)) for picture, pose in worst])]


def _errors_of(pose: Mapping[str, Any]) -> str:
    shown = [(METRICS[name], pose.get(name)) for name in ("pa_epe_cm", "epe_cm", "epe_px")]
    words = [f"{metric.title} {as_text(value, metric)} {metric.unit}" for metric, value in shown if value is not None]
    return " · ".join([Path(pose["file"]).name, *words[:2]])


def _sheet(path: Path, height: int, width: int) -> list[Image]:
    """The first pictures of a sheet of a run or of `evaluate`."""
    try:
        return read_sheet(path, height=height, width=width)[:SHOWN]
    except OSError as error:
        raise UserError(f"{error}; expected a picture of a run or of evaluate. Run that command again") from error


def jpeg(picture: Image, alt: str, caption: str = "") -> Picture:
    """A picture (H, W, 3) RGB for the page."""
    encoded = cv2.imencode(".jpg", picture[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 84])[1]
    uri = f"data:image/jpeg;base64,{base64.b64encode(encoded.tobytes()).decode()}"
    return Picture(uri, picture.shape[1], picture.shape[0], alt, caption)
