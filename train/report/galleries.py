"""The pictures of a report: views, predictions, large errors, and nearest neighbours before and after pre-training."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

import cv2
import numpy as np
import torch

from peclr_dali.errors import UserError
from peclr_dali.models.encoders import Encoder, build_encoder
from peclr_dali.pipelines.config import is_address
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.evaluation.report import CAPTION_PX
from peclr_dali.train.pose.pictures import POSE_PX
from peclr_dali.train.pose.predictions import read_predictions
from peclr_dali.train.probe import features_of_rows, trained_encoder
from peclr_dali.train.report.contents import Measured, Run
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.train.runs.pictures import Image, read_sheet, shown_side_px


class Picture(NamedTuple):
    """A picture on the page."""

    format: Literal["png", "jpeg"]
    content: bytes
    caption: str = ""  # a line below it

    @property
    def uri(self) -> str:
        """The picture as a data URI."""
        return f"data:image/{self.format};base64,{base64.b64encode(self.content).decode()}"


class Section(NamedTuple):
    """Pictures of a kind, with a title and an explanation."""

    title: str
    text: str
    pictures: Sequence[Picture]
    wide: bool = False  # each picture takes a row
    skeletons: bool = False  # the colours need a legend


def jpeg(picture: Image, caption: str = "") -> Picture:
    """A picture (H, W, 3) RGB for the page."""
    encoded = cv2.imencode(".jpg", picture[..., ::-1], [cv2.IMWRITE_JPEG_QUALITY, 84])[1]
    return Picture("jpeg", encoded.tobytes(), caption)


def galleries(runs: Sequence[Run], measured: Measured | None, predicted: Path | None) -> list[Section]:
    """All pictures but charts: of the first run of each kind, of the measured run, and of a folder of `predict`."""
    first_of = {run.kind: run for run in reversed(runs)}
    pretrained, tuned = first_of.get("pre-training"), first_of.get("fine-tuning")
    parts, sections = "label · prediction · both from the side, the label in grey", list[Section]()
    if (seen := pretrained or tuned) is not None:
        side_px = shown_side_px(seen.config.geometry.side_px)
        views, text = 1, "Views of training images, with their keypoints."
        if pretrained is not None:
            views = 2
            text = (
                "Two views of each image. Skeletons, where an image has keypoints, were moved by the matrices that "
                "warped the pixels, to show that both agree. The network does not see them, and the loss does not "
                "use keypoints."
            )
        sections += _sheet("What the network saw", text, seen.folder.views_picture, side_px, views * side_px)
    if predicted is not None:
        sections.append(predictions(predicted))
    if tuned is not None:
        text = f"Not selected, from the validation of “{tuned.name}”: {parts}."
        sections += _sheet("Held-out images", text, tuned.folder.predictions_picture, POSE_PX, 3 * POSE_PX)
    if measured is not None:
        text = f"The samples on which “{measured.runs[0].name}” has the largest errors after alignment: {parts}."
        file = measured.runs[0].folder.root / "evaluation" / "worst.png"
        sections += _sheet("Largest errors", text, file, POSE_PX + CAPTION_PX, 3 * POSE_PX)
    if pretrained is not None:
        sections.append(neighbours(pretrained))
    return sections


def _sheet(title: str, text: str, file: Path, height: int, width: int) -> list[Section]:
    """The first twelve pictures of a sheet of pictures (height, width); nothing if there is no file."""
    if not file.exists():
        return []
    pictures = read_sheet(file, height=height, width=width)[:12]
    return [Section(title, text, [jpeg(picture) for picture in pictures], skeletons=True)]


def predictions(folder: Path) -> Section:
    """The drawings in a folder of `predict`. A folder without predictions is a `UserError`."""
    results = read_predictions(folder)
    drawn = [
        prediction
        for prediction in results["predictions"]
        if prediction["drawing"] is not None and (folder / prediction["drawing"]).exists()  # not where it was stopped
    ]
    # By the spread of the keypoints over the box's side.
    drawn.sort(key=lambda one: one["spread_px"] / (one["box_px"][2] - one["box_px"][0]), reverse=True)
    pictures = [
        Picture(
            "jpeg",
            (folder / prediction["drawing"]).read_bytes(),
            f"{Path(prediction['image']).name}, spread {prediction['spread_px']:.1f} px",
        )
        for prediction in drawn[:48]
    ]
    text = "The picture with the network's box, the network's view (a left hand mirrored), and the pose from the side."
    text += " The least sure come first: those whose keypoints differ most between turned views, for the box's size."
    if len(drawn) > len(pictures):
        text += f" {len(pictures)} of {len(drawn)}."
    if not results["complete"]:
        text += f" Stopped early: predict had done {results['hands_done']} of {results['hands']} hands."
    return Section("Predictions", text, pictures, skeletons=True)


SAMPLE: Final = 400  # images among which neighbours are looked for
QUERIES: Final = 9
COUNT: Final = 5  # neighbours of a query
SIDE_PX: Final = 72  # of a neighbour's view; the query's is twice as large
GAP_PX: Final = 4


def neighbours(run: Run) -> Section:
    """Nearest neighbours of some images before and after a pre-training.

    They are computed here, from the run's newest checkpoint and images. If one is missing, the text says so.
    """
    title = "Nearest neighbours, before and after pre-training"
    if any(is_address(source.root) for source in run.config.data):
        return Section(title, "Not shown: the images are at an address, and are not fetched for a picture", [])
    try:
        path = find_checkpoint(run.folder.root, "the folder of a run with a checkpoint")
        saved, index = load_checkpoint(path), load_index(run.config.data)
        torch.manual_seed(run.config.run.seed)
        before = build_encoder(run.config.encoder, run.config.geometry.side_px).eval()
        pictures = _neighbours((before, trained_encoder(saved, str(path), run.config)), index, run)
    except UserError as error:
        return Section(title, f"Not shown: {error}", [])
    text = (
        f"An image of “{run.name}”, and its nearest among {min(SAMPLE, len(index))} training images, by the angle "
        f"between features, the nearest first. Upper row: before pre-training (weights: {run.config.encoder.weights}). "
        f"Lower row: after {saved['step']} steps. Images of the same group, such as one pose before several "
        "backgrounds, do not count."
    )
    return Section(title, text, pictures)


def _neighbours(encoders: Sequence[Encoder], index: Index, run: Run) -> list[Picture]:
    """A picture for each query: its view, and to the right of it a row for each encoder, with the nearest views."""
    rows = np.random.default_rng(0).permutation(len(index))[:SAMPLE]
    directions = []
    with progress_bar("nearest neighbours") as progress:
        for encoder in encoders:
            places, features, views = features_of_rows(encoder, index, rows, run.config, progress)
            directions.append(features / np.linalg.norm(features, axis=1, keepdims=True).clip(1e-12))
    group = index.groups[rows[places]]

    def shown(place: int, side_px: int) -> Image:
        resized = cv2.resize(views[place], (side_px, side_px), interpolation=cv2.INTER_CUBIC)
        return np.pad(resized, ((0, GAP_PX), (0, GAP_PX), (0, 0)), constant_values=255)

    pictures = []
    for query in range(min(QUERIES, len(places))):
        others = np.flatnonzero(group != group[query])
        nearest = [
            others[np.argsort(-vectors[others] @ vectors[query], kind="stable")[:COUNT]] for vectors in directions
        ]
        lines = [np.hstack([shown(place, SIDE_PX) for place in places_of_encoder]) for places_of_encoder in nearest]
        picture = np.hstack([shown(query, 2 * SIDE_PX + GAP_PX), np.vstack(lines)])
        pictures.append(jpeg(picture[:-GAP_PX, :-GAP_PX], "Above: before. Below: after."))
    return pictures
