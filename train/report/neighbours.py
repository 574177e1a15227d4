"""Nearest neighbours of a few images, before and after pre-training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.errors import UserError
from peclr_dali.models.encoders import build_encoder
from peclr_dali.pipelines.config import is_address
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.probe import Pixels, features_of_rows, trained_encoder
from peclr_dali.train.report.contents import Run
from peclr_dali.train.report.galleries import Picture, Section, jpeg
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint
from peclr_dali.train.runs.meter import progress_bar
from peclr_dali.train.runs.pictures import Image

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
            readable, features, views = features_of_rows(encoder, index, rows, config, progress)
            directions.append(features / np.linalg.norm(features, axis=1, keepdims=True).clip(1e-12))
    places, group = np.flatnonzero(readable), index.groups[rows]
    pictures = []
    for query in places[:QUERIES]:
        others = places[group[places] != group[query]]
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
