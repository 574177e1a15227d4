"""The metrics of a pose network on held-out images, while it trains."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from models.pose import PoseNetwork
from pipelines.config import each_source
from pipelines.samples.index import Index
from pipelines.sources import load_index
from train.distributed.world import World
from train.evaluation.metrics import (
    Floats,
    PoseErrors,
    in_one_place,
    mean_over_hands,
    mean_over_keypoints,
    pixel_errors,
    pose_errors,
    score_tables,
)
from train.finetune_config import FinetuneConfig
from train.pose.inference import Poses, estimate_poses
from train.pose.targets import PoseLabels

SHOWN = 12
"""Hands in the picture of predictions."""


@dataclass(frozen=True)
class Validation:
    """Held-out images and what is known about them.

    Attributes:
        index: the images.
        labels: their hands.
    """

    index: Index
    labels: PoseLabels


def load_validation(config: FinetuneConfig) -> Validation | None:
    """The validation split of the sources that are trained on; None if the run holds nothing out.

    Raises:
        UserError: the split cannot be read.
    """
    sources = each_source(config.data)
    if config.validation.every_epochs == 0 or any(source.split != "train" for source in sources):
        return None
    index = load_index([dataclasses.replace(source, split="val", label_fraction=1.0) for source in sources])
    return Validation(index, PoseLabels(index, config.pose))


def validate(
    network: PoseNetwork, validation: Validation, config: FinetuneConfig, world: World
) -> tuple[dict[str, float], Poses]:
    """Metrics of the network in eval mode, in which it is left; the same on all ranks.

    Returns:
        EPE and PA-EPE in cm, AUC and PA-AUC, 2D EPE in pixels of the source, NaN where nothing can be measured; and
        the poses.
    """
    index = validation.index
    poses = estimate_poses(network, index, index.targets["K"], config, world, keep_images=SHOWN)
    tables = error_tables(poses, validation)
    return {name: mean_over_keypoints(mean_over_hands(table)) for name, table in tables.items()}, poses


def best_of(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The validation of least PA-EPE, the first of equals; any figure is better than NaN."""
    return min(rows, key=lambda row: math.inf if math.isnan(row["pa_epe_cm"]) else row["pa_epe_cm"])


def error_tables(poses: Poses, validation: Validation) -> dict[str, Floats]:
    """The metrics before any mean, (N, 21) each, NaN where a keypoint is not known: see `score_tables`.

    A prediction that is no number counts as unknown, too, and so does a hand whose label is one point.
    """
    labels, samples = validation.labels, poses.samples
    true_m, scale_m = labels.joints_m[samples], labels.scale_m[samples].astype(np.float64)
    predicted_m = poses.joints * scale_m[:, None, None]
    known = np.isfinite(true_m).all(axis=2) & np.isfinite(predicted_m).all(axis=2)
    sound = ~in_one_place(true_m, known)[:, None]
    known &= sound
    assert validation.index.keypoints_px is not None
    true_px = validation.index.keypoints_px[samples]
    seen = np.isfinite(true_px).all(axis=2) & sound & np.isfinite(poses.keypoints_px).all(axis=2)
    return {
        **score_tables(
            pose_errors(predicted_m, true_m, valid=known) if known.any() else PoseErrors.unknown(*known.shape)
        ),
        "epe_px": (
            pixel_errors(poses.keypoints_px, true_px, valid=seen) if seen.any() else np.full(seen.shape, np.nan)
        ),
    }
