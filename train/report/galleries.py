"""The pictures of a report: views, predictions, large errors, and nearest neighbours before and after pre-training."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.errors import UserError
from peclr_dali.models.encoders import build_encoder
from peclr_dali.pipelines.config import is_address
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.evaluation.report import CAPTION_PX
from peclr_dali.train.pose.pictures import POSE_PX
from peclr_dali.train.pose.predict import read_predictions
from peclr_dali.train.probe import Pixels, features_of_rows, trained_encoder
from peclr_dali.train.report.contents import Measured, Run
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.train.runs.pictures import Image, read_picture, read_sheet, shown_side_px

SHOWN: Final = 12
"""Largest number of pictures of a kind."""
PREDICTIONS: Final = 48
"""Largest number of predictions."""
_PARTS: Final = "label · prediction · both from the side, the label in grey"


class Picture(NamedTuple):
    """A picture as a data URI, its size in pixels, its alternative text, and a line below it."""

    uri: str
    width: int
    height: int
    alt: str
    caption: str = ""


class Section(NamedTuple):
    """Pictures of a kind, with a title and a line of explanation.

    Attributes:
        wide: pictures take a row each.
        skeletons: they show skeletons, whose colours need a legend.
    """

    title: str
    text: str
    pictures: Sequence[Picture]
    wide: bool = False
    skeletons: bool = False


def views(runs: Sequence[Run]) -> list[Section]:
    """Views of the first pre-training run, or else of the first run."""
    run = next((run for run in runs if run.kind == "pre-training"), next(iter(runs), None))
    if run is None or not run.folder.views_picture.exists():
        return []
    side_px, count = shown_side_px(run.config.geometry.side_px), 2 if run.kind == "pre-training" else 1
    pictures = read_sheet(run.folder.views_picture, height=side_px, width=count * side_px)[:SHOWN]
    text = "Two views of each image" if count == 2 else "Views of training images"
    text += ". Skeletons, where an image has keypoints, were transformed by the matrices that warped the pixels."
    shown = [jpeg(picture, "views of an image") for picture in pictures]
    return [Section("What the network saw", text, shown, skeletons=True)]


def predictions(folder: Path) -> Section:
    """The drawings in a folder of `predict`. A folder without predictions, or a lost drawing, is a `UserError`."""
    drawn = [one for one in read_predictions(folder) if one["drawing"] is not None]
    pictures = []
    for one in drawn[:PREDICTIONS]:
        picture, name = read_picture(folder / one["drawing"]), Path(one["image"]).name
        if picture is None:
            raise UserError(f"{folder / one['drawing']} cannot be read any more: run predict again")
        pictures.append(jpeg(picture, f"pose predicted in {name}", name))
    text = "The picture with the network's box, the network's view (a left hand mirrored), and the pose from the side."
    if len(drawn) > len(pictures):
        text += f" The first {len(pictures)} of {len(drawn)}."
    return Section("Predictions", text, pictures, skeletons=True)


def held_out(runs: Sequence[Run]) -> list[Section]:
    """Samples from the validation of the first fine-tuned run."""
    run = next((run for run in runs if run.kind == "fine-tuning" and run.folder.predictions_picture.exists()), None)
    if run is None:
        return []
    pictures = read_sheet(run.folder.predictions_picture, height=POSE_PX, width=3 * POSE_PX)[:SHOWN]
    text = f"Not selected, from the validation of “{run.name}”: {_PARTS}."
    return [Section("Held-out images", text, [jpeg(picture, _PARTS) for picture in pictures], skeletons=True)]


def errors(found: Measured) -> list[Section]:
    """PCK curves and errors by keypoint, as `evaluate` drew them."""
    file = found.runs[0].folder.root / "evaluation" / "pck.png"
    picture = read_picture(file)
    if picture is None:
        return []
    text = "PCK: the share of keypoints whose error is at most the distance. Runs have the names of their folders."
    uri = f"data:image/png;base64,{base64.b64encode(file.read_bytes()).decode()}"
    shown = Picture(uri, picture.shape[1], picture.shape[0], "PCK curves, and errors of each keypoint")
    return [Section("Where the errors are", text, [shown], wide=True)]


def largest_errors(found: Measured) -> list[Section]:
    """Held-out samples with the largest errors of the first run."""
    run = found.runs[0]
    sheet = run.folder.root / "evaluation" / "worst.png"
    if not sheet.exists():
        return []
    pictures = read_sheet(sheet, height=POSE_PX + CAPTION_PX, width=3 * POSE_PX)[:SHOWN]
    text = f"The samples on which “{run.name}” has the largest errors after alignment: {_PARTS}."
    return [Section("Largest errors", text, [jpeg(picture, _PARTS) for picture in pictures], skeletons=True)]


def jpeg(picture: Image, alt: str, caption: str = "") -> Picture:
    """A picture (H, W, 3) RGB for the page."""
    encoded = cv2.imencode(".jpg", picture[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 84])[1]
    uri = f"data:image/jpeg;base64,{base64.b64encode(encoded.tobytes()).decode()}"
    return Picture(uri, picture.shape[1], picture.shape[0], alt, caption)


SAMPLE: Final = 400
"""Images among which neighbours are looked for."""
QUERIES: Final = 9
COUNT: Final = 5
"""Neighbours of a query."""
SIDE_PX: Final = 72
"""Side of a neighbour's view; the query's is twice as large."""
GAP_PX: Final = 4


def neighbours(runs: Sequence[Run]) -> list[Section]:
    """Nearest neighbours of the first pre-training run, if there is one.

    They are computed here, from the run's newest checkpoint and images. If one is missing, the text says so.
    """
    run = next((run for run in runs if run.kind == "pre-training"), None)
    if run is None:
        return []
    title = "Nearest neighbours, before and after pre-training"
    try:
        step, count, pictures = _before_and_after(run)
    except UserError as error:
        return [Section(title, f"Not shown: {error}", [])]
    weights = run.config.encoder.weights
    start = "random weights" if weights == "random" else f"the weights “{weights}”"
    text = (
        f"An image of “{run.name}”, and its nearest among {count} training images, the nearest first. Upper row: "
        f"by the encoder with {start}, before pre-training. Lower row: after {step} steps. The distance is the angle "
        "between features. Images of the same group, such as one pose before several backgrounds, do not count."
    )
    return [Section(title, text, pictures)]


def _before_and_after(run: Run) -> tuple[int, int, list[Picture]]:
    """The step of the newest checkpoint, the number of images, and a picture for each query."""
    config = run.config
    if any(is_address(source.root) for source in config.data):
        raise UserError("the images are at an address, and are not fetched for a picture")
    path = find_checkpoint(run.folder.root, "the folder of a run with a checkpoint")
    saved = load_checkpoint(path)
    index = load_index(config.data)
    rows = np.random.default_rng(0).permutation(len(index))[:SAMPLE]
    torch.manual_seed(config.run.seed)
    before = build_encoder(config.encoder, config.geometry.side_px).eval()
    directions = []
    with progress_bar("nearest neighbours") as progress:
        for encoder in (before, trained_encoder(saved, str(path), config)):
            places, features, views = features_of_rows(encoder, index, rows, config, progress)
            directions.append(features / np.linalg.norm(features, axis=1, keepdims=True).clip(1e-12))
    group = index.groups[rows[places]]
    pictures = []
    for query in range(min(QUERIES, len(places))):
        others = np.flatnonzero(group != group[query])
        nearest = [others[np.argsort(-of[others] @ of[query], kind="stable")[:COUNT]] for of in directions]
        pictures.append(jpeg(_picture(views, query, nearest), "an image and its nearest neighbours"))
    return saved["step"], len(rows), pictures


def _picture(views: Pixels, query: int, nearest: Sequence[npt.NDArray[np.int64]]) -> Image:
    """The query's view, and to the right of it a row of views for each encoder, the query's neighbours."""

    def shown(row: int, side_px: int) -> Image:
        return np.asarray(cv2.resize(views[row], (side_px, side_px), interpolation=cv2.INTER_CUBIC), np.uint8)

    side_px = len(nearest) * (SIDE_PX + GAP_PX) - GAP_PX
    picture = np.full((side_px, side_px + len(nearest[0]) * (SIDE_PX + GAP_PX), 3), 255, np.uint8)
    picture[:, :side_px] = shown(query, side_px)
    for line, rows in enumerate(nearest):
        for place, row in enumerate(rows.tolist()):
            top, left = line * (SIDE_PX + GAP_PX), side_px + GAP_PX + place * (SIDE_PX + GAP_PX)
            picture[top : top + SIDE_PX, left : left + SIDE_PX] = shown(row, SIDE_PX)
    return picture
