"""Nearest neighbours of a few images: before and after pre-training, and by the shape of predicted hands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import cv2
import numpy as np
import numpy.typing as npt
import torch

from peclr_dali.errors import UserError
from peclr_dali.models.encoders import build_encoder
from peclr_dali.pipelines.config import each_source, is_address
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.probe.features import Floats, Pixels, features_of_rows, trained_encoder
from peclr_dali.train.report.contents import Run, read_json
from peclr_dali.train.report.galleries import Gallery, Tile, tile
from peclr_dali.train.runs.checkpoint import find_checkpoint, load_checkpoint
from peclr_dali.train.runs.log import progress_bar
from peclr_dali.train.runs.pictures import Image, read_picture

SAMPLE: Final = 400
"""Images among which neighbours are looked for."""
QUERIES: Final = 9
COUNT: Final = 5
"""Neighbours of a query."""
SIDE_PX: Final = 72
"""Side of a neighbour's view; the query's is twice as large."""
GAP_PX: Final = 4


def neighbours(runs: Sequence[Run]) -> list[Gallery]:
    """Nearest neighbours of the first pre-training run, if there is one.

    They are computed here, from the run's newest checkpoint and images. If one is missing, the gallery says so.
    """
    run = next((run for run in runs if run.kind == "pre-training"), None)
    if run is None:
        return []
    title = "Nearest neighbours, before and after pre-training"
    try:
        step, count, tiles = _before_and_after(run)
    except UserError as error:
        return [Gallery(title, f"Not shown: {error}", [])]
    weights = run.config.encoder.weights
    start = "random weights" if weights == "random" else f"the weights “{weights}”"
    text = (
        f"An image of “{run.name}”, and its nearest among {count} training images, the nearest first. Upper row: "
        f"by the encoder with {start}, before pre-training. Lower row: after {step} steps. The distance is the angle "
        "between features. Images of the same group, such as one pose before several backgrounds, do not count."
    )
    return [Gallery(title, text, tiles)]


def _before_and_after(run: Run) -> tuple[int, int, list[Tile]]:
    """The step of the newest checkpoint, the number of images, and a picture for each query."""
    config = run.config
    if any(is_address(source.root) for source in each_source(config.data)):
        raise UserError("the images are at an address, and are not fetched for a picture")
    path = find_checkpoint(run.folder.root, "the folder of a run with a checkpoint")
    saved = load_checkpoint(path)
    index = load_index(config.data)
    rows = np.random.default_rng(0).permutation(len(index))[:SAMPLE]
    torch.manual_seed(config.run.seed)
    before = build_encoder(config.encoder, config.geometry.side_px).eval()
    found = []
    with progress_bar("nearest neighbours") as progress:
        for encoder in (before, trained_encoder(saved, str(path), config)):
            readable, features, views = features_of_rows(encoder, index, rows, config, progress)
            found.append(features)
    places, group = np.flatnonzero(readable), index.groups[rows]
    tiles = []
    for query in places[:QUERIES]:
        others = places[group[places] != group[query]]
        nearest = [nearest_by_angle(features, query, others, COUNT) for features in found]
        picture = _picture(views, query, nearest)
        tiles.append(tile(picture, "an image and its nearest neighbours, before and after pre-training"))
    return saved["step"], len(rows), tiles


def nearest_by_angle(features: Floats, query: int, among: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.int64]:
    """The `count` rows of `among` whose features (N, D) have the smallest angle to those of `query`, nearest first."""
    directions = features / np.linalg.norm(features, axis=1, keepdims=True).clip(1e-12)
    return among[np.argsort(-directions[among] @ directions[query], kind="stable")[:count]]


def neighbours_by_shape(folder: Path) -> list[Gallery]:
    """Nearest neighbours of the first hands in a folder of `predict`, by the shape of their predicted keypoints.

    There are none for fewer than three hands. If a picture is gone since, the gallery says so.
    """
    hands = [read_json(file) for file in sorted(folder.glob("*.json"))]
    if len(hands) < 3:
        return []
    try:
        mirrored = np.array([hand["mirrored"] for hand in hands], bool)
        shapes = _shapes(np.array([hand["keypoints_px"] for hand in hands], np.float32), mirrored)
        boxes_px = np.array([hand["box_px"] for hand in hands], np.float32).reshape(-1, 4)
        images = [Path(hand["image"]) for hand in hands]
    except (LookupError, TypeError, ValueError) as error:
        raise UserError(f"{folder} holds files that predict did not write: run it into a folder of its own") from error
    nearest = []
    for query in range(min(QUERIES, len(hands))):
        order = np.argsort(np.linalg.norm(shapes - shapes[query], axis=(1, 2)), kind="stable")
        nearest.append(order[order != query][:COUNT])
    title = "Nearest neighbours by the predicted shape"
    try:
        crops = {
            row: _crop(images[row], boxes_px[row], mirrored[row])
            for row in {*range(len(nearest)), *np.concatenate(nearest).tolist()}
        }
    except UserError as error:
        return [Gallery(title, f"Not shown: {error}", [])]
    text = (
        f"A hand, and its nearest among {len(hands)} hands, the nearest first. The distance is that of the predicted "
        "keypoints in the picture, without the hand's place and size; left hands are mirrored."
    )
    alt = "a hand and its nearest neighbours by predicted shape"
    return [Gallery(title, text, [tile(_picture(crops, query, [rows]), alt) for query, rows in enumerate(nearest)])]


def _crop(image: Path, box_px: Floats, mirrored: bool) -> Image:
    """The square of a picture that the network saw. A picture that cannot be read is a `UserError`."""
    picture = read_picture(image)
    if picture is None:
        raise UserError(f"{image} cannot be read any more")
    x0, y0, x1, y1 = box_px
    left, right = (x1, x0) if mirrored else (x0, x1)
    corners_px = np.array([[left, y0], [right, y0], [left, y1]], np.float32)
    side_px = 2 * SIDE_PX
    to_crop = cv2.getAffineTransform(corners_px, np.array([[0, 0], [side_px, 0], [0, side_px]], np.float32))
    return np.asarray(cv2.warpAffine(picture, to_crop, (side_px, side_px), flags=cv2.INTER_AREA), np.uint8)


def _picture(views: Pixels | Mapping[int, Image], query: int, nearest: Sequence[npt.NDArray[np.int64]]) -> Image:
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


def _shapes(keypoints_px: Floats, mirrored: npt.NDArray[np.bool_]) -> Floats:
    """Keypoints (N, K, 2) without their position and size, left hands as right ones."""
    shapes = keypoints_px - keypoints_px.mean(axis=1, keepdims=True)
    shapes[mirrored, :, 0] *= -1
    return np.asarray(shapes / np.linalg.norm(shapes, axis=(1, 2), keepdims=True), np.float32)
