"""Validation: metrics of a pose network on held-out images during training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from peclr_dali.models.pose import PoseNetwork
from peclr_dali.pipelines.samples.index import Index
from peclr_dali.pipelines.sources import load_index
from peclr_dali.train.config.finetuning import FinetuneConfig
from peclr_dali.train.distributed.world import World
from peclr_dali.train.pose.inference import Poses, estimate_poses
from peclr_dali.train.pose.labels import PoseLabels, labels_to_learn
from peclr_dali.train.pose.metrics import metric_of
from peclr_dali.train.pose.sample_errors import errors_of

SHOWN = 12
"""Number of poses in predictions.png."""


@dataclass(frozen=True)
class Validation:
    """Held-out images and their labels."""

    index: Index
    labels: PoseLabels


def load_validation(config: FinetuneConfig) -> Validation | None:
    """Load the validation split of the training sources; None if the run holds out no images."""
    if config.validation.every_epochs == 0 or any(source.split != "train" for source in config.data):
        return None
    index = load_index([dataclasses.replace(source, split="val", label_fraction=1.0) for source in config.data])
    return Validation(index, labels_to_learn(index))


def validate(
    network: PoseNetwork, validation: Validation, config: FinetuneConfig, world: World
) -> tuple[dict[str, float], Poses]:
    """Compute the network's metrics. It is set to eval mode and left there. All ranks get the same result.

    Returns:
        The metrics: EPE and PA-EPE in cm, AUC and PA-AUC, 2D EPE in pixels of the source; NaN if not measurable, as in
        3D for labels without depth. And the poses. A substitute is measured in place of an unreadable image.
    """
    labels = validation.labels
    poses = estimate_poses(network, validation.index, labels.intrinsics, config, world, keep_images=SHOWN)
    errors = errors_of(poses, labels[poses.samples])
    figures = dict.fromkeys(("epe_cm", "auc", "pa_epe_cm", "pa_auc", "epe_px"), math.nan)
    return figures | {name: metric_of(table) for name, table in errors.tables.items() if name in figures}, poses


def best_of(rows: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    """The row with the smallest PA-EPE, or the smallest 2D EPE if there is no PA-EPE. The first one wins ties."""
    name = "epe_px" if all(math.isnan(row["pa_epe_cm"]) for row in rows) else "pa_epe_cm"
    return min(rows, key=lambda row: math.inf if math.isnan(row.get(name, math.nan)) else row[name])
